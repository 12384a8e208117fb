"""Probes and other streams while there is much to do: by the order of events, and once in milliseconds."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import httpx
import pytest
from canary import Canary
from server import PATIENCE_S, load, running_server, sse_events, wait_idle, wait_until
from ways_in import ALL_WAYS, COMPLETION, PATHS, Refused, ask, prompt

MODEL = {"model": "tiny", "ignore_eos": True}
LONG_IDS = [5 + number % 400 for number in range(20_000)]
NUM_STREAMS = 64
PROBES = ("/health", "/live", "/ready", "/ping", "/metrics", "/load")
# What a stream may say while one probe is answered; a token takes some milliseconds.
MOST_MEANWHILE = 100


@pytest.fixture(scope="module")
def server(tiny_model):
    """A server as it is by default, with a place for everybody."""
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=16000",
        f"--max-num-seqs={NUM_STREAMS + 2}",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server
    assert "Traceback" not in server.output


class Stream(threading.Thread):
    """Somebody who reads one long answer; leaving the context ends that."""

    def __init__(self, url, given, max_tokens):
        super().__init__(daemon=True)
        self.num_events = 0
        self.begun = threading.Event()
        self._url = url + PATHS[COMPLETION]
        self._body = {**MODEL, "prompt": given, "max_tokens": max_tokens, "stream": True}
        self._leave = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._leave.set()
        self.join(PATIENCE_S)

    def run(self):
        with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200, answer.read()
            for _ in sse_events(answer):
                self.num_events += 1
                self.begun.set()
                if self._leave.is_set():
                    return


@contextlib.contextmanager
def many_streams(server):
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(Stream(server.url, f"stream {n}", 3000)) for n in range(NUM_STREAMS)]
        for stream in streams:
            assert stream.begun.wait(PATIENCE_S)
        assert load(server)["running"] >= NUM_STREAMS
        yield streams
    wait_idle(server)


def test_probes_are_answered_before_a_long_prompt_is_read(server):
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        Stream(server.url, LONG_IDS, 5) as long,
    ):
        wait_until(lambda: load(server)["running"] == 1, "it is being read")
        for path in PROBES:
            assert client.get(path).status_code == 200
        assert not long.begun.is_set(), "the prompt was too short to be in the way"
        assert long.begun.wait(PATIENCE_S)
    wait_idle(server)


def test_probes_are_answered_among_many_streams(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client, many_streams(server) as streams:
        for path in PROBES * 3:
            before = [stream.num_events for stream in streams]
            assert client.get(path).status_code == 200
            after = [stream.num_events for stream in streams]
            meanwhile = max(now - then for then, now in zip(before, after, strict=True))
            assert meanwhile < MOST_MEANWHILE, path


@contextlib.contextmanager
def repeated(work):
    """Does `work` again and again in a thread, at least once."""
    stop = threading.Event()

    def run():
        while not stop.is_set():
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)


@pytest.mark.heavy
@pytest.mark.parametrize("work", ["a long prompt", "many streams", "huge bodies"])
def test_how_long_probes_take(server, work, capsys):
    def read_a_long_prompt():
        body = {**MODEL, "prompt": LONG_IDS, "max_tokens": 1, "cache_salt": str(time.monotonic())}
        httpx.post(server.url + PATHS[COMPLETION], json=body, timeout=PATIENCE_S).raise_for_status()

    huge = json.dumps({**MODEL, "prompt": "word " * (27 * 2**20 // 5)}).encode()

    def refuse_a_huge_body():
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + PATHS[COMPLETION], content=huge, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 413

    busy = {
        "a long prompt": lambda: repeated(read_a_long_prompt),
        "many streams": lambda: many_streams(server),
        "huge bodies": lambda: repeated(refuse_a_huge_body),
    }[work]()
    times = []
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client, busy:
        for _ in range(500):
            began_s = time.perf_counter()
            assert client.get("/health").status_code == 200
            times.append(time.perf_counter() - began_s)
            time.sleep(0.01)
    middle, p99, longest = (1000 * sorted(times)[place] for place in (250, 494, 499))
    with capsys.disabled():
        print(f"\n/health beside {work}: median {middle:.1f} ms, p99 {p99:.1f} ms, longest {longest:.1f} ms")
    assert p99 < 200


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
@pytest.mark.parametrize("num_bytes", [5 * 2**20, 27 * 2**20])
def test_a_prompt_of_many_megabytes_is_refused_while_others_flow(server, endpoint, transport, num_bytes):
    body = {**MODEL, **prompt(endpoint, "word " * (num_bytes // 5))}
    with Canary(server.url) as canary:
        before = canary.num_events
        with pytest.raises(Refused) as refused:
            ask(server.url, endpoint, transport, body)
        assert canary.num_events > before, "nobody else had a turn meanwhile"
    told = refused.value
    assert not told.is_late
    wanted = (413, "body_too_large") if num_bytes > 20 * 2**20 else (400, "context_length_exceeded")
    assert (told.status, told.error["code"]) == wanted
