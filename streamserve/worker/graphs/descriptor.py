"""What a graph is captured for: the shape of a step, and which shapes there are. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamserve.errors import ConfigError

# A step of more tokens keeps the device busy without graphs.
LARGEST_DEFAULT_SIZE = 512
_SMALL = (1, 2, 4, *range(8, 256, 8))
_LARGE = tuple(range(256, LARGEST_DEFAULT_SIZE + 1, 16))


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The shape of a step, or of the graph that it is padded to.

    Attributes:
        num_tokens: rows of the forward.
        num_reqs: requests; None in the shape of a PIECEWISE graph, which does not depend on them.
        uniform: every request runs as many tokens as a decoding one does.
    """

    num_tokens: int
    num_reqs: int | None
    uniform: bool


def default_capture_sizes(max_num_seqs: int, max_num_tokens: int, query_len: int = 1) -> tuple[int, ...]:
    """Token counts that graphs are captured for, ascending: dense where little is run, coarse above.

    Args:
        max_num_seqs: most requests of a step; a full house of decodes gets its own size.
        max_num_tokens: most tokens of a step.
        query_len: tokens that a decoding request runs in a step; its multiples get sizes too.
    """
    largest = min(2 * max_num_seqs * query_len, LARGEST_DEFAULT_SIZE, max_num_tokens)
    decodes = {count * query_len for count in (*_SMALL, *_LARGE, max_num_seqs) if count <= max_num_seqs}
    sizes = decodes | {*_SMALL, *_LARGE, largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def checked_capture_sizes(sizes: Iterable[int], max_num_tokens: int) -> tuple[int, ...]:
    """`sizes` in ascending order, each once.

    Raises:
        ConfigError: one of them is no size that a step can have.
    """
    ascending = tuple(sorted(set(sizes)))
    if ascending and ascending[0] < 1:
        raise ConfigError(f"--cudagraph-capture-sizes {ascending[0]}: a step has at least one token")
    if ascending and ascending[-1] > max_num_tokens:
        raise ConfigError(
            f"--cudagraph-capture-sizes {ascending[-1]}: a step has at most {max_num_tokens} tokens "
            "(--max-num-batched-tokens)"
        )
    return ascending
