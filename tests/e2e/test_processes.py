"""What an operator sees of the processes of an idle server."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from server import wait_until
from websockets.sync.client import connect


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


def burden(server):
    """What takes memory in a frontend: long texts, many log probabilities, choices, streams, large bodies."""
    words = "lorem ipsum dolor sit amet "
    bodies = [
        ("/tokenize", {"prompt": words * 10_000}),
        ("/tokenize", {"prompt": words * 60_000}),
        ("/v1/completions", {"prompt": words * 3000, "max_tokens": 2}),
        ("/v1/completions", {"prompt": words * 100, "max_tokens": 2, "n": 8, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": [5] * 600_000, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 200, "max_tokens": 20}),
    ]

    def send(path, body):
        assert httpx.post(server.url + path, json=body, timeout=300).status_code in (200, 400)

    def chat_on_a_socket():
        url = server.url.replace("http", "ws", 1) + "/v1/ws"
        with connect(url, max_size=None) as socket:
            body = {"prompt": words * 20, "max_tokens": 50, "stream": True}
            for number in range(10):
                message = {"type": "create", "id": number, "endpoint": "completions", "body": body}
                socket.send(json.dumps(message))
            ends = 0
            while ends < 10:
                ends += json.loads(socket.recv(300))["type"] in ("done", "error")

    with ThreadPoolExecutor(8) as threads:
        done = [threads.submit(send, *body) for _ in range(3) for body in bodies]
        done += [threads.submit(chat_on_a_socket) for _ in range(3)]
        for each in done:
            each.result()


def test_the_frontend_stays_small_however_much_it_has_done(tiny_server):
    def comes_down_to(most):
        # What has been freed is given back some seconds later.
        wait_until(lambda: tiny_server.frontend.memory_info().rss < most, f"it takes {most / 1e6} MB")
        return tiny_server.frontend.memory_info().rss

    # It begins with 80 MB; what hostile bodies and long prompts of all other tests have left behind is in it.
    burden(tiny_server)
    once = comes_down_to(200 * 10**6)
    for _ in range(3):
        burden(tiny_server)
    comes_down_to(once + 20 * 10**6)


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
