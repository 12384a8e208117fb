"""What an operator sees of the processes of an idle server."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import psutil


def test_the_processes_are_named_by_their_module(tiny_server):
    children = psutil.Process(tiny_server.process.pid).children(recursive=True)
    modules = sorted(child.cmdline()[2] for child in children)
    assert modules == ["streamserve.engine.process", "streamserve.frontend.process"]


def test_only_the_engine_has_torch(tiny_server):
    def maps(pid):
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in maps(tiny_server.engine.pid)
    assert "libtorch" not in maps(tiny_server.frontend.pid)
    assert "libtorch" not in maps(tiny_server.process.pid)


def test_idle_threads_of_the_engine_spin_for_a_moment_only(tiny_server):
    environment = tiny_server.engine.environ()
    assert (environment["OMP_WAIT_POLICY"], environment["GOMP_SPINCOUNT"]) == ("PASSIVE", "10000")


def test_what_libraries_keep_for_each_shape_of_a_product_is_bounded(tiny_server):
    environment = tiny_server.engine.environ()
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == environment["LRU_CACHE_CAPACITY"] == "256"


def test_the_frontend_stays_small(tiny_server):
    for _ in range(20):
        body = {"model": "tiny", "prompt": "memory", "max_tokens": 50, "temperature": 0}
        httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=300).raise_for_status()
    # What hostile bodies and long prompts of other tests have left behind is in it. It begins with 80 MB.
    assert tiny_server.frontend.memory_info().rss < 300 * 10**6


def test_requests_and_tokens_cross_no_socket_or_pipe(tiny_server):
    """The engine holds no socket, and of pipes only the lifeline, the ready pipe and its output."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{tiny_server.engine.pid}/fd").iterdir()]
    assert not [link for link in links if link.startswith("socket:")]
    assert any("memfd:" in link for link in links)
    assert len([link for link in links if link.startswith("pipe:")]) <= 4


def test_nothing_lies_in_dev_shm(tiny_server):
    """But what OpenMP puts there for itself."""
    for pid in (tiny_server.process.pid, tiny_server.engine.pid, tiny_server.frontend.pid):
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        mapped = Path(f"/proc/{pid}/maps").read_text().split()
        shared = {name for name in (*links, *mapped) if name.startswith("/dev/shm/")}
        assert not {name for name in shared if "__KMP_REGISTERED_LIB" not in name}


def test_an_idle_server_costs_nothing(tiny_server):
    """Processor time over a quiet while, by the processes' own accounts: below 1 % of one core."""
    processes = [psutil.Process(tiny_server.process.pid), tiny_server.engine, tiny_server.frontend]

    def used():
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    import time

    time.sleep(1)
    before, began = used(), time.monotonic()
    time.sleep(20)
    share = (used() - before) / (time.monotonic() - began)
    assert share < 0.01, f"{share:.2%} of a core"
