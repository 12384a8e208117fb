"""A server that asks for no key, as pages in the browsers of those who can reach it see it."""

from __future__ import annotations

import json
import subprocess
from socket import create_connection

import httpx
import pytest
from server import load, running_server
from ways_in import CHAT, COMPLETION, PATHS, RESPONSE, prompt
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

FOREIGN = "https://page.example"
SOCKETS = ("/v1/ws", "/v1/responses")
ENDPOINTS = pytest.mark.parametrize("endpoint", [CHAT, COMPLETION, RESPONSE])


def body(endpoint, **fields):
    limit = "max_output_tokens" if endpoint == RESPONSE else "max_tokens"
    return json.dumps({"model": "tiny", **prompt(endpoint, "hi"), limit: 2, **fields})


def post(server, path, content, origin, content_type):
    headers = {"Origin": origin} if origin else {}
    request = httpx.Request("POST", server.url + path, content=content, headers=headers)
    request.headers.pop("content-type", None)
    if content_type:
        request.headers["content-type"] = content_type
    with httpx.Client(timeout=300) as client:
        return client.send(request)


@pytest.mark.parametrize("path", SOCKETS)
def test_a_foreign_page_opens_no_websocket(tiny_server, path):
    url = tiny_server.url.replace("http", "ws", 1) + path
    for origin in (FOREIGN, "http://127.0.0.1:1", "null"):
        with pytest.raises(InvalidStatus) as refused, connect(url, origin=origin):
            pass
        assert refused.value.response.status_code == 403
        assert json.loads(refused.value.response.body)["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize("path", SOCKETS)
def test_the_servers_own_pages_and_what_is_no_page_open_websockets(tiny_server, path):
    url = tiny_server.url.replace("http", "ws", 1) + path
    for origin in (tiny_server.url, tiny_server.url.replace("http", "https", 1), None):
        with connect(url, origin=origin) as socket:
            socket.send("{")
            assert json.loads(socket.recv(300))["type"] == "error"


@ENDPOINTS
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_foreign_page_starts_no_answer_without_asking(tiny_server, endpoint, content_type):
    for path in (PATHS[endpoint], "/tokenize"):
        refused = post(tiny_server, path, body(endpoint, stream=True), FOREIGN, content_type)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert load(tiny_server)["running"] == 0


def test_a_foreign_page_that_asks_is_told_no(tiny_server):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    answer = httpx.options(tiny_server.url + PATHS[CHAT], headers={"Origin": FOREIGN, **asks}, timeout=300)
    assert not answer.is_success
    assert "access-control-allow-origin" not in answer.headers


@ENDPOINTS
@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded", ""])
def test_the_servers_own_pages_and_what_is_no_page_are_answered(tiny_server, endpoint, content_type):
    for origin in (tiny_server.url, None):
        assert post(tiny_server, PATHS[endpoint], body(endpoint), origin, content_type).status_code == 200


@ENDPOINTS
def test_curl_without_a_content_type(tiny_server, endpoint):
    command = [
        "curl",
        "--silent",
        "--fail-with-body",
        tiny_server.url + PATHS[endpoint],
        "-d",
        body(endpoint),
    ]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    assert json.loads(done.stdout)["usage"]


def test_a_page_that_is_allowed_may(tiny_model):
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=500",
        f"--allowed-origins={FOREIGN}",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        for path in SOCKETS:
            url = server.url.replace("http", "ws", 1) + path
            with connect(url, origin=FOREIGN) as socket:
                socket.send("{")
                assert json.loads(socket.recv(300))["type"] == "error"
            with pytest.raises(InvalidStatus), connect(url, origin="https://other.example"):
                pass
        for endpoint in (CHAT, COMPLETION, RESPONSE):
            answer = post(server, PATHS[endpoint], body(endpoint), FOREIGN, "text/plain")
            # What it says is read; what it is may still be wrong.
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
            assert answer.headers["access-control-allow-origin"] == FOREIGN
            assert post(server, PATHS[endpoint], body(endpoint), FOREIGN, "").status_code == 200
            assert (
                post(server, PATHS[endpoint], body(endpoint), "https://other.example", "").status_code == 403
            )


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/dashboard/events", "/", "/ready"])
def test_a_page_whose_name_stands_for_this_machine_reads_nothing(tiny_server, path):
    """DNS rebinding: to the browser the server is the page's own, and only the name tells."""
    port = tiny_server.url.rpartition(":")[2]
    rebound = {"Host": f"page.example:{port}", "Sec-Fetch-Site": "same-origin"}
    with httpx.stream("GET", tiny_server.url + path, headers=rebound, timeout=300) as answer:
        answer.read()
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", SOCKETS)
def test_nor_does_it_open_a_websocket(tiny_server, path):
    port = tiny_server.url.rpartition(":")[2]
    url = f"ws://page.example:{port}{path}"
    sock = create_connection(("127.0.0.1", int(port)))
    with sock, pytest.raises(InvalidStatus) as refused:
        connect(url, sock=sock, origin=f"http://page.example:{port}")
    assert refused.value.response.status_code == 403


def test_it_may_be_called_by_its_own_names(tiny_server):
    port = tiny_server.url.rpartition(":")[2]
    for name in ("localhost", "127.0.0.1", "[::1]", "plain.test"):
        answer = httpx.get(f"{tiny_server.url}/v1/models", headers={"Host": f"{name}:{port}"}, timeout=300)
        assert answer.status_code == 200
