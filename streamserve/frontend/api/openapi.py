"""/openapi.json: every route with its parameters, bodies, answers and errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from streamserve import __version__
from streamserve.frontend import paths
from streamserve.frontend.api import replies
from streamserve.frontend.api.dashboard_replies import Snapshot
from streamserve.frontend.api.schema.chat import ChatRequest
from streamserve.frontend.api.schema.completion import CompletionRequest
from streamserve.frontend.api.schema.responses import ResponsesRequest
from streamserve.frontend.api.schema.tokenization import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    TextTokenizeRequest,
)

DESCRIPTION = """\
OpenAI-compatible API of streamserve. With `"stream": true` an answer comes as server-sent events, each with
one of the objects described here as its data. WebSockets (`/v1/ws`, and OpenAI's own mode at `/v1/responses`)
carry the same objects and are described in docs/api.md.
"""

_REF = "#/components/schemas/"
_MODULE = re.compile(rb"\bstreamserve__(?:[a-z_]+__)?([a-z]+)__(?=[A-Z])")
_REQUEST_ERRORS = (400, 401, 403, 404, 408, 413, 429, 500, 503)
_SIMPLE_ERRORS = (401, 500)
# How errors differ from what their names say.
_MEANINGS = {
    400: "The request is wrong; `param` names the field.",
    401: "A valid API key is needed.",
    403: "An admin key is needed, or a web page asks that may not use this server.",
    404: "There is no such model or stream.",
    408: "The body took too long to arrive.",
    409: "The caller has a stream of that id; a newer connection has it; there is no prefix cache.",
    410: "The events that are asked for are no longer held.",
    413: "The body is too large.",
    429: "Too many requests are waiting; Retry-After says when to come back.",
    500: "The server failed on this request.",
    503: "The engine is loading, draining or gone, or the request's time in the queue ran out.",
}
# Forms that are accepted and that the models of requests say in code.
_LOOSER: dict[tuple[str, str], dict[str, Any]] = {
    ("CompletionRequest", "prompt"): {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        ],
        "description": "Text or token ids, or a list of either.",
    },
    **{
        (name, "stop"): {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
                {"type": "null"},
            ],
            "description": "Text that ends the answer and is not in it.",
        }
        for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest")
    },
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value in path, query or header: any text, or one of some words."""

    name: str
    place: str
    description: str
    words: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """As OpenAPI writes it."""
        return {
            "name": self.name,
            "in": self.place,
            "required": self.place == "path",
            "description": self.description,
            "schema": {"type": "string", **({"enum": list(self.words)} if self.words else {})},
        }


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        path: as OpenAPI writes it.
        method: in lower case.
        tag: the section that it belongs to.
        summary: what it does, in a line.
        reply: the body of success; None is text, or events alone.
        requests: the bodies that it takes; any of them.
        chunk: the data of its events, if it can stream.
        errors: statuses with the usual error body.
        unwell: a status with the body of success, for probes.
        parameters: in path, query and headers.
        is_open: whether it needs no key.
    """

    path: str
    method: str
    tag: str
    summary: str
    reply: type[BaseModel] | None
    requests: tuple[type[BaseModel], ...] = ()
    chunk: type[BaseModel] | None = None
    errors: tuple[int, ...] = _SIMPLE_ERRORS
    unwell: int | None = None
    parameters: tuple[Parameter, ...] = ()
    is_open: bool = False


def _generation(
    path: str,
    summary: str,
    request: type[BaseModel],
    reply: type[BaseModel],
    chunk: type[BaseModel],
) -> Operation:
    errors = tuple(sorted((*_REQUEST_ERRORS, 409)))
    return Operation(
        path, "post", "Generation", summary, reply, (request,), chunk, errors=errors, parameters=(_ASK,)
    )


def _probe(path: str, method: str, summary: str, *, deep: bool = False) -> Operation:
    return Operation(
        path,
        method,
        "Probes",
        summary,
        replies.Status,
        errors=(400, 500) if deep else (500,),
        unwell=503,
        parameters=(_DEEP,) if deep else (),
        is_open=True,
    )


_ID = (Parameter("id", "path", "The id of the answer."),)
_LAST_EVENT = Parameter(
    "Last-Event-ID", "header", "Asks for the events of a resumable stream, after the one of this id."
)
_AFTER = Parameter("after", "query", "The same by number, where Accept is text/event-stream.")
_ASK = Parameter("X-Stream-Resume", "header", "1 asks for a stream that outlives its connection.")
_MODEL = (Parameter("model", "path", "The name of the model."),)
_DEEP = Parameter("deep", "query", "Run one token through everything.", ("0", "1", "false", "true"))

OPERATIONS: tuple[Operation, ...] = (
    _generation(
        "/v1/chat/completions",
        "Answers a conversation.",
        ChatRequest,
        replies.ChatCompletion,
        replies.ChatCompletionChunk,
    ),
    _generation(
        "/v1/completions", "Continues a text.", CompletionRequest, replies.Completion, replies.Completion
    ),
    _generation(
        "/v1/responses",
        "Answers a conversation in the form of OpenAI's responses.",
        ResponsesRequest,
        replies.Response,
        replies.ResponseEvent,
    ),
    Operation(
        "/tokenize", "post", "Text", "The token ids of a text or a conversation.", replies.Tokens,
        (TextTokenizeRequest, ChatTokenizeRequest), errors=_REQUEST_ERRORS,
    ),
    Operation(
        "/detokenize", "post", "Text", "The text of token ids.", replies.Prompt, (DetokenizeRequest,),
        errors=_REQUEST_ERRORS,
    ),
    Operation("/v1/models", "get", "Models", "All served models.", replies.ModelList),
    Operation(
        "/v1/models/{model}", "get", "Models", "One model.", replies.ModelCard, errors=(401, 404, 500),
        parameters=_MODEL,
    ),
    Operation("/v1/streams", "get", "Streams", "The caller's live answers.", replies.StreamList),
    Operation(
        "/v1/streams/{id}", "get", "Streams",
        "What one of them is doing; as events, what it says after the last one that the caller has.",
        replies.Stream, chunk=replies.StreamEvent, errors=(400, 401, 403, 404, 409, 410, 500, 503),
        parameters=(*_ID, _LAST_EVENT, _AFTER),
    ),
    Operation(
        "/v1/streams/{id}", "delete", "Streams",
        "Ends one of them: it ends with the text so far and the finish reason `abort`.", replies.Stream,
        errors=(401, 404, 500), parameters=_ID,
    ),
    _probe(paths.LIVE, "get", "Whether the process turns; always 200 if it answers."),
    _probe(paths.READY, "get", "Whether new requests are accepted, and how far a start is."),
    _probe(paths.HEALTH, "get", "Whether the engine answers.", deep=True),
    _probe(paths.PING, "get", "The same under another name.", deep=True),
    _probe(paths.PING, "post", "The same under another name.", deep=True),
    Operation(
        paths.METRICS, "get", "Operation", "All metrics, as text for Prometheus (may be open).", None
    ),
    Operation(
        paths.DASHBOARD_EVENTS, "get", "Operation",
        "What the dashboard shows, once a second (open where /metrics is).", None, chunk=Snapshot,
    ),
    Operation("/load", "get", "Operation", "How busy the engine is.", replies.Load, errors=(401, 500, 503)),
    Operation("/version", "get", "Operation", "The server's version.", replies.Version),
    Operation(
        paths.RESET_PREFIX_CACHE, "post", "Operation", "Forgets all cached prompts; needs an admin key.",
        replies.Done, errors=(401, 403, 409, 500, 503),
    ),
)  # fmt: skip


def document(root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        root_path: prefix that a proxy takes off.
    """
    described: dict[str, Any] = {}
    for operation in OPERATIONS:
        described.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "streamserve", "version": __version__, "description": DESCRIPTION},
        "servers": [{"url": root_path or "/"}],
        "security": [{"bearer": []}],
        "paths": described,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": f"{operation.method}_{re.sub(r'[^A-Za-z0-9]+', '_', operation.path).strip('_')}",
        "parameters": [parameter.describe() for parameter in operation.parameters],
        "responses": _responses(operation),
    }
    if operation.requests:
        refs = [_ref(model) for model in operation.requests]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.is_open:
        described["security"] = []
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.reply is None and operation.chunk is None:
        content = {"text/plain": {"schema": {"type": "string"}}}
    elif operation.reply is not None:
        content = {"application/json": {"schema": _ref(operation.reply)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    described = {"200": _answer("As asked.", content)}
    for status in operation.errors:
        error = {"application/json": {"schema": _ref(replies.ErrorReply)}}
        described[str(status)] = _answer(_MEANINGS[status], error, may_retry=status in (429, 503))
    if operation.unwell is not None:
        described[str(operation.unwell)] = _answer("Not now; the body says why.", content)
    return described


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One event, as it comes out of a reader of event streams."""
    encoded = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(replies.ErrorReply)]},
    }
    end = {"const": "[DONE]", "description": "The end of a stream that went well; not of responses."}
    name = {"type": "string", "description": "The object's type, in responses."}
    number = {"type": "string", "description": "The stream's id and the event's number, if it is resumable."}
    properties = {"data": {"anyOf": [encoded, end]}, "event": name, "id": number}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _answer(text: str, content: dict[str, Any], *, may_retry: bool = False) -> dict[str, Any]:
    headers = {
        "X-Request-Id": {"description": "The request's own, or a new one.", "schema": {"type": "string"}}
    }
    if may_retry:
        text_of_retry = "Seconds after which a retry is likely to be accepted, where that is known."
        headers["Retry-After"] = {"description": text_of_retry, "schema": {"type": "integer"}}
    return {"description": text, "headers": headers, "content": content}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF + model.__name__}


def _schemas() -> dict[str, Any]:
    models: dict[type[BaseModel], None] = {replies.ErrorReply: None}
    for operation in OPERATIONS:
        for model in (operation.reply, operation.chunk, *operation.requests):
            if model is not None:
                models[model] = None
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_REF + "{model}")
    # Of two models with one name pydantic tells apart by their modules, which are nobody's business here.
    schemas: dict[str, Any] = orjson.loads(_MODULE.sub(rb"\1.", orjson.dumps(found["$defs"])))
    for (name, member), schema in _LOOSER.items():
        schemas[name]["properties"][member] = schema
    return schemas
