"""What brings the tokens of choices to them, in the turn of the event loop in which they come in.

No task is woken for a token. What comes is taken in at once, however slowly the client reads: it waits as
text, in one piece, and a stop string ends the generation when it comes, not when the client has come to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from types import TracebackType

from streamserve.frontend.api.choice import Choice
from streamserve.frontend.api.choice_stream import ChoiceStream
from streamserve.frontend.api.endpoint import Write
from streamserve.frontend.client import EngineClient
from streamserve.frontend.mailbox import Mailbox

# So many generations begin in one turn of the event loop: each takes its time to encode and send.
PORTION = 16


class Diversion:
    """The way of one choice's chunks past all tasks, while somebody takes them.

    Args:
        stream: makes the chunks.
        write: takes them; False if it wants no more for now.

    Attributes:
        closed: done with True when the last chunk was written, with False when there is something to wait for
            before the next one.
    """

    def __init__(self, stream: ChoiceStream, write: Write) -> None:
        self.accept = stream.accept
        self.is_plain = stream.choice.is_plain
        self.write = write
        self.closed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class Feed:
    """Runs the generation of one choice, and lets the choice take in what comes.

    Args:
        client: the way to the engine.
        choice: which.
        on_news: called when there is something to show, and when the generation failed.

    Attributes:
        choice: see above.
        failure: why the generation ended, if it failed.
    """

    # Of the generation, while it runs.
    _mailbox: Mailbox

    def __init__(self, client: EngineClient, choice: Choice, on_news: Callable[[Feed], None]) -> None:
        self.choice = choice
        self.failure: Exception | None = None
        self._client = client
        self._on_news = on_news
        self._diversion: Diversion | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Returns when the choice has ended, or the generation failed."""
        try:
            async with aclosing(self._client.generate(self.choice.generation)) as deltas:
                async for first in deltas:
                    self.choice.absorb(first)
                    self._on_news(self)
                    break
                if not self.choice.has_ended:
                    await self._listen()
        except Exception as error:
            self._fail(error)

    async def divert(self, stream: ChoiceStream, write: Write) -> bool:
        """Hands the chunks of `stream` to `write` in the turn in which their tokens come in.

        Returns:
            True at the end of the choice, False when `write` should be waited for.

        Raises:
            StreamserveError: the generation failed.
        """
        try:
            while True:
                batch = stream.show()
                wants_more = not batch or write(batch)
                if stream.is_over or not wants_more:
                    return stream.is_over
                if not self.choice.has_more:
                    break
                await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
            self._diversion = Diversion(stream, write)
            return await self._diversion.closed
        except Exception:
            stream.fail()
            raise
        finally:
            self._diversion = None

    async def _listen(self) -> None:
        mailbox = self.choice.generation.mailbox
        assert mailbox is not None, "the generation does not run"
        self._mailbox = mailbox
        mailbox.listener = self._take
        try:
            # For what has come since the first delta.
            self._take()
            await self._over
        finally:
            mailbox.listener = None

    def _take(self) -> None:
        """Hot: once for each delta."""
        # Nothing may come out into the pump, where it would be everybody's failure.
        try:
            delta = self._mailbox.take()
            if delta.finish:
                self._client.check(delta)
            diversion = self._diversion
            if diversion is None:
                self.choice.absorb(delta)
                self._on_news(self)
                wants_more = True
            else:
                batch = diversion.accept(delta)
                wants_more = not batch or diversion.write(batch)
                if not diversion.is_plain and self.choice.has_more:
                    wants_more = False
            if self.choice.assembler.finish_reason is not None:
                self._end()
            elif not wants_more:
                self._close_diversion(is_over=False)
        except Exception as error:
            self._fail(error)

    def _end(self) -> None:
        self._mailbox.listener = None
        self._close_diversion(is_over=not self.choice.has_more)
        if not self._over.done():
            self._over.set_result(None)

    def _close_diversion(self, *, is_over: bool) -> None:
        """From here on, what comes is only taken in."""
        diversion, self._diversion = self._diversion, None
        if diversion is not None and not diversion.closed.done():
            diversion.closed.set_result(is_over)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        diversion, self._diversion = self._diversion, None
        if diversion is None:
            self._on_news(self)
        elif not diversion.closed.done():
            diversion.closed.set_exception(error)
        if not self._over.done():
            self._over.set_result(None)


class Feeds:
    """Runs the generations of an answer's choices side by side; leaving its context ends all of them.

    No task group, because an answer's iterator may be advanced by one task and closed by another.

    Args:
        client: the way to the engine.
        choices: of the answer.

    Attributes:
        feeds: one for each.
    """

    def __init__(self, client: EngineClient, choices: Sequence[Choice]) -> None:
        self.feeds = [Feed(client, choice, self._note) for choice in choices]
        self._tasks: list[asyncio.Task[None]] = []
        # In the order in which it came.
        self._news: dict[Choice, None] = {}
        self._failure: Exception | None = None
        self._has_news = asyncio.Event()

    async def __aenter__(self) -> Feeds:
        self._tasks = [asyncio.create_task(self._run(at, feed)) for at, feed in enumerate(self.feeds)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def news(self) -> list[Choice]:
        """The choices that have taken something in since the last time, as soon as there are any.

        Raises:
            StreamserveError: a generation failed.
        """
        if not self._news and self._failure is None:
            self._has_news.clear()
            await self._has_news.wait()
        if not self._news and self._failure is not None:
            raise self._failure
        news, self._news = list(self._news), {}
        return news

    async def give_turn(self, choice: Choice) -> None:
        """Lets others have their turn, and counts what `choice` has more to show among the news."""
        await asyncio.sleep(0)
        self._news[choice] = None

    async def _run(self, at: int, feed: Feed) -> None:
        for _ in range(at // PORTION):
            await asyncio.sleep(0)
        await feed.run()

    def _note(self, feed: Feed) -> None:
        if feed.failure is None:
            self._news[feed.choice] = None
        else:
            self._failure = self._failure or feed.failure
        self._has_news.set()
