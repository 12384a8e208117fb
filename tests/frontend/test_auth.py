"""Nobody gets to the application without a key, unless something says that they may."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from streamserve.config import ServerConfig
from streamserve.frontend.api.endpoint import tenant_of
from streamserve.frontend.auth import Authentication, is_admin
from streamserve.frontend.hosts import Hosts
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
    options: dict[str, Any] | None = None,
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


# Web pages

PAGE, FORM = b"https://page.example", (b"content-type", b"application/x-www-form-urlencoded")
JSON = (b"content-type", b"application/json; charset=utf-8")
HERE = (b"host", b"llm.example:8000")


def origin(value: bytes) -> tuple[bytes, bytes]:
    return b"origin", value


async def knock_keyless(*headers: tuple[bytes, bytes], **more: Any) -> int | None:
    """The status with which a server without keys turns somebody away, if it does."""
    path, options = more.pop("path", "/v1/ws"), {"allowed_origins": more.pop("allowed", ())}
    scope, said = await knock(KeyRing(), path, *headers, options=options, **{**EXTENSION, **more})
    if scope is not None:
        assert not said
        return None
    assert orjson.loads(said[1]["body"])["error"]["code"] == "origin_not_allowed"
    status: int = said[0]["status"]
    return status


@pytest.mark.parametrize(
    "foreign",
    [
        b"https://page.example",
        b"http://llm.example",
        b"http://llm.example:8001",
        b"http://llm.example.evil.example:8000",
        b"http://evil.example@llm.example:8000.evil.example",
        b"null",
        b"",
        b"file://",
        b"http://[::1",
        b"http://llm.example:80000",
        b"\xff\xfe",
    ],
)
async def test_a_foreign_page_opens_no_websocket_and_posts_no_form(foreign: bytes) -> None:
    headers = (HERE, origin(foreign))
    assert await knock_keyless(*headers, kind="websocket") == 403
    for simple in (FORM, (b"content-type", b"text/plain"), (b"x-none", b"")):
        assert await knock_keyless(*headers, simple, method="POST") == 403
    # What a browser asks for first, and what has no effect, is left to CORS.
    assert await knock_keyless(*headers, JSON, method="POST") is None
    assert await knock_keyless(*headers, (b"content-type", b"application/x+json"), method="POST") is None
    assert await knock_keyless(*headers, method="GET") is None
    assert await knock_keyless(*headers, method="DELETE") is None


@pytest.mark.parametrize(
    ("host", "same"),
    [
        (b"llm.example:8000", b"http://llm.example:8000"),
        (b"LLM.example:8000", b"http://llm.EXAMPLE:8000"),
        (b"llm.example", b"http://llm.example"),
        (b"llm.example:80", b"http://llm.example"),
        # Behind a proxy that does the TLS the connection itself is plain HTTP.
        (b"llm.example", b"https://llm.example"),
        (b"llm.example:443", b"https://llm.example"),
        (b"127.0.0.1:8000", b"http://127.0.0.1:8000"),
        (b"[::1]:8000", b"http://[::1]:8000"),
    ],
)
async def test_a_page_of_the_server_itself_may(host: bytes, same: bytes) -> None:
    headers = ((b"host", host), origin(same))
    assert await knock_keyless(*headers, kind="websocket") is None
    assert await knock_keyless(*headers, kind="websocket", path="/llm/v1/ws", root_path="/llm") is None
    assert await knock_keyless(*headers, FORM, method="POST") is None


async def test_whom_the_browser_itself_calls_a_page_of_the_server_may() -> None:
    """Behind a proxy that puts another name into the Host header."""
    headers = ((b"host", b"backend:8000"), origin(PAGE), (b"sec-fetch-site", b"same-origin"))
    assert await knock_keyless(*headers, kind="websocket") is None
    for other in (b"same-site", b"cross-site", b"none"):
        headers = ((b"host", b"backend:8000"), origin(PAGE), (b"sec-fetch-site", other))
        assert await knock_keyless(*headers, kind="websocket") == 403


async def test_what_is_no_page_has_no_origin() -> None:
    assert await knock_keyless(HERE, kind="websocket") is None
    assert await knock_keyless(HERE, FORM, method="POST") is None
    assert await knock_keyless(kind="websocket") is None


async def test_pages_that_are_allowed_may() -> None:
    for allowed, status in ((("https://page.example",), None), (("*",), None), (("https://x.example",), 403)):
        headers = (HERE, origin(PAGE))
        assert await knock_keyless(*headers, kind="websocket", allowed=allowed) == status
        assert await knock_keyless(*headers, FORM, method="POST", allowed=allowed) == status


async def test_who_brings_a_key_may_come_from_anywhere() -> None:
    """No page can send a key that it does not know."""
    for keys in (KEYS, KeyRing([], ["root:sk-root"])):
        key = bearer("sk-root")
        scope, _ = await knock(keys, "/v1/ws", HERE, origin(PAGE), key, kind="websocket")
        assert scope is not None
    _, said = await knock(KEYS, "/v1/ws", HERE, origin(PAGE), kind="websocket", **EXTENSION)
    assert said[0]["status"] == 401


# Names

LOCAL = ServerConfig()


async def call(
    server: ServerConfig, host: bytes | None, keys: KeyRing | None = None, **more: Any
) -> int | None:
    """The status with which a server turns somebody away who calls it by a name, if it does."""
    keys, headers = keys or KeyRing(), [] if host is None else [(b"host", host)]
    options = {"hosts": Hosts.of(server, needs_key=keys.needs_key), "open_paths": ["/"]}
    path, more = more.pop("path", "/v1/models"), {**EXTENSION, **more}
    scope, said = await knock(keys, path, *headers, *more.pop("and_headers", ()), options=options, **more)
    if scope is not None:
        return None
    status: int = said[0]["status"]
    assert orjson.loads(said[1]["body"])["error"]["code"] == "host_not_allowed"
    return status


FOREIGN_NAMES = [
    b"evil.example",
    b"evil.example:8000",
    b"localhost.evil.example:8000",
    b"127.0.0.1.evil.example",
    b"evil-localhost",
    b"xlocalhost:8000",
    b"evil.example@localhost",
    b"localhost@evil.example",
    b"127.0.0.1 evil.example",
    b"2130706433.evil.example",
    b"",
    b":8000",
    b"[::1",
    b"\xff\xfe",
]


@pytest.mark.parametrize("host", FOREIGN_NAMES)
async def test_a_name_that_somebody_else_may_have_is_no_name_of_a_private_server(host: bytes) -> None:
    """A page whose name suddenly stands for this machine: to its browser, the server is its own."""
    headers = ((b"sec-fetch-site", b"same-origin"), (b"origin", b"http://" + host))
    for kind, path in (("http", "/v1/models"), ("http", "/metrics"), ("http", "/"), ("websocket", "/v1/ws")):
        if host == b"evil.example@localhost":
            # What stands before an @ is no part of a name, and browsers send none.
            assert await call(LOCAL, host, kind=kind, path=path) is None
            continue
        assert await call(LOCAL, host, kind=kind, path=path, and_headers=headers) == 403, (kind, path)


@pytest.mark.parametrize(
    "host",
    [
        None,
        b"127.0.0.1:8000",
        b"localhost",
        b"LOCALHOST:1",
        b"localhost.:8000",
        b"chat.localhost",
        b"[::1]:8000",
        b"192.0.2.7:8000",
        b"[2001:db8::1]",
    ],
)
async def test_addresses_and_localhost_are_nobody_elses(host: bytes | None) -> None:
    for listening in ("127.0.0.1", "::1", "localhost", "127.3.2.1"):
        assert await call(ServerConfig(host=listening), host) is None


@pytest.mark.parametrize("host", [b"llm.example", b"LLM.example.:8000"])
async def test_names_that_the_operator_gives(host: bytes) -> None:
    named = ServerConfig(allowed_hosts=("llm.Example", "other.example"))
    assert await call(named, host) is None
    assert await call(named, b"x." + host) == 403
    # Then they are all that there are, wherever it listens.
    assert await call(ServerConfig(host="0.0.0.0", allowed_hosts=("llm.example",)), b"evil.example") == 403
    assert await call(ServerConfig(allowed_hosts=("*",)), b"evil.example") is None


async def test_a_server_for_others_has_any_name() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7", "llm.example"):
        assert await call(ServerConfig(host=host), b"llm.example") is None
    # Every page may use it anyway.
    assert await call(ServerConfig(allowed_origins=("*",)), b"evil.example") is None


async def test_where_there_are_keys_names_do_not_matter_unless_they_are_given() -> None:
    """No page can send a key that it does not know; a proxy on the machine has whatever name it has."""
    assert await call(LOCAL, b"llm.example", KEYS, path="/") is None
    named = ServerConfig(allowed_hosts=("llm.example",))
    assert await call(named, b"evil.example", KEYS, path="/health") == 403
    assert await call(named, b"evil.example", KEYS, and_headers=[bearer("sk-bob")]) is None
