"""The load test as a whole: locust in a process of its own, against a real server on the tiny model."""

from __future__ import annotations

import contextlib
import csv
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import wait_until

pytestmark = pytest.mark.loadtest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0
# What the tiny model does in seconds.
SHORT = ("--headless", "--only-summary", "--max-output-tokens=40")


def locust(server: Any, *options: str, file: str = "loadtest/") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", file, "--host", server.url, *SHORT, *options]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def figures(prefix: Path) -> dict[tuple[str, str], dict[str, float]]:
    with Path(f"{prefix}_summary.csv").open() as file:
        return {
            (row.pop("figure"), row.pop("transport")): {
                name: float(text) for name, text in row.items() if text
            }
            for row in csv.DictReader(file)
        }


def rows(prefix: Path) -> dict[tuple[str, str], dict[str, str]]:
    with Path(f"{prefix}_stats.csv").open() as file:
        return {(row["Name"], row["Type"]): row for row in csv.DictReader(file)}


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 20_000


def test_a_minute_of_both_kinds_of_users(tiny_server: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "run"
    limits = ["--max-error-rate=0", "--max-ttft-p95=30000", "--max-itl-p99=10000", "--min-tokens-per-s=1"]
    mix = "--mix=sharegpt:6,shared-prefix:3,document:1"
    users = ["-u=12", "-r=6", "-t=60s", mix, "--document-tokens=2000"]
    done = locust(tiny_server, *users, "--csv", str(prefix), *limits)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^errors +0 of [\d,]+ \(0\.00 %\)$", done.stderr, re.MULTILINE), done.stderr
    found = figures(prefix)
    assert found["errors", "all"]["count"] == 0
    for transport in ("SSE", "WS"):
        ttft, gaps = found["TTFT", transport], found["inter-token", transport]
        assert ttft["count"] > 10
        assert 0 < ttft["p50_ms"] <= ttft["p95_ms"] <= ttft["p99_ms"] < 30_000
        assert 0 <= gaps["p50_ms"] <= gaps["p95_ms"] <= gaps["p99_ms"] < 10_000
        # A gap for each further event with text; a byte of a character is no event.
        assert ttft["count"] < gaps["count"]
        assert found["whole answer", transport]["p50_ms"] >= ttft["p50_ms"]
    assert found["output tokens", "all"]["per_second"] > 1
    # locust's own table has the same in rows of their own, and its total is of requests alone.
    table = rows(prefix)
    total = int(table["Aggregated", ""]["Request Count"])
    assert total == found["requests", "all"]["count"]
    kinds = {"sharegpt", "shared-prefix", "document"}
    assert sum(int(row["Request Count"]) for (name, _), row in table.items() if name in kinds) == total
    for transport in ("SSE", "WS"):
        assert int(table["TTFT", transport]["Request Count"]) == found["TTFT", transport]["count"]
        assert float(table["output tokens", transport]["Requests/s"]) > 0
        assert int(table["TTFT", transport]["95%"]) == int(found["TTFT", transport]["p95_ms"])
    assert is_picture(Path(f"{prefix}_load.png"))


def test_a_limit_that_is_missed_is_exit_code_1(tiny_server: Any) -> None:
    done = locust(tiny_server, "-u=2", "-t=5s", "--max-ttft-p95=0.001", file="loadtest/locustfile.py")
    assert done.returncode == 1
    assert "Threshold: TTFT p95" in done.stderr
    assert "more than 0.001 ms" in done.stderr


def test_failures_are_counted_and_may_be_allowed(tiny_server: Any, tmp_path: Path) -> None:
    options = ["-u=2", "-r=2", "-t=4s", "--model=no-such-model"]
    done = locust(tiny_server, *options, "--csv", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "HTTP 404" in done.stderr + done.stdout
    # Who is refused comes back after a while: failures as fast as can be would make any error rate 1.
    assert 0 < figures(tmp_path / "run")["errors", "all"]["count"] <= 2 * 6
    assert locust(tiny_server, *options, "--max-error-rate=1").returncode == 0


def test_ctrl_c_is_an_end_like_any_other(tiny_server: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "run"
    limit = "--max-ttft-p95=0.001"
    command = [sys.executable, "-m", "locust", "-f", "loadtest/", "--host", tiny_server.url, *SHORT, limit]
    with subprocess.Popen(
        [*command, "-u=2", "-r=2", "--csv", str(prefix)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: requests_in(prefix) > 0, "a request has ended", PATIENCE_S)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, errors
    assert "Threshold: TTFT p95" in errors
    assert figures(prefix)["requests", "all"]["count"] > 0
    assert is_picture(Path(f"{prefix}_load.png"))


def test_ctrl_c_with_a_server_of_its_own(tiny_model: Path) -> None:
    options = [*SHORT, "-u=2", "-r=2", "--loglevel=INFO"]
    command = [sys.executable, "-m", "loadtest.load.serving", "", str(tiny_model), *options]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "All users spawned" in line:
                break
        # As a terminal does: to all of the group.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert re.search(r"^errors +0 of", errors, re.MULTILINE), errors
    assert "Traceback" not in errors
    # It was stopped after the load test, once.
    assert errors.count("supervisor INFO stopping") == 1
    assert errors.index("supervisor INFO stopping") > errors.index("output tokens/s")


def requests_in(prefix: Path) -> int:
    with contextlib.suppress(FileNotFoundError, KeyError):
        return int(rows(prefix)["Aggregated", ""]["Request Count"])
    return 0


@contextlib.contextmanager
def page(*options: str) -> Iterator[httpx.Client]:
    """locust's page; it must end well."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        "loadtest/",
        "--web-host=127.0.0.1",
        f"--web-port={port}",
    ]
    with subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                wait_until(lambda: answers(client), "the page is there", PATIENCE_S)
                yield client
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors
        finally:
            process.kill()


def answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/").is_success
    return False


def swarm(client: httpx.Client, host: str, **fields: str) -> None:
    form = {"user_count": "2", "spawn_rate": "2", "host": host, **fields}
    assert client.post("/swarm", data=form).json()["success"]


def shown(client: httpx.Client) -> dict[str, int]:
    """Requests by name."""
    found: dict[str, int] = {}
    for row in client.get("/stats/requests").json()["stats"]:
        found[row["name"]] = found.get(row["name"], 0) + row["num_requests"]
    return found


def test_the_page_starts_one_test_after_another(tiny_server: Any) -> None:
    with page("--max-output-tokens=40") as client:
        assert all(name in client.get("/").text for name in ("api_key", "think_time", "document_tokens"))
        # Nobody there: one may correct it.
        swarm(client, "http://127.0.0.1:1")
        wait_until(lambda: "cannot reach" in client.get("/logs").text, "it is told", PATIENCE_S)
        swarm(client, tiny_server.url, mix="document", document_tokens="300")
        wait_until(lambda: shown(client).get("document", 0) > 5, "documents were read", PATIENCE_S)
        assert {"TTFT", "inter-token", "output tokens"} < shown(client).keys()
        assert client.post("/stop").json()["success"]
        swarm(client, tiny_server.url, mix="fun")
        wait_until(lambda: "there is no 'fun'" in client.get("/logs").text, "it is told", PATIENCE_S)
        swarm(client, tiny_server.url, mix="shared-prefix", shared_prefix_tokens="50")
        wait_until(lambda: shown(client).get("shared-prefix", 0) > 5, "questions were asked", PATIENCE_S)
        assert "document" not in shown(client)
        assert client.post("/stop").json()["success"]


def test_figures_count_from_where_the_rows_do(tiny_server: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "run"
    # With -r 0.4 the rows begin anew after some 3 of 8 seconds.
    options = ["-u=2", "-r=0.4", "-t=8s", "--reset-stats", "--think-time=0.5", "--csv", str(prefix)]
    assert locust(tiny_server, *options).returncode == 0
    tokens = figures(prefix)["output tokens", "all"]
    assert tokens["count"] / tokens["per_second"] < 7.0


def test_an_open_loop_sends_at_its_rate(tiny_server: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "run"
    options = ["-u=4", "-r=4", "-t=20s", "--arrivals=poisson", "--request-rate=1.5", "--csv", str(prefix)]
    done = locust(tiny_server, *options)
    assert done.returncode == 0, done.stderr
    # 120 are due, give or take what chance and the last answers make.
    assert 70 < figures(prefix)["TTFT", "SSE"]["count"] + figures(prefix)["TTFT", "WS"]["count"] < 170


def test_steps_in_several_processes(tiny_server: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "run"
    options = ["-u=4", "-t=10s", "--load-shape=steps", "--steps=2", "--processes=2", "--csv", str(prefix)]
    done = locust(tiny_server, *options, "--csv-full-history", "--max-error-rate=0")
    assert done.returncode == 0, done.stderr
    with Path(f"{prefix}_stats_history.csv").open() as file:
        users = [int(row["User Count"]) for row in csv.DictReader(file)]
    assert {2, 4} <= set(users)
    # What the workers tell last is in the summary too.
    total = int(rows(prefix)["Aggregated", ""]["Request Count"])
    assert 0 < figures(prefix)["requests", "all"]["count"] == total
    assert re.search(r"^client +0\.(?!00)", done.stderr, re.MULTILINE), done.stderr
    assert is_picture(Path(f"{prefix}_load.png"))


def test_workers_that_cannot_begin_are_exit_code_2() -> None:
    class Nobody:
        url = "http://127.0.0.1:1"

    done = locust(Nobody, "-u=1", "-t=3s", "--processes=2")
    assert done.returncode == 2
    assert "No worker has ended a request" in done.stderr


def test_one_transport_alone(tiny_server: Any) -> None:
    done = locust(tiny_server, "-u=2", "-t=4s", "--sse-weight=0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^TTFT +WS", done.stderr, re.MULTILINE)
    assert not re.search(r"^TTFT +SSE", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--mix=fun", "--mix: there is no 'fun'"),
        ("--sse-weight=-1", "--sse-weight and --websocket-weight must be"),
        ("--load-shape=ramp", "--load-shape ramp needs --run-time"),
        ("--request-rate=0", "--request-rate must be more than 0"),
    ],
)
def test_a_wrong_option_is_named(tiny_server: Any, option: str, message: str) -> None:
    done = locust(tiny_server, option)
    assert done.returncode == 1
    assert message in done.stderr


def test_no_server_is_exit_code_2() -> None:
    class Nobody:
        url = "http://127.0.0.1:1"

    done = locust(Nobody, "-u=1", "-t=20s")
    assert done.returncode == 2
    assert "cannot reach http://127.0.0.1:1" in done.stderr


def test_a_picture_of_a_run_that_was_hard(tmp_path: Path) -> None:
    from loadtest.load.plot import plot
    from loadtest.load.summary import INTER_TOKEN, TTFT, summarise
    from loadtest.load.timeline import Sample

    rng = random.Random(0)
    samples = [
        Sample(
            end_s=float(second),
            seconds=1.0,
            users=second,
            tokens=rng.randint(0, 900),
            requests=rng.randint(0, 9),
            errors=rng.randint(0, 3),
            # Nothing came for a while.
            ttft={} if 10 < second < 20 else {rng.uniform(1, 500): 1},
            inter_token={} if 10 < second < 20 else {rng.uniform(1, 50): 40},
        )
        for second in range(1, 61)
    ]
    histograms = {(TTFT, "SSE"): {100.0: 5}, (INTER_TOKEN, "SSE"): {}}
    summary = summarise(histograms, duration_s=60.0, tokens=9, requests=9, errors=3, client_cpu=0.1)
    for name, shown in {"whole": samples, "short": samples[:1], "nothing": samples[12:14]}.items():
        plot(shown, summary, tmp_path / f"{name}.png", "a title")
        assert is_picture(tmp_path / f"{name}.png")
