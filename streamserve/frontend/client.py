"""The engine as an async iterator: `EngineClient.generate()`.

A request is in the engine only while somebody iterates. However the iteration ends (the stream finished, the
caller closed or was cancelled, something failed), one `finally` runs: it sends the one ABORT if the engine
may still be at work, and only then forgets the stream. `Generation.cancel` ends the iteration as the engine
would: the ABORT goes out at once, and the iterator ends when its caller has taken what was there.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.errors import EngineUnavailable, Expired, RequestFailed
from streamserve.frontend.limits import Admission
from streamserve.frontend.mailbox import Delta, Mailbox, StreamTable
from streamserve.frontend.pump import EngineFacts, Pump
from streamserve.frontend.sender import Sender
from streamserve.ipc.board import EngineState
from streamserve.ipc.layout import RingStatistics
from streamserve.messages import AddRequest, Finish, Logprobs
from streamserve.sampling import SamplingParams

_UNAVAILABLE = {
    EngineState.STARTING: "The model is loading; try again soon.",
    EngineState.DRAINING: "The server is shutting down.",
    EngineState.DEAD: "The engine died.",
}


@dataclass(slots=True, eq=False)
class Generation:
    """One request to the engine, and what is known of it so far. Good for one `EngineClient.generate`.

    Attributes:
        prompt: int32[n] token ids.
        params: sampling settings.
        block_hashes: hash of each full block of the prompt, from the root of `cache_salt.encode()`
            (streamserve.hashing); empty if prefixes are not cached.
        priority: smaller runs earlier.
        deadline_ns: wall clock, ns since 1970, by which it must have begun to run; 0 is no limit.
        tenant: whom its tokens are charged to under fair scheduling.
        cache_salt: it shares cached prefixes only with requests of the same salt.
        cached_tokens: prompt tokens found in the prefix cache; known with the first delta.
        began_s: since when the engine runs it, in monotonic seconds; known with the first delta or at the
            end. None if it does not.
        prompt_logprobs: a row for each prompt token but the first, known with the first delta; None if
            `params` does not ask for them.
        is_cancelled: `cancel` was called.
        on_cancel: how `cancel` ends it while it runs; `EngineClient.generate` sets it.
        mailbox: where its deltas come in while it runs; `EngineClient.generate` sets it.
    """

    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    block_hashes: Sequence[bytes] = ()
    priority: int = 0
    deadline_ns: int = 0
    tenant: str = ""
    cache_salt: str = ""
    cached_tokens: int = field(default=0, init=False)
    began_s: float | None = field(default=None, init=False)
    prompt_logprobs: Logprobs | None = field(default=None, init=False)
    is_cancelled: bool = field(default=False, init=False)
    on_cancel: Callable[[], None] | None = field(default=None, init=False, repr=False)
    mailbox: Mailbox | None = field(default=None, init=False, repr=False)

    def cancel(self) -> None:
        """Ends it at once with `Finish.ABORT`, at whatever stage it is; what has come so far stands."""
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def as_add(
        self, stream: int, output: array[int], *, has_run: bool = False, is_suspect: bool = False
    ) -> AddRequest:
        """The engine's form of it.

        Args:
            stream: its number.
            output: tokens of it that earlier engines generated.
            has_run, is_suspect: see `AddRequest`.
        """
        tokens, params = self.prompt, self.params
        if output:
            tokens = np.concatenate([tokens, np.array(output, dtype=np.int32)])
            # With the first token, all is known of the prompt.
            params = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        return AddRequest(
            stream=stream,
            tokens=tokens,
            num_prompt=len(self.prompt),
            params=params,
            block_hashes=self.block_hashes,
            priority=self.priority,
            deadline_ns=0 if has_run else self.deadline_ns,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            has_run=has_run,
            is_suspect=is_suspect,
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
        """The engine that serves now; while another is started in its place, what is known of the last one.

        Raises:
            EngineUnavailable: there is none and there was none, or the server is ending.
        """
        facts, state = self._pump.facts, self.state
        if facts is None or state in (EngineState.DRAINING, EngineState.DEAD):
            raise EngineUnavailable(_UNAVAILABLE[state])
        return facts

    async def call(self, body: dict[str, Any]) -> Any:
        """The engine's answer to a control call.

        Raises:
            EngineUnavailable: there is no engine, it went away, or it does not answer.
        """
        try:
            async with asyncio.timeout(self._heartbeat_timeout_s):
                return await self._pump.call(body)
        except TimeoutError:
            raise EngineUnavailable("The engine does not answer.") from None

    async def fresh_gauges(self) -> dict[str, Any]:
        """The engine's numbers as of now.

        Raises:
            EngineUnavailable: there is no engine, it went away, or it does not answer.
        """
        reply = await self.call({"method": "ping"})
        self._pump.gauges = reply["stats"]
        return self._pump.gauges

    def latest(self) -> tuple[EngineFacts, dict[str, Any]] | None:
        """The engine and the newest numbers it gave, whether or not it accepts requests; None without one."""
        engine, gauges = self._pump.engine, self._pump.gauges
        return None if engine is None or not gauges else (engine, gauges)

    async def relay(self, body: Any) -> Any | None:
        """What another frontend of the server answers to `body` (JSON); None if none has an answer."""
        return await self._pump.relay(body)

    def answer_relays(self, answer: Callable[[Any], Any]) -> None:
        """Sets what answers the other frontends: from their `body` to JSON, None to know nothing of it."""
        self._pump.on_relay = answer

    def ring_statistics(self) -> dict[str, RingStatistics]:
        """Of this frontend's two rings: `request` and `delta`."""
        return {"request": self._sender.statistics(), "delta": self._pump.statistics()}

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Runs `generation` and yields what comes, merged if the caller is slow. Ends after the finish.

        An engine that dies is a pause: the next one goes on.

        The caller must close the iterator (`contextlib.aclosing`): that is what tells the engine.

        Raises:
            Overloaded: too many requests are waiting.
            EngineUnavailable: there is no engine and none will come, or the server is ending.
            Expired: the request was still waiting at its deadline.
            RequestFailed: the engine gave this request up, or died of it.
        """
        if generation.is_cancelled:
            yield Delta([], Finish.ABORT)
            return
        self.engine()
        self.admission.enter()
        live, params = self._pump.live, generation.params
        mailbox = live.open(generation, params.logprobs, params.prompt_logprobs)
        generation.on_cancel = partial(live.cancel, mailbox)
        generation.mailbox = mailbox
        is_waiting = True
        try:
            live.send(mailbox)
            while True:
                delta = await mailbox.get()
                if is_waiting and delta.tokens:
                    is_waiting = False
                    self.admission.start()
                    generation.cached_tokens = mailbox.cached_tokens
                    generation.began_s = mailbox.began_s
                    generation.prompt_logprobs = mailbox.take_prompt_logprobs()
                if delta.finish:
                    self.check(delta)
                yield delta
                if delta.finish:
                    return
        finally:
            generation.on_cancel = generation.mailbox = None
            generation.began_s = mailbox.began_s
            live.close(mailbox)
            if is_waiting:
                self.admission.leave()

    def check(self, delta: Delta) -> None:
        """Tells a failure from an end.

        Raises:
            Expired: the request was still waiting at its deadline.
            RequestFailed: the engine gave this request up.
        """
        if delta.finish == Finish.EXPIRED:
            raise Expired(
                "The request's time in the queue ran out before its turn came.",
                self.admission.retry_after_s(),
            )
        if delta.finish == Finish.ERROR:
            raise RequestFailed("The engine could not finish this request.")
