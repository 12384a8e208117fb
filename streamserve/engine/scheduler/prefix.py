"""PrefixCache: which block holds the tokens that a hash names.

A hash covers a block's tokens and everything before them (streamserve.hashing). Only full, computed blocks
are in here.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCache:
    """A one-to-one map between hashes and blocks.

    It knows nothing of who uses a block: a block that nobody uses stays here until the pool gives it away.

    Args:
        num_blocks: blocks in the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_of

    def holds(self, block: int) -> bool:
        """Whether `block` can be found."""
        return self._hash_of[block] is not None

    def insert(self, block_hash: bytes, block: int) -> bool:
        """Makes `block` findable. False, and no change, when another block has this content already.

        That happens when two requests with the same beginning are computed side by side: one copy is enough.
        """
        if block_hash in self._block_of:
            return False
        assert self._hash_of[block] is None, f"block {block} holds {self._hash_of[block]!r}"
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def match(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """The blocks of the longest known beginning of `hashes`, at most `most` of them."""
        blocks: list[int] = []
        block_of = self._block_of
        for index in range(min(most, len(hashes))):
            block = block_of.get(hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self, block: int) -> None:
        """`block` gets other content; no effect if it could not be found."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._block_of[block_hash]

    def clear(self) -> None:
        """Forgets every block."""
        self._block_of.clear()
        self._hash_of = [None] * len(self._hash_of)

    def check_integrity(self) -> None:
        """Asserts that both directions of the map agree."""
        back = {block_hash: block for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert back == self._block_of, (back, self._block_of)
