"""/openapi.json, and /docs: the same as a page for people, which loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from streamserve.frontend.api.openapi import document
from streamserve.frontend.pages import SECURITY_HEADERS

# The page has no scripts, and its one style sheet is in it.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid; }
section { margin: 2rem 0; }
code, .path { font-family: ui-monospace, monospace; font-size: 0.92em; }
.method { font-weight: bold; text-transform: uppercase; margin-right: 0.5em; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1rem 0.2rem 0; border-top: 1px solid #8884; }
small { opacity: 0.75; }
"""


class Documents:
    """The endpoints.

    Args:
        root_path: prefix that a proxy takes off.
    """

    def __init__(self, root_path: str) -> None:
        self._json, self._page = _written(root_path)

    async def openapi(self, _http: Request) -> Response:
        """The OpenAPI document."""
        return Response(self._json, media_type="application/json")

    async def docs(self, _http: Request) -> Response:
        """The page."""
        return HTMLResponse(self._page, headers={**SECURITY_HEADERS, "Content-Security-Policy": _POLICY})


@cache
def _written(root_path: str) -> tuple[bytes, str]:
    """The document and the page; made once, for it takes a while."""
    described = document(root_path)
    return orjson.dumps(described), page(described)


def page(described: dict[str, Any]) -> str:
    """The page that says what the OpenAPI document `described` says."""
    info = described["info"]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        f"<p>{_text(info['description'])}</p>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
        *_sections(described),
        "<h2>Objects</h2>",
    ]
    for name, schema in described["components"]["schemas"].items():
        parts += _schema(name, schema)
    return "\n".join([*parts, "</body></html>"])


def _sections(described: dict[str, Any]) -> Iterator[str]:
    shown = None
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation["tags"]
            if tag != shown:
                shown = tag
                yield f"<h2>{escape(tag)}</h2>"
            yield from _operation(path, method, operation)


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    key = "" if operation.get("security") == [] else " <small>needs a key</small>"
    yield f'<section id="{escape(operation["operationId"])}">'
    yield f'<h3><span class="method">{method}</span><span class="path">{escape(path)}</span>{key}</h3>'
    yield f"<p>{_text(operation['summary'])}</p>"
    if operation["parameters"]:
        rows = [
            (f"<code>{escape(each['name'])}</code>", each["in"], _text(each["description"]))
            for each in operation["parameters"]
        ]
        yield _table(("parameter", "in", ""), rows)
    body = operation.get("requestBody")
    if body is not None:
        yield f"<p>Body: {_type(body['content']['application/json']['schema'])}</p>"
    yield _table(("status", "", "body"), [_response(*each) for each in operation["responses"].items()])
    yield "</section>"


def _response(status: str, response: dict[str, Any]) -> tuple[str, str, str]:
    bodies = []
    for kind, content in response["content"].items():
        schema = content["schema"]
        if kind == "text/event-stream":
            schema = schema["properties"]["data"]["anyOf"][0]["contentSchema"]
        shown = _type(schema)
        bodies.append(f"{shown} <small>{escape(kind)}</small>")
    return status, _text(response["description"]), "<br>".join(bodies)


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<section id="{escape(name)}"><h3>{escape(name)}</h3><p>{_text(schema.get("description", ""))}</p>'
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(member)}</code>{'' if member in required else ' <small>optional</small>'}",
            _type(described),
            _text(described.get("description", "")),
        )
        for member, described in schema.get("properties", {}).items()
    ]
    if rows:
        yield _table(("member", "type", ""), rows)
    yield "</section>"


def _type(schema: dict[str, Any]) -> str:
    """The type in words, with links to the objects in it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[union]))
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return escape(kind)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(text: str) -> str:
    """Plain text with `code` in it."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if at % 2 else piece for at, piece in enumerate(pieces))
