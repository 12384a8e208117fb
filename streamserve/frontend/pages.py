"""The web pages and the files that they load, served from memory.

A page is a row of PAGES. What pages load (style sheets, modules, vendored libraries with their licences) is
one folder, all of which is served under /web/; the pages name it relative to themselves, so a path prefix
that a proxy takes off does no harm. None of it is secret and none of it needs a key: a page must be there to
ask for one.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamserve.config import ServerConfig
from streamserve.errors import ConfigError
from streamserve.frontend import paths

# In a wheel the files lie beside this module, in a checkout where they are written.
FOLDERS = (
    Path(__file__).resolve().parent / "web",
    Path(__file__).resolve().parents[2] / "clients" / "web" / "public",
)
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# A coding that is named with a weight of nothing is refused.
_PACKED = re.compile(r"gzip(?!;q=0(\.0*)?$)(;.*)?")
# Scripts, styles and connections of this server and no others; nobody's frame; and of strings, only what the
# sanitiser has seen becomes markup.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    ]
)
SECURITY_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
HEADERS = {
    **SECURITY_HEADERS,
    # Kept, and asked about each time: a new version of the server has all its files at once.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Attributes:
        path: where it is served.
        file: in the folder.
        is_wanted: whether the options ask for it.
    """

    path: str
    file: str
    is_wanted: Callable[[ServerConfig], bool]


PAGES = (
    Page(paths.CHAT_PAGE, "chat.html", lambda server: server.chat_page),
    Page(paths.DASHBOARD, "dashboard.html", lambda server: server.dashboard),
)


class Asset:
    """A file, as it is sent.

    Args:
        body: its bytes.
        content_type: what they are.
    """

    __slots__ = ("_encodings", "_etag")

    def __init__(self, body: bytes, content_type: str) -> None:
        self._etag = hashlib.sha256(body).hexdigest()[:32]
        plain = {**HEADERS, "Content-Type": content_type, "ETag": f'"{self._etag}"'}
        packed = {**plain, "Content-Encoding": "gzip", "ETag": f'"{self._etag}-gzip"'}
        self._encodings = {False: (body, plain), True: (gzip.compress(body, mtime=0), packed)}

    async def get(self, http: Request) -> Response:
        """The file, or that the client's copy is still good."""
        body, headers = self._encodings[_accepts_gzip(http.headers.get("accept-encoding", ""))]
        if self._is_known(http.headers.get("if-none-match", "")):
            kept = {name: headers[name] for name in ("ETag", "Cache-Control", "Vary")}
            return Response(status_code=304, headers=kept)
        return Response(body, headers=headers)

    def _is_known(self, tags: str) -> bool:
        known = {tag.strip().removeprefix("W/").strip('"').removesuffix("-gzip") for tag in tags.split(",")}
        return self._etag in known or tags.strip() == "*"


def _accepts_gzip(accepted: str) -> bool:
    codings = [coding.replace(" ", "").lower() for coding in accepted.split(",")]
    return any(_PACKED.fullmatch(coding) for coding in codings)


class Folder:
    """All files that pages load.

    Args:
        assets: by their path in the folder.
    """

    def __init__(self, assets: Mapping[str, Asset]) -> None:
        self._assets = assets

    async def get(self, http: Request) -> Response:
        """One of them."""
        asset = self._assets.get(http.path_params["path"])
        if asset is None:
            raise HTTPException(404)
        return await asset.get(http)


class Pages:
    """The pages that the options ask for.

    Args:
        server: the options.

    Raises:
        ConfigError: a page is wanted and its files are not installed.

    Attributes:
        routes: for the application.
        paths: all that is served, none of which needs a key.
    """

    def __init__(self, server: ServerConfig) -> None:
        self.routes: list[Route] = []
        self.paths: frozenset[str] = frozenset()
        wanted = [page for page in PAGES if page.is_wanted(server)]
        if not wanted:
            return
        assets = load_assets()
        self.routes = [Route(page.path, assets[page.file].get, methods=["GET"]) for page in wanted]
        self.routes.append(Route(paths.PAGE_FILES, Folder(assets).get, methods=["GET"]))
        prefix = paths.PAGE_FILES.partition("{")[0]
        self.paths = frozenset([*(page.path for page in wanted), *(prefix + name for name in assets)])


@cache
def load_assets() -> Mapping[str, Asset]:
    """All files of the pages, by their path in the folder; read once.

    Raises:
        ConfigError: there are none.
    """
    folder = next((each for each in FOLDERS if each.is_dir()), None)
    if folder is None:
        raise ConfigError(
            f"--chat-page, --dashboard: the files of the pages are not in {FOLDERS[0]}; install streamserve "
            "again, or turn the pages off with --no-chat-page --no-dashboard."
        )
    return {
        path.relative_to(folder).as_posix(): Asset(path.read_bytes(), CONTENT_TYPES[path.suffix])
        for path in sorted(folder.rglob("*"))
        if path.suffix in CONTENT_TYPES
    }
