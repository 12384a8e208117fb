"""A scheduler and a worker on a tiny random Llama, in one process: nearly all its time is the host's."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from streamserve.engine.scheduler.states import Request
from streamserve.hashing import BlockHasher
from streamserve.messages import AddRequest
from streamserve.sampling import SamplingParams
from streamserve.worker.spec import WorkerSpec

BLOCK_SIZE = 16

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def write_tiny_llama(folder: Path) -> None:
    """Makes `folder` a model whose weights are made up when it is loaded."""
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))


class TinyEngine:
    """Runs batches of prompts to their end and tells how long that took.

    Args:
        folder: where config.json may be written.
        enable_prefix_caching: the thing under test.
        num_blocks: size of the KV cache.
        max_num_batched_tokens: token budget of a step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enable_prefix_caching: bool,
        num_blocks: int = 8192,
        max_num_batched_tokens: int = 2048,
    ) -> None:
        write_tiny_llama(folder)
        spec = WorkerSpec(
            model_path=str(folder),
            load_format="dummy",
            dtype="float32",
            device="cpu",
            seed=0,
            max_model_len=None,
            max_num_seqs=64,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=BLOCK_SIZE,
            kv_cache_memory=None,
            num_blocks_override=num_blocks,
            cpu_threads=1,
        )
        self._executor = InlineExecutor(spec)
        facts = self._executor.start(lambda what, fraction: None)
        self._hasher = BlockHasher(b"b" * 32, BLOCK_SIZE)
        self._caching = enable_prefix_caching
        self._scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=64,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_token_threshold=0,
                num_blocks=facts.num_blocks,
                block_size=BLOCK_SIZE,
                max_model_len=facts.max_model_len,
                enable_prefix_caching=enable_prefix_caching,
                eos_token_ids=(),
            ),
            self._hasher,
        )
        self._next_stream = 0

    def run(self, prompts: Sequence[np.ndarray], max_tokens: int) -> float:
        """Seconds of processor time for all prompts, hashing included, each with `max_tokens` of output."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        began = time.process_time()
        for tokens in prompts:
            self._next_stream += 1
            hashes = self._hasher.chain(tokens) if self._caching else []
            add = AddRequest(self._next_stream, tokens, len(tokens), params, hashes)
            self._scheduler.add(Request(0, add))
        while (diff := self._scheduler.schedule()) is not None:
            self._scheduler.settle(self._executor.submit(diff).result())
        return time.process_time() - began

    def hit_rate(self) -> float:
        """Share of prompt tokens that the cache gave so far."""
        stats = self._scheduler.statistics()
        return stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
