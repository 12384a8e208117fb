"""Nobody gets to the application without a key, unless something says that they may."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from streamserve.frontend.api.endpoint import tenant_of
from streamserve.frontend.auth import Authentication, is_admin
from streamserve.frontend.keys import KeyRing

KEYS = KeyRing(["alice:sk-alice", "bob:sk-bob"], ["root:sk-root"])


class Recorder:
    """An application that only remembers what came to it."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, _receive: Any, _send: Any) -> None:
        self.scopes.append(scope)


async def knock(
    keys: KeyRing,
    path: str,
    *headers: tuple[bytes, bytes],
    kind: str = "http",
    options: dict[str, bool] | None = None,
    **more: Any,
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """What gets through, if anything, and what is answered."""
    app, said = Recorder(), []
    scope = {"type": kind, "path": path, "headers": list(headers), "method": "GET", **more}

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    await Authentication(app, keys, **(options or {}))(scope, receive, send)
    return (app.scopes[0] if app.scopes else None), said


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key.encode()


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/metrics", "/docs", "/nowhere", "/", ""]
)
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer("wrong")],
        [bearer("")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"sk-alice")],
        [(b"authorization", b"Basic sk-alice")],
        [(b"authorization", b"Bearer \xff\xfe\xc4\xe3")],
        [(b"authorization", b"\xe4\xbd\xa0 sk-alice")],
    ],
)
async def test_without_a_right_key_every_path_is_401(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    scope, said = await knock(KEYS, path, *headers)
    assert scope is None
    assert said[0]["status"] == 401
    assert (b"www-authenticate", b"Bearer") in said[0]["headers"]
    assert orjson.loads(said[1]["body"])["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "QUERY"])
async def test_no_method_is_an_exception(method: str) -> None:
    scope, said = await knock(KEYS, "/v1/models", method=method)
    assert scope is None
    assert said[0]["status"] == 401


@pytest.mark.parametrize(
    "header",
    [bearer("sk-alice"), (b"authorization", b"bearer   sk-alice  "), (b"authorization", b"BEARER sk-alice")],
)
async def test_a_right_key_gets_through_under_its_name(header: tuple[bytes, bytes]) -> None:
    scope, said = await knock(KEYS, "/v1/models", header)
    assert scope is not None
    assert not said
    assert tenant_of(scope) == "alice"
    assert not is_admin(scope)


async def test_a_right_key_beside_a_wrong_one_counts() -> None:
    scope, _ = await knock(KEYS, "/v1/models", bearer("wrong"), bearer("sk-bob"))
    assert scope is not None
    assert tenant_of(scope) == "bob"


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/ping"])
async def test_probes_need_no_key(path: str) -> None:
    scope, _ = await knock(KEYS, path)
    assert scope is not None
    assert tenant_of(scope) == ""


@pytest.mark.parametrize("path", ["/health/", "/health/x", "//health", "/HEALTH", "/x/health"])
async def test_what_only_looks_like_a_probe_does(path: str) -> None:
    scope, _ = await knock(KEYS, path)
    assert scope is None


async def test_metrics_are_open_only_if_asked_for() -> None:
    assert (await knock(KEYS, "/metrics"))[0] is None
    assert (await knock(KEYS, "/metrics", options={"metrics_open": True}))[0] is not None


async def test_the_prefix_of_a_proxy_is_no_part_of_the_path() -> None:
    scope, _ = await knock(KEYS, "/llm/health", root_path="/llm")
    assert scope is not None
    assert (await knock(KEYS, "/llm/reset_prefix_cache", bearer("sk-bob"), root_path="/llm"))[0] is None


@pytest.mark.parametrize(
    ("keys", "headers", "status"),
    [
        (KEYS, [], 401),
        (KEYS, [bearer("sk-alice")], 403),
        (KEYS, [bearer("sk-root")], None),
        (KeyRing(["x"]), [bearer("x")], 403),
        (KeyRing(), [], 403),
        (KeyRing([], ["root:y"]), [], 401),
        (KeyRing([], ["root:y"]), [bearer("y")], None),
    ],
)
async def test_control_needs_an_admin_key(
    keys: KeyRing, headers: list[tuple[bytes, bytes]], status: int | None
) -> None:
    scope, said = await knock(keys, "/reset_prefix_cache", *headers)
    assert (scope is None) == (status is not None)
    if status is not None:
        assert said[0]["status"] == status
    elif scope is not None:
        assert is_admin(scope)


async def test_an_admin_key_is_good_for_everything_else_too() -> None:
    scope, _ = await knock(KEYS, "/v1/models", bearer("sk-root"))
    assert scope is not None
    assert tenant_of(scope) == "root"


async def test_a_server_without_keys_lets_everybody_in() -> None:
    for kind in ("http", "websocket"):
        scope, _ = await knock(KeyRing(), "/v1/ws", kind=kind)
        assert scope is not None
        assert tenant_of(scope) == ""


async def test_the_start_of_the_server_is_no_request() -> None:
    scope, _ = await knock(KEYS, "", kind="lifespan")
    assert scope == {"type": "lifespan", "path": "", "headers": [], "method": "GET"}


EXTENSION = {"extensions": {"websocket.http.response": {}}}


@pytest.mark.parametrize("path", ["/v1/ws", "/health", "/ping"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"headers": [bearer("wrong")]},
        {"subprotocols": ["streamserve", "openai-insecure-api-key.wrong"]},
        {"subprotocols": ["sk-alice"]},
        {"query_string": b"api_key=sk-alice"},
        {"headers": [(b"authorization", b"Bearer \xff\xfe")]},
        {"subprotocols": ["openai-insecure-api-key.\xff\u4f60"]},
    ],
)
async def test_a_websocket_without_a_key_is_turned_down_before_it_is_accepted(
    path: str, more: dict[str, Any]
) -> None:
    headers = more.pop("headers", []) if "headers" in more else []
    scope, said = await knock(KEYS, path, *headers, kind="websocket", **EXTENSION, **more)
    assert scope is None
    assert [message["type"] for message in said] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert said[0]["status"] == 401
    _, said = await knock(KEYS, path, *headers, kind="websocket", **more)
    assert said[0]["type"] == "websocket.close"
    assert said[0]["code"] == 1008


async def test_a_websocket_brings_its_key_in_a_header_or_beside_its_subprotocol() -> None:
    scope, _ = await knock(KEYS, "/v1/ws", bearer("sk-bob"), kind="websocket")
    assert scope is not None
    assert tenant_of(scope) == "bob"
    offered = ["streamserve", "openai-insecure-api-key.sk-alice", "other"]
    scope, _ = await knock(KEYS, "/v1/ws", kind="websocket", subprotocols=offered)
    assert scope is not None
    assert tenant_of(scope) == "alice"
    # Whatever the application repeats of them, it cannot be the key.
    assert scope["subprotocols"] == ["streamserve", "other"]


async def test_a_websocket_brings_its_key_in_the_url_only_where_that_is_allowed() -> None:
    options = {"ws_query_key": True}
    for query, is_right in ((b"x=1&api_key=sk-alice", True), (b"api_key=%ff", False), (b"api_key=", False)):
        scope, _ = await knock(KEYS, "/v1/ws", kind="websocket", query_string=query, options=options)
        assert (scope is not None) == is_right
    scope, _ = await knock(KEYS, "/v1/models", query_string=b"api_key=sk-alice", options=options)
    assert scope is None
