"""Control calls on their way: to the engine, and through it to the other frontends of the server."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from streamserve.errors import EngineUnavailable
from streamserve.frontend.sender import Sender
from streamserve.messages import encode_call

RELAY_TIMEOUT_S = 1.0


class Relayed:
    """What the other frontends say to one question: the first answer that is not null, or that there is none.

    Attributes:
        answer: becomes the answer; None when all have said that they have none.
    """

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self.answer = answer
        self._num_asked = math.inf
        self._num_nulls = 0

    def take(self, reply: dict[str, Any]) -> None:
        """One REPLY: how many were asked, or what one of them says."""
        if "asked" in reply:
            self._num_asked = reply["asked"]
        elif reply["answer"] is None:
            self._num_nulls += 1
        elif not self.answer.done():
            self.answer.set_result(reply["answer"])
        if self._num_nulls >= self._num_asked:
            self.give_up()

    def give_up(self) -> None:
        """There is no answer, and none will come."""
        if not self.answer.done():
            self.answer.set_result(None)


class Calls:
    """Sends calls and hands each reply to whoever waits for it.

    Args:
        sender: the request ring's only writer.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._relays: dict[int, Relayed] = {}
        self._last_id = 0

    def send(self, epoch: int, body: dict[str, Any]) -> int:
        """Makes a call whose reply nobody needs to wait for; returns its id."""
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        self._sender.call(encode_call(epoch, self._last_id, body))
        return self._last_id

    async def call(self, epoch: int, body: dict[str, Any]) -> Any:
        """The engine's reply.

        Raises:
            EngineUnavailable: it went away.
        """
        call_id = self.send(epoch, body)
        reply = self._replies[call_id] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        finally:
            del self._replies[call_id]

    async def relay(self, epoch: int, body: Any) -> Any | None:
        """What another frontend answers; None if none of them has an answer within `RELAY_TIMEOUT_S`."""
        call_id = self.send(epoch, {"method": "relay", "body": body})
        relayed = self._relays[call_id] = Relayed(asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(RELAY_TIMEOUT_S):
                return await relayed.answer
        except TimeoutError:
            return None
        finally:
            del self._relays[call_id]

    def take(self, call_id: int, body: Any) -> None:
        """A REPLY has come; it may be for nobody any more."""
        relayed, reply = self._relays.get(call_id), self._replies.get(call_id)
        if relayed is not None:
            relayed.take(body)
        elif reply is not None and not reply.done():
            reply.set_result(body)

    def fail(self, why: str) -> None:
        """The engine went away, and all replies with it."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineUnavailable(why))
        for relayed in self._relays.values():
            relayed.give_up()
