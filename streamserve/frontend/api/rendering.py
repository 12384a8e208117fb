"""Chat templates off the event loop, with a time limit.

A template may take for ever, by fault or on purpose. So each gets a short turn on one of a few threads; what
is not done by then starts over in the slow lane, on one thread of its own, and is given up at the limit. A
few templates that never end thus hold up nobody but each other. A rendering also rests every now and then,
which is when the event loop gets the interpreter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from streamserve.errors import ConfigError, InvalidRequest
from streamserve.frontend.text.template import ChatTemplate, Conversation

RENDER_LIMIT_S = 30.0
TURN_S = 0.25
REST_EVERY_S = 0.001
NUM_THREADS = 2


class _TurnOver(Exception):
    """The short turn was not enough."""


class _Turn:
    """The clock of one rendering, which calls it again and again.

    Args:
        length_s: how long it may take from its first call on.
        end_s: when it has to be over, monotonic.
    """

    def __init__(self, length_s: float, end_s: float) -> None:
        self._length_s = length_s
        self._end_s = end_s
        self._begin_s: float | None = None
        self._rest_s = 0.0

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self._end_s = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self._begin_s is None:
            self._begin_s = now
        if now >= self._end_s or now - self._begin_s >= self._length_s:
            raise _TurnOver
        if now >= self._rest_s:
            # Gives up the interpreter lock at once to whoever waits for it.
            time.sleep(0)
            self._rest_s = now + REST_EVERY_S


class Renderer:
    """Renders conversations.

    Args:
        template: the model's.
        limit_s: how long one may take, waiting for a thread included.
        turn_s: how long it may take before it goes to the slow lane.
    """

    def __init__(
        self, template: ChatTemplate, *, limit_s: float = RENDER_LIMIT_S, turn_s: float = TURN_S
    ) -> None:
        self._template = template
        self._limit_s = limit_s
        self._turn_s = turn_s
        self._lane = ThreadPoolExecutor(NUM_THREADS, "render")
        self._slow_lane = ThreadPoolExecutor(1, "render-slow")

    async def render(
        self, conversation: Conversation, *, source: str | None = None, max_chars: int | None = None
    ) -> str:
        """The prompt text of `conversation`.

        Args:
            source: a template to use instead of the model's.
            max_chars: a longer text is given up.

        Raises:
            InvalidRequest: the template cannot be used, refuses the conversation or takes too long.
        """
        end_s = time.monotonic() + self._limit_s

        def work(turn: _Turn) -> str:
            template = self._template if source is None else self._compile(source)
            return template.render(conversation, turn, max_chars)

        try:
            return await _run(self._lane, work, _Turn(self._turn_s, end_s))
        except _TurnOver:
            pass
        try:
            return await _run(self._slow_lane, work, _Turn(self._limit_s, end_s))
        except _TurnOver:
            raise InvalidRequest(
                f"The chat template took longer than {self._limit_s:g} s for these messages.", "messages"
            ) from None

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._template.special_tokens)
        except ConfigError as error:
            raise InvalidRequest(str(error), "chat_template") from error


async def _run(lane: Executor, work: Callable[[_Turn], str], turn: _Turn) -> str:
    try:
        return await asyncio.get_running_loop().run_in_executor(lane, work, turn)
    finally:
        # Whoever asked may be gone, and the thread has better things to do.
        turn.stop()
