"""What the scheduler may hand out."""

from __future__ import annotations

from dataclasses import dataclass

# A prompt that takes more steps than that to read, alone, is a document.
_STEPS_OF_A_DOCUMENT = 4


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that are fixed for the life of an engine.

    Attributes:
        max_num_seqs: most requests that run at the same time (slots).
        max_num_batched_tokens: most tokens in a step, all requests together.
        long_prefill_token_threshold: most tokens of one request in a step; 0 leaves it to how the budget is
            shared (streamserve.engine.scheduler.sharing).
        num_blocks: blocks in the KV cache.
        block_size: tokens in a block.
        max_model_len: most tokens of a request, prompt and output together.
        enable_prefix_caching: share the blocks of equal beginnings; off, nothing is ever hashed.
        eos_token_ids: the tokens by which the model says that it is done.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    num_blocks: int
    block_size: int
    max_model_len: int
    enable_prefix_caching: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        at_least_one = (
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.num_blocks,
            self.block_size,
            self.max_model_len,
        )
        assert min(at_least_one) >= 1, self
        assert self.long_prefill_token_threshold >= 0, self

    @property
    def document_tokens(self) -> int:
        """Reading more tokens than that is reading a document, which may be paced."""
        return _STEPS_OF_A_DOCUMENT * self.max_num_batched_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose K and V the whole cache can hold."""
        return self.num_blocks * self.block_size

    def limit(self, num_prompt: int, max_tokens: int) -> int:
        """Tokens, prompt included, at which a request is over."""
        return min(num_prompt + max_tokens, self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the K and V of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
