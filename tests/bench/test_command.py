"""The command as people call it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.scripted_stream import WAIT_S
from server import wait_until

from streamserve.bench.options import add_arguments, check
from streamserve.cli import main

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> int:
    return main(["bench", "serve", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "speed:3"], "--goodput: there is no speed; choose of ttft, tpot, e2el."),
        (["--goodput", "ttft"], "--goodput: 'ttft' has to be of the form NAME:MILLISECONDS."),
        (["--percentile-metrics", "ttft,fun"], "--percentile-metrics: there is no fun"),
        (["--metric-percentiles", "101"], "--metric-percentiles: percents are between 0 and 100."),
        (["--request-rate", "0"], "--request-rate must be more than 0."),
        (["--burstiness", "nan"], "--burstiness must be more than 0."),
        (["--num-prompts", "0"], "--num-prompts must be at least 1."),
        (["--random-input-len", "-1"], "--random-input-len must be at least 0."),
        (["--random-range-ratio", "1"], "--random-range-ratio must be at least 0 and less than 1."),
        (["--ramp-up-strategy", "linear"], "--ramp-up-strategy needs --ramp-up-start-rps"),
        (["--header", "X"], "--header: 'X' has to be of the form NAME=VALUE"),
        (["--extra-body", "[]"], "--extra-body has to be a JSON object."),
        (["--temperature", "inf"], "--temperature: inf is not a number to send."),
        (["--base-url", "ftp://x", "--model", "m"], "--base-url: ftp://x does not begin with http://"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--port", "1") == 1
    assert "cannot reach http://127.0.0.1:1:" in capsys.readouterr().err


def test_it_loads_neither_torch_nor_the_server() -> None:
    code = (
        "import sys, streamserve.bench.serve\n"
        "bad = {'torch', 'transformers', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_figures_of_a_real_server(
    tiny_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        *("--base-url", tiny_server.url, "--num-prompts", "12", "--save-detailed", "--disable-tqdm"),
        *("--random-input-len", "40", "--random-output-len", "9", "--result-dir", str(tmp_path)),
        *(
            "--percentile-metrics",
            "ttft,tpot,itl,e2el,client_queue_time",
            "--metric-percentiles",
            "50,99.9,99.99999",
        ),
        "--disable-tqdm",
    ]
    assert (
        bench(*common, "--max-concurrency=4", "--save-result", "--goodput", "ttft:1e9", "--metadata", "a=b")
        == 0
    )
    out = capsys.readouterr().out
    assert "Successful requests:                     12" in out
    assert "P99.9 ITL (ms):" in out
    (path,) = tmp_path.glob("openai-infqps-concurrency4-tiny-*.json")
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (12, 0, [""] * 12)
    assert result["total_input_tokens"] == 12 * 40
    assert result["total_output_tokens"] == 12 * 9
    assert result["output_lens"] == [9] * 12
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert result["a"] == "b"
    assert result["request_rate"] == "inf"
    keys = {
        f"{what}_{name}_ms"
        for what in ("mean", "median", "std", "p50", "p99.9", "p99.99999")
        for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time")
    }
    assert keys <= result.keys()
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]

    chat = ["--backend=openai-chat", "--num-warmups=2", "--ready-check-timeout-sec=60", "--request-rate=200"]
    assert bench(*common, *chat, "--append-result", "--result-filename=chats.json") == 0
    assert bench(*common, *chat, "--append-result", "--result-filename=chats.json") == 0
    lines = (tmp_path / "chats.json").read_text().splitlines()
    assert [json.loads(line)["total_output_tokens"] for line in lines] == [12 * 9] * 2


@pytest.mark.parametrize(
    ("options", "ignores"),
    [
        ([], True),
        (["--dataset-name=sharegpt-like"], None),
        (["--dataset-name=prefix_repetition", "--ignore-eos"], True),
        (["--extra-body", '{"ignore_eos": false}'], False),
    ],
)
def test_random_answers_are_as_long_as_asked(options: list[str], ignores: bool | None) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert check(parser.parse_args(options), None).body.get("ignore_eos") == ignores


def test_ctrl_c_shows_what_there_is(tiny_server: Any, tmp_path: Path) -> None:
    options = ["--base-url", tiny_server.url, "--num-prompts=100000", "--random-input-len=4"]
    options += [
        "--random-output-len=4",
        "--max-concurrency=4",
        "--save-result",
        "--result-dir",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "streamserve", "bench", "serve", *options]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "requests to" not in process.stderr.readline():
            assert process.poll() is None
        before = prompts_so_far(tiny_server)
        wait_until(lambda: prompts_so_far(tiny_server) > before + 8, "some were answered")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Ended by Ctrl-C: these are the figures of" in err
    assert "Traceback" not in err
    found = re.search(r"^Successful requests: +(\d+)", out, re.MULTILINE)
    assert found is not None
    assert 4 < int(found[1]) < 100_000
    assert not list(tmp_path.iterdir())


def prompts_so_far(server: Any) -> float:
    """Requests that the server has ended well."""
    text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    return sum(float(value) for value in re.findall(r"^vllm:request_success_total.* (\S+)$", text, re.M))


def test_as_many_connections_as_the_system_allows(tiny_server: Any) -> None:
    code = (
        "import resource, sys\n"
        "from streamserve.cli import main\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))\n"
        "sys.exit(main(['bench', 'serve', *sys.argv[1:]]))"
    )
    options = ["--base-url", tiny_server.url, "--num-prompts=100", "--disable-tqdm", "--random-input-len=4"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "--random-output-len=4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Failed requests:                         0" in done.stdout, done.stderr


def test_requests_that_all_fail_are_exit_code_1(tiny_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", tiny_server.url, "--model=no-such-model", "--num-prompts=3", "--disable-tqdm"]
    assert bench(*arguments, "--random-input-len=4") == 1
    out, err = capsys.readouterr()
    assert "Failed requests:                         3" in out
    assert "Error 2: HTTP 404" in err


def test_a_key_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads: list[str] = []
    with refusing_server(heads) as url:
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert bench("--base-url", url, "--num-prompts=1", "--header", "X-Team=blue") == 1
    assert "/v1/models answers 401" in capsys.readouterr().err
    assert "authorization: bearer secret" in heads[0].lower()
    assert "x-team: blue" in heads[0].lower()


@contextlib.contextmanager
def refusing_server(heads: list[str]) -> Iterator[str]:
    """Answers 401 to everything, from a thread of its own; `heads` are the requests'."""
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()
