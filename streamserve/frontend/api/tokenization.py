"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamserve.frontend.api.body import Body, read_json
from streamserve.frontend.api.http import until_disconnect
from streamserve.frontend.api.parameters import check_token_ids
from streamserve.frontend.api.schema import neutral
from streamserve.frontend.api.schema.common import parse
from streamserve.frontend.api.schema.tokenization import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    TextTokenizeRequest,
)
from streamserve.frontend.api.service import Service


class Tokenization:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, http: Request) -> Response:
        """The ids of a text (`prompt`) or of a conversation (`messages`), and how many there are."""
        body = await read_json(http.headers, http.receive, self._service.body_limit())
        return _json(await until_disconnect(http.receive, self._tokenize(body)))

    async def detokenize(self, http: Request) -> Response:
        """The text of ids, special tokens included."""
        service = self._service
        body = await read_json(http.headers, http.receive, service.body_limit())
        request = parse(DetokenizeRequest, body.data)
        service.check_model(request.model)
        check_token_ids(request.tokens, service.client.engine(), "tokens")

        def decode() -> str:
            text: str = service.tokenizer.tokenizer.decode(request.tokens, skip_special_tokens=False)
            return text

        return _json({"prompt": await service.run(body.num_bytes, decode)})

    async def _tokenize(self, body: Body) -> dict[str, Any]:
        service = self._service
        neutral.refuse_unsupported(body.data, neutral.TOKENIZE)
        request: ChatTokenizeRequest | TextTokenizeRequest
        if "messages" in body.data:
            request = parse(ChatTokenizeRequest, body.data)
            text = await service.render(request.conversation(), request.chat_template)
            adds_bos = bool(request.add_special_tokens)
        else:
            request = parse(TextTokenizeRequest, body.data)
            text, adds_bos = request.prompt, request.add_special_tokens is not False
        service.check_model(request.model)
        engine = service.client.engine()
        with service.client.admission.preparing():
            ids = await service.run(
                len(text), lambda: service.tokenizer.encode(text, adds_bos=adds_bos).tolist()
            )
        names = service.tokenizer.tokenizer.id_to_token
        return {
            "count": len(ids),
            "max_model_len": engine.max_model_len,
            "tokens": ids,
            "token_strs": [names(token) for token in ids] if request.return_token_strs else None,
        }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
