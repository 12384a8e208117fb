"""Chained hashes that name a KV block by everything that led to it.

A block's hash covers its parent's hash, its own token ids and, in the first block, what else shapes the
cache content (a cache salt, an adapter). Frontends hash prompts, the engine hashes what it generates; both
hold the same secret, drawn anew at every server start, so that no client can craft a collision and read
another tenant's cache. Idea of block-hash chaining: vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16
SECRET_BYTES = 32
_TOKEN_BYTES = 4


class BlockHasher:
    """Hashes full blocks of `block_size` token ids into 16-byte keys.

    Args:
        secret: 32 random bytes shared by the processes of one server run.
        block_size: tokens in a block.
    """

    def __init__(self, secret: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._secret = secret
        # The key is mixed in once here: copying that state costs half of doing it again for each block.
        self._keyed = blake2b(digest_size=HASH_BYTES, key=secret)

    def root(self, extra: bytes = b"") -> bytes:
        """The parent of a first block; requests with different `extra` share nothing."""
        return blake2b(extra, digest_size=HASH_BYTES, key=self._secret, person=b"root").digest()

    def extend(self, parent: bytes, tokens: bytes) -> bytes:
        """The hash of the block that holds `tokens` (the memory of int32[block_size]) after `parent`. Hot."""
        digest = self._keyed.copy()
        digest.update(parent + tokens)
        return digest.digest()

    def chain(self, tokens: npt.NDArray[np.int32], parent: bytes | None = None) -> Sequence[bytes]:
        """Hashes of all full blocks in `tokens` (int32[n]); a partial last block has none."""
        memory = tokens.astype(np.int32, copy=False).tobytes()
        size = self.block_size * _TOKEN_BYTES
        hashes: list[bytes] = []
        previous = self.root() if parent is None else parent
        for start in range(0, len(memory) - size + 1, size):
            previous = self.extend(previous, memory[start : start + size])
            hashes.append(previous)
        return hashes
