"""What is asked: prompts that are made up, with the lengths of known kinds of traffic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamserve.bench.words import TextMaker

# Mean tokens of ShareGPT's prompts and answers, from section 6.1 of "Efficient Memory Management for Large
# Language Model Serving with PagedAttention" (Kwon et al., 2023). Form and spread are a choice made here.
SHAREGPT_PROMPT_MEAN, SHAREGPT_PROMPT_SIGMA = 161.31, 1.2
SHAREGPT_OUTPUT_MEAN, SHAREGPT_OUTPUT_SIGMA = 337.99, 0.9
# As usual with that dataset, conversations beyond these are left out.
SHAREGPT_PROMPT_RANGE = (4, 1024)
SHAREGPT_MOST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        prompt: the text.
        prompt_len: its tokens, as planned; the server's own count is used where it says one.
        output_len: most tokens of the answer.
    """

    prompt: str
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Prompts and answers of about a given length.

    Attributes:
        input_len, output_len: tokens of a prompt without the prefix, and of an answer.
        range_ratio: lengths are drawn evenly from so large a share below to so large a share above.
        prefix_len: tokens that all prompts begin with.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """Prompts that begin with one of a few prefixes.

    Attributes:
        prefix_len, suffix_len, output_len: tokens of a prefix, of what is a prompt's own, and of an answer.
        num_prefixes: how many there are.
    """

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128


@dataclass(frozen=True, slots=True)
class Dataset:
    """The requests of a run.

    Attributes:
        name: one of `DATASETS`.
        num_prompts: how many.
        seed: the same one gives the same requests.
        random, prefixes: of the datasets that need them.
        sharegpt_output_len: tokens of each answer instead of lengths that are drawn.
    """

    name: str
    num_prompts: int
    seed: int
    random: RandomLengths = field(default_factory=RandomLengths)
    prefixes: PrefixRepetition = field(default_factory=PrefixRepetition)
    sharegpt_output_len: int | None = None


def sharegpt_lengths(rng: random.Random) -> tuple[int, int]:
    """Tokens of a prompt and of its answer: log-normal, with the means of ShareGPT's conversations."""
    # Bounded: a draw is outside in about one of 20 cases.
    for _ in range(100):
        prompt = round(_log_normal(rng, SHAREGPT_PROMPT_MEAN, SHAREGPT_PROMPT_SIGMA))
        output = round(_log_normal(rng, SHAREGPT_OUTPUT_MEAN, SHAREGPT_OUTPUT_SIGMA))
        least, most = SHAREGPT_PROMPT_RANGE
        if least <= prompt <= most and output >= 4 and prompt + output <= SHAREGPT_MOST_TOKENS:
            return prompt, output
    return round(SHAREGPT_PROMPT_MEAN), round(SHAREGPT_OUTPUT_MEAN)


def _log_normal(rng: random.Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def make_samples(dataset: Dataset, maker: TextMaker) -> Sequence[Sample]:
    """The requests, in the order in which they are sent."""
    return DATASETS[dataset.name](dataset, maker, random.Random(dataset.seed))


def _random(dataset: Dataset, maker: TextMaker, rng: random.Random) -> Sequence[Sample]:
    lengths = dataset.random
    prefix = maker.make(lengths.prefix_len, rng)
    samples = []
    for _ in range(dataset.num_prompts):
        own = _about(lengths.input_len, lengths.range_ratio, rng)
        output = max(_about(lengths.output_len, lengths.range_ratio, rng), 1)
        samples.append(Sample(prefix + maker.make(own, rng), lengths.prefix_len + own, output))
    return samples


def _about(length: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio)))


def _sharegpt_like(dataset: Dataset, maker: TextMaker, rng: random.Random) -> Sequence[Sample]:
    samples = []
    for _ in range(dataset.num_prompts):
        prompt_len, output_len = sharegpt_lengths(rng)
        samples.append(
            Sample(maker.make(prompt_len, rng), prompt_len, dataset.sharegpt_output_len or output_len)
        )
    return samples


def _prefix_repetition(dataset: Dataset, maker: TextMaker, rng: random.Random) -> Sequence[Sample]:
    lengths = dataset.prefixes
    prefixes = [maker.make(lengths.prefix_len, rng) for _ in range(lengths.num_prefixes)]
    samples = [
        Sample(
            prefixes[index % len(prefixes)] + maker.make(lengths.suffix_len, rng),
            lengths.prefix_len + lengths.suffix_len,
            lengths.output_len,
        )
        for index in range(dataset.num_prompts)
    ]
    rng.shuffle(samples)
    return samples


DATASETS: dict[str, Callable[[Dataset, TextMaker, random.Random], Sequence[Sample]]] = {
    "random": _random,
    "sharegpt-like": _sharegpt_like,
    "prefix_repetition": _prefix_repetition,
}
