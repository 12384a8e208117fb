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
# What an engine with graphs on a GPU adds to them.
GPU_GAUGES: dict[str, int] = {
    "graph_steps_none": 2,
    "graph_steps_piecewise": 3,
    "graph_steps_full": 5,
    "graph_padded_tokens": 17,
    "graph_fallbacks": 1,
    "graphs_captured": 40,
    "graphs_waiting": 46,
    "graphs_bytes": 1 << 30,
    "device_gaps": 1000,
    "device_gap_ns": 20_000_000,
    "gpu_memory_total": 80 << 30,
    "gpu_memory_budget": 72 << 30,
    "gpu_memory_weights": 15 << 30,
    "gpu_memory_buffers": 1 << 30,
    "gpu_memory_activations": 3 << 30,
    "gpu_memory_graphs": 2 << 30,
    "gpu_memory_other": 1 << 29,
    "gpu_memory_cache": 50 << 30,
}
