"""What an engine might say of itself, for those who show it."""

from __future__ import annotations

import os

from streamserve.frontend.pump import EngineFacts

FACTS = EngineFacts(
    epoch=1,
    pid=os.getpid(),
    model="tiny",
    max_model_len=512,
    vocab_size=400,
    block_size=16,
    num_blocks=64,
    kv_capacity_tokens=1024,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    enable_prefix_caching=True,
    eos_token_ids=(0,),
)
GAUGES: dict[str, int] = {
    "running": 3,
    "waiting": 2,
    "num_blocks": 64,
    "free_blocks": 48,
    "prefix_queries": 100,
    "prefix_hits": 40,
    "preemptions": 1,
    "steps": 10,
    "step_tokens": 90,
    "step_tokens_le_1": 2,
    "step_tokens_le_8": 7,
    "step_tokens_le_16": 9,
    **dict.fromkeys(("schedule_ns", "execute_ns", "settle_ns"), 2_500_000_000),
    **dict.fromkeys(("last_schedule_ns", "last_execute_ns", "last_settle_ns"), 1_000_000),
}
