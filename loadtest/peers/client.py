"""The process that sends the requests and times the answers: `python -m loadtest.peers.client`.

Its parent writes one job as a line of JSON and reads three lines: `ready` before anything is sent, `done` as
soon as the last answer is there, and the answers. Between the first two it sends a line when the client is to
begin, so that what it reads of the server before and after belongs to the requests alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import uvloop

from loadtest.peers.connection import Exchange, StreamingRequest, open_request
from loadtest.peers.streams import Answer, read_answer

# Beside a document: for how long streams run before they are watched.
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to send.

    Attributes:
        port: of the server.
        path: of the URL.
        bodies: JSON of each request.
        max_tokens: tokens of each answer.
        concurrency: how many requests are open at a time.
        timeout_s: for all of it.
        document: JSON of one more request, sent when all others are under way; they are dropped some time
            after its answer. Empty: there is none, and the others run to their end.
        alone_s: seconds for which the others are watched before the document, and again after it.
    """

    port: int
    path: str
    bodies: tuple[str, ...]
    max_tokens: int
    concurrency: int
    timeout_s: float
    document: str = ""
    alone_s: float = 4.0

    def to_line(self) -> str:
        """For `from_line`."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Job:
        """What `to_line` was made from."""
        data = json.loads(line)
        return cls(**{**data, "bodies": tuple(data["bodies"])})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        answers: of the requests, in the order in which they were begun.
        document: answer of the document.
        client_cpu_s: processor seconds of the client meanwhile.
    """

    answers: tuple[Answer, ...]
    document: Answer | None
    client_cpu_s: float

    def to_line(self) -> str:
        """For `from_line`."""
        data = {
            "answers": [answer.to_json() for answer in self.answers],
            "document": self.document and self.document.to_json(),
            "client_cpu_s": self.client_cpu_s,
        }
        return json.dumps(data) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Outcome:
        """What `to_line` was made from."""
        data = json.loads(line)
        document = data["document"] and Answer.from_json(data["document"])
        return cls(tuple(map(Answer.from_json, data["answers"])), document, data["client_cpu_s"])


async def run(job: Job, finished: Callable[[], None]) -> Outcome:
    """Does the job.

    Args:
        job: what to send.
        finished: called when the last answer is there, before any of them is read.
    """
    origin, cpu = time.perf_counter(), time.process_time()
    document: Exchange | None = None
    if job.document:
        exchanges, document = await _beside_document(job)
    else:
        exchanges = await _in_turns(job)
    client_cpu_s = time.process_time() - cpu
    finished()
    wanted = None if job.document else job.max_tokens
    answers = tuple(read_answer(exchange, origin, wanted) for exchange in exchanges)
    document_answer = None if document is None else read_answer(document, origin, None)
    return Outcome(answers, document_answer, client_cpu_s)


async def _in_turns(job: Job) -> list[Exchange]:
    """Keeps `concurrency` requests open until all have been answered."""
    exchanges: list[Exchange] = []
    bodies = iter(job.bodies)
    deadline = time.perf_counter() + job.timeout_s

    async def stream() -> None:
        for body in bodies:
            exchange = await _ask(job, body, deadline)
            exchanges.append(exchange)

    await asyncio.gather(*(stream() for _ in range(job.concurrency)))
    return exchanges


async def _ask(job: Job, body: str, deadline: float) -> Exchange:
    try:
        request = await open_request(job.port, job.path, body.encode())
    except OSError as error:
        return Exchange(problem=f"no connection: {error}")
    await _until(request.done, deadline, request)
    return request.exchange


async def _beside_document(job: Job) -> tuple[list[Exchange], Exchange]:
    """Sends the document into decoding streams, and drops them once it has been answered for a while."""
    deadline = time.perf_counter() + job.timeout_s
    opened = [await open_request(job.port, job.path, body.encode()) for body in job.bodies]
    for request in opened:
        await _until(request.begun, deadline, request)
    await asyncio.sleep(_SETTLE_S + job.alone_s)
    document = await open_request(job.port, job.path, job.document.encode())
    await _until(document.done, deadline, document)
    await asyncio.sleep(job.alone_s)
    for request in opened:
        request.drop()
    return [request.exchange for request in opened], document.exchange


async def _until(event: asyncio.Future[None], deadline: float, request: StreamingRequest) -> None:
    try:
        async with asyncio.timeout(max(deadline - time.perf_counter(), 0.0)):
            await asyncio.shield(event)
    except TimeoutError:
        request.drop()
        request.exchange.problem = "no answer in time"


def main() -> int:
    """Serves one job."""
    job = Job.from_line(sys.stdin.readline())
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 1
    outcome = uvloop.run(run(job, lambda: print("done", flush=True)))
    sys.stdout.write(outcome.to_line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
