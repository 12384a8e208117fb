"""The engine as an async iterator: `EngineClient.generate()`.

A request is in the engine only while somebody iterates. However the iteration ends (the stream finished, the
caller closed or was cancelled, something failed), one `finally` runs: it sends the one ABORT if the engine
may still be at work, and only then forgets the stream.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.errors import EngineUnavailable, RequestFailed
from streamserve.frontend.limits import Admission
from streamserve.frontend.mailbox import Delta, Mailbox, StreamTable
from streamserve.frontend.pump import EngineFacts, Pump
from streamserve.frontend.sender import Sender
from streamserve.ipc.board import EngineState
from streamserve.messages import AddRequest, Finish
from streamserve.sampling import SamplingParams

_ENDED_WITHOUT_RESULT = (Finish.ABORT, Finish.ERROR)
_UNAVAILABLE = {
    EngineState.STARTING: "The model is loading; try again soon.",
    EngineState.DRAINING: "The server is shutting down.",
    EngineState.DEAD: "The engine died.",
}


@dataclass(slots=True)
class Generation:
    """One request to the engine, and what is known of it so far.

    Attributes:
        prompt: int32[n] token ids.
        params: sampling settings.
        block_hashes: hash of each full block of the prompt; empty if prefixes are not cached.
        priority: smaller runs earlier.
        cached_tokens: prompt tokens found in the prefix cache; known with the first delta.
    """

    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    block_hashes: Sequence[bytes] = ()
    priority: int = 0
    cached_tokens: int = 0

    def as_add(self, stream: int) -> AddRequest:
        """The engine's form of it, under the number `stream`."""
        return AddRequest(
            stream=stream,
            arrival_ns=time.time_ns(),
            tokens=self.prompt,
            num_prompt=len(self.prompt),
            params=self.params,
            block_hashes=self.block_hashes,
            priority=self.priority,
        )


class EngineClient:
    """The frontend's way to the engine.

    Args:
        pump: the channel.
        sender: the request ring's only writer.
        streams: the pump's table of live streams.
        admission: the queue limit.
        heartbeat_timeout_s: silence after which the engine counts as hung.
    """

    def __init__(
        self,
        pump: Pump,
        sender: Sender,
        streams: StreamTable,
        admission: Admission,
        heartbeat_timeout_s: float,
    ) -> None:
        self.admission = admission
        self._pump = pump
        self._sender = sender
        self._streams = streams
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._is_draining = False

    def start(self) -> None:
        """Begins to listen to the engine, on the running loop."""
        self._pump.start()

    def stop(self) -> None:
        """Ends every stream and listens no more."""
        self._pump.stop()

    def drain(self) -> None:
        """Accepts nothing new; live streams go on."""
        self._is_draining = True

    def fail_all(self, why: str) -> None:
        """Ends every live stream with an error."""
        self._streams.fail_all(EngineUnavailable(why))

    @property
    def num_live(self) -> int:
        """Streams that somebody is waiting for."""
        return len(self._streams)

    @property
    def state(self) -> EngineState:
        """READY if a request would be accepted now."""
        return EngineState.DRAINING if self._is_draining else self._pump.state

    @property
    def is_healthy(self) -> bool:
        """Whether the engine serves and has answered its heartbeat."""
        return self.state is EngineState.READY and self._pump.silence_s() < self._heartbeat_timeout_s

    def engine(self) -> EngineFacts:
        """The engine that serves now.

        Raises:
            EngineUnavailable: there is none, or the server is draining.
        """
        engine, state = self._pump.engine, self.state
        if engine is None or state is not EngineState.READY:
            raise EngineUnavailable(_UNAVAILABLE[state])
        return engine

    async def call(self, body: dict[str, Any]) -> Any:
        """The engine's answer to a control call.

        Raises:
            EngineUnavailable: there is no engine, or it went away.
        """
        return await self._pump.call(body)

    async def fresh_gauges(self) -> dict[str, Any]:
        """The engine's numbers as of now: the engine answers a ping with a STATS frame first.

        Raises:
            EngineUnavailable: there is no engine, or it went away.
        """
        await self._pump.call({"method": "ping"})
        return self._pump.gauges

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Runs `generation` and yields what comes, merged if the caller is slow. Ends after the finish.

        The caller must close the iterator (`contextlib.aclosing`): that is what tells the engine.

        Raises:
            Overloaded: too many requests are waiting.
            EngineUnavailable: there is no engine, or it went away.
            RequestFailed: the engine gave this request up.
        """
        engine = self.engine()
        self.admission.enter()
        mailbox = self._streams.open()
        is_waiting = True
        try:
            self._sender.add(generation.as_add(mailbox.stream))
            while True:
                delta = await mailbox.get()
                if is_waiting:
                    is_waiting = False
                    self.admission.start(time.monotonic())
                    generation.cached_tokens = mailbox.cached_tokens
                if delta.finish in _ENDED_WITHOUT_RESULT:
                    raise RequestFailed("The engine could not finish this request.")
                yield delta
                if delta.finish:
                    return
        finally:
            self._release(mailbox, engine.epoch)
            if is_waiting:
                self.admission.leave()

    def _release(self, mailbox: Mailbox, epoch: int) -> None:
        engine = self._pump.engine
        if not mailbox.finish and engine is not None and engine.epoch == epoch:
            self._sender.abort(mailbox.stream)
        self._streams.close(mailbox)
