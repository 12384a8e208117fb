"""The contract between the scheduler and its workers: what changes in a step, and what came of it.

A worker mirrors the scheduler's slots. It is told only differences; whatever a `StepDiff` does not mention
stays as it was. A worker keeps, for each occupied slot: all token ids known so far (its token pool), how many
of them are computed (their K and V are in the cache), the block table and the sampling parameters.

Order of application: leaves, joins, block appends, then the step runs:

    for each scheduled slot:  run tokens [computed, computed + n)
                              if computed + n == known tokens: sample one, append it to the known tokens
                              computed += n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from streamserve.messages import Logprobs
from streamserve.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]

EMPTY = np.zeros(0, dtype=np.int32)
EMPTY.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Join:
    """A request takes a slot: new, or back from preemption.

    Attributes:
        slot: the row it gets in every persistent array.
        tokens: int32[n], all tokens known so far (prompt, then what was generated).
        num_prompt: how many of `tokens` are prompt.
        num_computed: how many leading tokens already have their K and V in the cache (a prefix hit).
        blocks: int32[m], its block table so far; covers this step's tokens.
        params: how to sample.
    """

    slot: int
    tokens: Int32Array
    num_prompt: int
    num_computed: int
    blocks: Int32Array
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepDiff:
    """What a worker must know to run one step, as a difference to the step before.

    Attributes:
        step: number of the step, counting up.
        leaves: int32[k], slots given up (finished, aborted, preempted).
        joins: requests that take a slot.
        append_slots: int32[m], slots whose block table grows; a slot may appear more than once.
        append_blocks: int32[m], the block appended to each of them.
        slots: int32[n], the slots that run in this step, or None when both `slots` and `num_tokens` are the
            same as in the step before (steady decode).
        num_tokens: int32[n], how many tokens each of them runs; None together with `slots`.
    """

    step: int
    leaves: Int32Array = field(default_factory=lambda: EMPTY)
    joins: Sequence[Join] = ()
    append_slots: Int32Array = field(default_factory=lambda: EMPTY)
    append_blocks: Int32Array = field(default_factory=lambda: EMPTY)
    slots: Int32Array | None = None
    num_tokens: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a part of one prompt, from the step that computed it.

    Attributes:
        slot: whose prompt it is.
        start: position of the first token that `logprobs` has a row for; at least 1.
        logprobs: a row for each token of the prompt from there on that this step's logits predict.
    """

    slot: int
    start: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        step: number of the step.
        slots: int32[k], the slots that sampled a token, in the order they were scheduled.
        token_ids: int32[k], the token each of them sampled.
        logprobs: k rows for `token_ids`, wide enough for the request that asked for most; rows of requests
            that did not ask mean nothing. None when none of them asked.
        prompt_logprobs: for the prompts that asked.
    """

    step: int
    slots: Int32Array
    token_ids: Int32Array
    logprobs: Logprobs | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()
