"""What the scheduler reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamserve.messages import Logprobs


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Log probabilities of the next part of a request's prompt.

    Attributes:
        frontend: whose request it is.
        stream: the frontend's name for it.
        start: position of the first token that `logprobs` has a row for.
        logprobs: a row for each token from there on, as wide as the request asked.
    """

    frontend: int
    stream: int
    start: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class StepMix:
    """What a step consists of.

    Attributes:
        num_tokens: that run in it.
        num_decodes: of requests that run just the one before the token that they get.
        num_prompt_tokens: all others, but for documents'.
        num_document_tokens: by which documents are read.
    """

    num_tokens: int
    num_decodes: int
    num_prompt_tokens: int
    num_document_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of one step, a row for each request that sampled one and still runs.

    A prefill chunk that does not reach the end of the known tokens has no row. The token that stopped a
    request is in its last row; whether to show it is the frontend's business.

    Attributes:
        frontends: int32[n], whose request it is.
        streams: uint64[n], the frontend's name for it.
        token_ids: int32[n].
        finish: uint8[n], a `messages.Finish` code.
        cached: uint32[n], prompt tokens found in the prefix cache, for rows with the first token of a
            request; 0 for the others. None when no row is a first token.
        logprobs: a row each, at least as wide as any of the requests asked; rows of those that did not ask
            mean nothing. None when none of them asked.
        num_top: int32[n], how many of the likeliest tokens each asked for, -1 for none; None with `logprobs`.
        prompt_logprobs: for prompts that asked; all of a prompt's parts come before or with the row of its
            first token, each position once.
    """

    frontends: npt.NDArray[np.int32]
    streams: npt.NDArray[np.uint64]
    token_ids: npt.NDArray[np.int32]
    finish: npt.NDArray[np.uint8]
    cached: npt.NDArray[np.uint32] | None
    logprobs: Logprobs | None = None
    num_top: npt.NDArray[np.int32] | None = None
    prompt_logprobs: Sequence[PromptRows] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Gauges and counters.

    Attributes:
        running: requests that hold a slot.
        waiting: requests that wait for one, preempted ones among them.
        num_blocks: blocks in the KV cache.
        free_blocks: those that no request holds, whether or not their content can still be found.
        prefix_queries: prompt tokens looked up in the prefix cache since the start.
        prefix_hits: prompt tokens found there.
        preemptions: requests that had to give their slot back so far.
        expired: requests that missed their deadline so far.
        prompt_tokens: prompt tokens of all requests that had a slot so far.
        generation_tokens: tokens sampled so far.
    """

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    expired: int
    prompt_tokens: int
    generation_tokens: int
