"""The web pages, as they are served: what is there, what browsers are told, and who may have it."""

from __future__ import annotations

import gzip
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamserve.config import Config, ServerConfig
from streamserve.errors import ConfigError
from streamserve.frontend import pages
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.reception import build_reception

PUBLIC = Path(__file__).resolve().parents[2] / "clients" / "web" / "public"
FILES = sorted(path.relative_to(PUBLIC).as_posix() for path in PUBLIC.rglob("*") if path.is_file())
SERVED = [name for name in FILES if not name.endswith((".d.ts", ".md"))]
PAGES = {"/": "chat.html", "/dashboard": "dashboard.html"}
WITHOUT_PAGES = Deployment(server=ServerConfig(chat_page=False, dashboard=False))


@pytest.fixture
async def locked(run_harness: Any) -> AsyncIterator[Any]:
    """A frontend that asks for a key."""
    async with run_harness(deployment=Deployment(keys=KeyRing(["sk"]))) as harness:
        yield harness


@pytest.mark.parametrize("path", PAGES)
async def test_pages_are_where_they_are_looked_for(frontend: Any, path: str) -> None:
    response = await frontend.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.content == (PUBLIC / PAGES[path]).read_bytes()


@pytest.mark.parametrize("name", SERVED)
async def test_every_file_is_served_as_what_it_is(frontend: Any, name: str) -> None:
    response = await frontend.http.get(f"/web/{name}")
    kinds = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    kind = kinds.get(name.rpartition(".")[2], "text/plain")
    assert response.status_code == 200
    assert response.headers["content-type"].partition(";")[0] == kind
    assert response.content == (PUBLIC / name).read_bytes()


@pytest.mark.parametrize("path", PAGES)
async def test_all_that_is_loaded_is_there(frontend: Any, path: str) -> None:
    page = (await frontend.http.get(path)).text
    found = re.findall(r'(?:src|href)="(web/[^"]+)"', page)
    assert len(found) > 5
    for name in found:
        assert (await frontend.http.get(f"/{name}")).status_code == 200, name
    # Nothing from elsewhere, and nothing that a path prefix of a proxy would break.
    assert not re.findall(r'(?:src|href)="(?:/|https?:)', page)


