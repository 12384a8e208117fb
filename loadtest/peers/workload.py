"""What the servers are asked for: shapes of load, and the cases that a race is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Contexts are given to all servers in whole multiples of this.
_CONTEXT_STEP = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of load.

    Attributes:
        prompt_tokens: of each prompt.
        shared_tokens: how many of them all prompts begin with, and the server has seen before; the rest is
            each prompt's own.
        max_tokens: of each answer; it is never shorter.
        waves: requests of each stream, one after the other.
        document_tokens: length of one more prompt that arrives while the streams decode; 0 is none.
    """

    prompt_tokens: int
    max_tokens: int
    shared_tokens: int = 0
    waves: int = 1
    document_tokens: int = 0

    @property
    def context(self) -> int:
        """Most tokens of any of its requests, prompt and answer together."""
        return max(self.prompt_tokens, self.document_tokens) + self.max_tokens


STARTUP = "startup"
DOCUMENT = "document"
# The streams beside a document are cut off when its own answer is there, so theirs may be long.
_BESIDE_DOCUMENT = Shape(prompt_tokens=32, max_tokens=15_000, document_tokens=50_000)

SHAPES: dict[str, dict[str, Shape]] = {
    "tiny": {
        "decode": Shape(prompt_tokens=32, max_tokens=256, waves=2),
        "prefill": Shape(prompt_tokens=1000, max_tokens=16, waves=2),
        "shared": Shape(prompt_tokens=1000, max_tokens=16, shared_tokens=900, waves=2),
        DOCUMENT: _BESIDE_DOCUMENT,
    },
    # A hundred times the work for each token.
    "smollm2": {
        "decode": Shape(prompt_tokens=32, max_tokens=128),
        "prefill": Shape(prompt_tokens=1000, max_tokens=16),
        "shared": Shape(prompt_tokens=1000, max_tokens=16, shared_tokens=900),
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of load on one model from so many streams at once."""

    model: str
    shape_name: str
    shape: Shape
    concurrency: int

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.model}/{self.shape_name}/{self.concurrency}"

    @property
    def num_requests(self) -> int:
        """How many answers are measured; a single stream asks at least four times."""
        return max(self.concurrency * self.shape.waves, 4)


@dataclass(frozen=True, slots=True)
class Limits:
    """What every server is given to work with, and has to be able to hold.

    Attributes:
        context: most tokens of a request.
        streams: most requests at a time.
        threads: threads of the model.
    """

    context: int
    streams: int
    threads: int

    @property
    def kv_tokens(self) -> int:
        """Size of the KV cache: room for every stream to reach its limit, and for a block kept back."""
        return self.context * (self.streams + 1)


def cases_of(model: str, shape_names: Sequence[str], concurrencies: Sequence[int]) -> list[Case]:
    """The cases of one server's run with `model`, in the order in which they are measured.

    Raises:
        ValueError: the model has no such shape.
    """
    cases = []
    for shape_name in shape_names:
        if shape_name == STARTUP:
            continue
        if shape_name not in SHAPES[model]:
            raise ValueError(f"{model} has no shape {shape_name}; there are {', '.join(SHAPES[model])}")
        shape = SHAPES[model][shape_name]
        # How much a document slows others is asked for one number of streams only.
        counts = [8] if shape_name == DOCUMENT else concurrencies
        cases += [Case(model, shape_name, shape, count) for count in counts]
    return cases


def limits_for(cases: Iterable[Case], threads: int) -> Limits:
    """The least that holds all `cases`."""
    context = max((case.shape.context for case in cases), default=_CONTEXT_STEP)
    streams = max((case.concurrency + bool(case.shape.document_tokens) for case in cases), default=1)
    return Limits(-(-context // _CONTEXT_STEP) * _CONTEXT_STEP, streams, threads)
