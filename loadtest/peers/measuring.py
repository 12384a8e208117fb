"""One case on one running server: requests are sent, answers checked, figures worked out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from loadtest.peers.client import Job, Outcome
from loadtest.peers.prompts import PromptMaker
from loadtest.peers.running import RunningServer
from loadtest.peers.servers import COMPLETIONS, ROOT
from loadtest.peers.streams import Answer
from loadtest.peers.workload import STARTUP, Case

CASE_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one server did in one case of one round.

    Attributes:
        peer: name of the server.
        case: name of the case.
        round: from 0.
        figures: by name; see `loadtest.peers.report.FIGURES`.
        problems: what was wrong with answers, with how many of them; empty if nothing was.
    """

    peer: str
    case: str
    round: int
    figures: Mapping[str, float]
    problems: tuple[str, ...] = ()

    def to_line(self) -> str:
        """JSON, for `from_line`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Measurement:
        """What `to_line` was made from."""
        data = json.loads(line)
        return cls(**{**data, "problems": tuple(data["problems"])})


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of them do not exceed.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def measure_startup(server: RunningServer, model: str, round_number: int) -> Measurement:
    """The figures of a start that is over."""
    figures = {
        "ready_s": server.ready_s,
        "first_token_s": server.first_token_s,
        "start_cpu_s": server.tree.cpu_s(),
        "pss_mb": server.tree.pss_bytes() / 1e6,
        "peak_rss_mb": server.tree.peak_rss_bytes() / 1e6,
    }
    return Measurement(server.peer.name, f"{model}/{STARTUP}", round_number, figures)


def measure(server: RunningServer, case: Case, maker: PromptMaker, round_number: int) -> Measurement:
    """Warms the server up and puts it through a case."""
    seed = f"{case.name}/{round_number}"
    warm_up(server, case, maker, seed)
    job = make_job(server, case, maker, seed)
    outcome, cpu_s = drive(server, job)
    figures, problems = evaluate(outcome, job)
    tokens = sum(answer.output_tokens for answer in outcome.answers)
    if tokens:
        figures["cpu_s_per_1k"] = 1000 * cpu_s / tokens
    figures["pss_mb"] = server.tree.pss_bytes() / 1e6
    figures["peak_rss_mb"] = server.tree.peak_rss_bytes() / 1e6
    return Measurement(server.peer.name, case.name, round_number, figures, problems)


def make_job(server: RunningServer, case: Case, maker: PromptMaker, seed: str) -> Job:
    """The requests of a case: other prompts for each seed, the same for every server."""
    shape = case.shape
    count = case.concurrency if shape.document_tokens else case.num_requests

    def body(prompt: str, max_tokens: int) -> str:
        return json.dumps(server.peer.body(server.model, prompt, max_tokens))

    prompts = maker.prompts(count, shape.prompt_tokens, shape.shared_tokens, seed)
    document = ""
    if shape.document_tokens:
        document = body(maker.make(shape.document_tokens, f"{seed}/document"), 1)
    return Job(
        port=server.port,
        path=COMPLETIONS,
        bodies=tuple(body(prompt, shape.max_tokens) for prompt in prompts),
        max_tokens=shape.max_tokens,
        concurrency=case.concurrency,
        timeout_s=CASE_TIMEOUT_S,
        document=document,
    )


def warm_up(server: RunningServer, case: Case, maker: PromptMaker, seed: str) -> None:
    """Lets batches of the case's size happen once, and what its prompts share be known."""
    prompts = maker.prompts(case.concurrency, min(case.shape.prompt_tokens, 64), 0, f"{seed}/warm-up")
    if case.shape.shared_tokens:
        prompts.append(maker.shared(case.shape.shared_tokens, seed))
    bodies = tuple(json.dumps(server.peer.body(server.model, prompt, 8)) for prompt in prompts)
    drive(server, Job(server.port, COMPLETIONS, bodies, 8, case.concurrency, CASE_TIMEOUT_S))


