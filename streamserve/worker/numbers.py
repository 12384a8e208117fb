"""What a worker counts, as numbers of a STATS frame (streamserve.messages)."""

from __future__ import annotations

from dataclasses import asdict

from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.link import DeviceLink
from streamserve.worker.spec import MemoryAccount


def graph_numbers(graphs: GraphRunner) -> dict[str, int]:
    """Steps by how they ran, and how far the capture is."""
    counters = graphs.counters
    return {
        **{f"graph_steps_{mode.name.lower()}": count for mode, count in counters.steps.items()},
        "graph_padded_tokens": counters.padded_tokens,
        "graph_fallbacks": counters.fallbacks,
        "graphs_captured": graphs.num_captured,
        "graphs_waiting": graphs.num_waiting,
        "graphs_bytes": graphs.bytes_taken,
    }


def link_numbers(link: DeviceLink) -> dict[str, int]:
    """How long the device waited for the host between steps; nothing of a CPU, which is the host."""
    gaps = link.gaps
    return {} if gaps is None else {"device_gap_ns": gaps.total_ns, "device_gaps": gaps.count}


def memory_numbers(account: MemoryAccount) -> dict[str, int]:
    """Where the memory of a GPU goes."""
    return {f"gpu_memory_{part}": num_bytes for part, num_bytes in asdict(account).items()}