def test_modules_import_what_there_is_and_nothing_from_elsewhere() -> None:
    for path in (PUBLIC / "js").glob("*.js"):
        for target in re.findall(r'^import .*?from "([^"]+)";$', path.read_text(), re.MULTILINE):
            assert target.startswith("."), f"{path.name}: {target}"
            assert (path.parent / target).resolve().is_file(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", [*PAGES, "/web/js/chat.js", "/web/icon.svg"])
async def test_browsers_are_told_what_the_page_may_do(frontend: Any, path: str) -> None:
    headers = (await frontend.http.get(path)).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_what_a_browser_has_is_not_sent_again(frontend: Any, coding: str) -> None:
    accept = {"Accept-Encoding": coding}
    first = await frontend.http.get("/web/js/chat.js", headers=accept)
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await frontend.http.get("/web/js/chat.js", headers={**accept, "If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    other = await frontend.http.get("/web/js/chat.js", headers={**accept, "If-None-Match": '"other"'})
    assert other.status_code == 200
    assert (await frontend.http.get("/")).headers["etag"] != tag


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        ("gzip, br", True),
        ("br;q=1, gzip;q=0.5", True),
        ("", False),
        ("br", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("gzip;q=0.001", True),
        ("gzipped", False),
    ],
)
async def test_it_is_sent_packed_to_those_who_can_unpack(
    frontend: Any, accepted: str, is_packed: bool
) -> None:
    request = frontend.http.build_request("GET", "/web/js/chat.js", headers={"Accept-Encoding": accepted})
    response = await frontend.http.send(request, stream=True)
    raw = b"".join([chunk async for chunk in response.aiter_raw()])
    whole = (PUBLIC / "js" / "chat.js").read_bytes()
    assert response.headers["vary"] == "Accept-Encoding"
    assert (response.headers.get("content-encoding") == "gzip") == is_packed
    assert (gzip.decompress(raw) if is_packed else raw) == whole


async def test_head(frontend: Any) -> None:
    for path in ("/", "/web/css/tokens.css"):
        head = await frontend.http.head(path)
        get = await frontend.http.get(path)
        assert head.status_code == 200
        ignored = ("x-request-id",)
        assert [(k, v) for k, v in head.headers.items() if k not in ignored] == [
            (k, v) for k, v in get.headers.items() if k not in ignored
        ]


@pytest.mark.parametrize(
    "path",
    [
        "/web/",
        "/web/nothing.js",
        "/web/js",
        "/web/../app.py",
        "/web/%2e%2e/pages.py",
        "/web/vendor/README.md",
    ],
)
async def test_there_is_nothing_else(frontend: Any, path: str) -> None:
    response = await frontend.http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_only_reading(frontend: Any) -> None:
    for path in ("/", "/web/js/chat.js"):
        assert (await frontend.http.post(path, json={})).status_code == 405


@pytest.mark.parametrize("is_on", [{"/"}, {"/dashboard"}, set()])
async def test_each_can_be_turned_off(run_harness: Any, is_on: set[str]) -> None:
    options = ServerConfig(chat_page="/" in is_on, dashboard="/dashboard" in is_on)
    async with run_harness(deployment=Deployment(server=options)) as frontend:
        for path in PAGES:
            status = 200 if path in is_on else 404
            assert (await frontend.http.get(path)).status_code == status, path
        assert (await frontend.http.get("/web/js/chat.js")).status_code == (200 if is_on else 404)


async def test_it_needs_no_key_and_opens_nothing_else(locked: Any) -> None:
    for path in (*PAGES, *(f"/web/{name}" for name in SERVED)):
        assert (await locked.http.get(path)).status_code == 200, path
    for path in ("/web/nothing.js", "/web", "/v1/models", "/docs"):
        assert (await locked.http.get(path)).status_code == 401, path


async def test_without_it_the_root_needs_a_key_like_all_else(run_harness: Any) -> None:
    around = Deployment(server=ServerConfig(chat_page=False), keys=KeyRing(["sk"]))
    async with run_harness(deployment=around) as frontend:
        assert (await frontend.http.get("/")).status_code == 401


async def test_behind_a_path_prefix(run_harness: Any) -> None:
    around = Deployment(server=ServerConfig(root_path="/llm"), keys=KeyRing(["sk"]))
    async with run_harness(deployment=around) as frontend:
        transport = httpx.ASGITransport(frontend.app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/llm/")).status_code == 200
            assert (await http.get("/llm/web/js/chat.js")).status_code == 200


@pytest.mark.parametrize(("is_on", "status"), [(True, 200), (False, 503)])
async def test_it_is_there_before_the_model(is_on: bool, status: int) -> None:
    options = ServerConfig(chat_page=is_on, dashboard=is_on)
    app = build_reception(Deployment(server=options), Metrics())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        for path in PAGES:
            assert (await http.get(path)).status_code == status
        assert (await http.get("/web/js/chat.js")).status_code == status
        assert (await http.get("/v1/models")).status_code == 503


async def test_it_is_counted_as_one_page_and_one_folder(frontend: Any) -> None:
    await frontend.http.get("/")
    await frontend.http.get("/web/js/chat.js")
    await frontend.http.get("/web/js/dom.js")
    metrics = (await frontend.http.get("/metrics")).text
    counted = re.findall(r'http_requests_total\{handler="(/|/web/\{path:path\})",.*"2xx".*\} (\d+)', metrics)
    assert dict(counted) == {"/": "1", "/web/{path:path}": "2"}


def test_a_server_without_the_files_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "FOLDERS", (tmp_path / "none",))
    pages.load_assets.cache_clear()
    try:
        with pytest.raises(ConfigError, match="--no-chat-page"):
            pages.Pages(Config().server)
        assert pages.Pages(WITHOUT_PAGES.server).routes == []
    finally:
        pages.load_assets.cache_clear()