def drive(server: RunningServer, job: Job) -> tuple[Outcome, float]:
    """Has a client do the job.

    Returns:
        What came of it, and the processor seconds that the server took meanwhile.
    """
    command = [sys.executable, "-m", "loadtest.peers.client"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as client:
        try:
            _tell(client, job.to_line())
            _expect(client, "ready")
            before = server.tree.cpu_s()
            _tell(client, "go\n")
            _expect(client, "done")
            cpu_s = server.tree.cpu_s() - before
            return Outcome.from_line(_hear(client)), cpu_s
        except BaseException:
            # Else leaving the block would wait for it.
            client.kill()
            raise


def _tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line)
    client.stdin.flush()


def _hear(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline()


def _expect(client: subprocess.Popen[str], word: str) -> None:
    if (line := _hear(client).strip()) != word:
        raise RuntimeError(f"the client said {line!r} instead of {word}")


def evaluate(outcome: Outcome, job: Job) -> tuple[dict[str, float], tuple[str, ...]]:
    """Figures of all answers with text, and what is wrong with how many."""
    answers = [answer for answer in outcome.answers if answer.times]
    problems = Counter(answer.problem for answer in outcome.answers if answer.problem)
    if len(outcome.answers) != len(job.bodies):
        problems[f"{len(outcome.answers)} answers to {len(job.bodies)} requests"] += 1
    figures: dict[str, float] = {}
    if answers:
        figures = _figures(answers, outcome.client_cpu_s)
    if job.document:
        document_figures, problem = _beside_document(answers, outcome.document, job.alone_s)
        figures |= document_figures
        if problem:
            problems[problem] += 1
    return figures, tuple(f"{count} x {problem}" for problem, count in problems.items())


def _figures(answers: Sequence[Answer], client_cpu_s: float) -> dict[str, float]:
    ttfts = [answer.ttft for answer in answers]
    gaps = list(chain.from_iterable(answer.gaps() for answer in answers))
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    num_events = sum(len(answer.times) for answer in answers)
    tokens = sum(answer.output_tokens for answer in answers)
    figures = {
        "ttft_p50_ms": 1000 * percentile(ttfts, 50),
        "ttft_p99_ms": 1000 * percentile(ttfts, 99),
        "requests_per_s": len(answers) / seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers) / len(answers),
        "client_cpu_share": client_cpu_s / seconds,
    }
    if gaps:
        figures["itl_p50_ms"] = 1000 * percentile(gaps, 50)
        figures["itl_p99_ms"] = 1000 * percentile(gaps, 99)
    if tokens:
        figures["tokens_per_s"] = tokens / seconds
        figures["tokens_per_event"] = tokens / num_events
    return figures


def _beside_document(
    answers: Sequence[Answer], document: Answer | None, alone_s: float
) -> tuple[dict[str, float], str]:
    """How much of their rate the other streams keep while the document is read, and what is wrong."""
    if document is None or not document.times:
        return {}, f"the document: {document.problem if document else 'not sent'}"
    begin, end = document.sent, document.times[0]
    if any(answer.times[-1] < end for answer in answers):
        return {}, "a stream ended before the document was read"

    def rate(since: float, until: float) -> float:
        events = sum(since <= moment < until for answer in answers for moment in answer.times)
        return events / (until - since)

    before, after = rate(begin - alone_s, begin), rate(end, end + alone_s)
    # A step takes longer with each token that the streams have. Alone they would have come as far in steps of
    # the mean of both lengths.
    alone = 2 / (1 / before + 1 / after) if before and after else 0.0
    figures = {
        "document_ttft_s": document.ttft,
        "events_alone_per_s": alone,
        "events_beside_per_s": rate(begin, end),
    }
    if alone:
        figures["rate_kept"] = figures["events_beside_per_s"] / alone
    return figures, ""
