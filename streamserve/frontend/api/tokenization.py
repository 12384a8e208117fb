"""POST /tokenize and /detokenize."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamserve.errors import ContextTooLong
from streamserve.frontend.api import parameters
from streamserve.frontend.api.body import Body, read_json
from streamserve.frontend.api.schema import neutral
from streamserve.frontend.api.schema.common import parse
from streamserve.frontend.api.schema.tokenization import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    TextTokenizeRequest,
)
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.waiting import until_disconnect
from streamserve.frontend.pump import EngineFacts


class Tokenization:
    """The endpoints. They take what could be a prompt: no longer texts, and no more ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, http: Request) -> Response:
        """The ids of a text (`prompt`) or of a conversation (`messages`), and how many there are.

        Raises:
            RequestError: it cannot be tokenised, or is too long.
        """
        body = await read_json(http.headers, http.receive, self._service.body_limit())
        return _response(await until_disconnect(http.receive, self._tokenize(body)))

    async def detokenize(self, http: Request) -> Response:
        """The text of ids, special tokens included.

        Raises:
            RequestError: one of them is no token's, or they are too many.
        """
        body = await read_json(http.headers, http.receive, self._service.body_limit())
        return _response(await until_disconnect(http.receive, self._detokenize(body)))

    async def _tokenize(self, body: Body) -> bytes:
        service = self._service
        neutral.refuse_unsupported(body.data, neutral.TOKENIZE)
        engine = service.client.engine()
        max_chars = service.max_chars(engine)
        request: ChatTokenizeRequest | TextTokenizeRequest
        if "messages" in body.data:
            request = parse(ChatTokenizeRequest, body.data)
            conversation = await service.run(body.num_bytes, request.conversation)
            text = await service.render(conversation, request.chat_template, max_chars)
            adds_bos = bool(request.add_special_tokens)
        else:
            request = parse(TextTokenizeRequest, body.data)
            text, adds_bos = request.prompt, request.add_special_tokens is not False
        service.check_model(request.model)
        if len(text) > max_chars:
            raise ContextTooLong(
                f"The text has {len(text)} characters; no prompt of this model has more than {max_chars}.",
                "prompt",
            )
        wants_strs = bool(request.return_token_strs)
        with service.client.admission.preparing():
            return await service.run(
                body.num_bytes + len(text), lambda: self._describe(text, adds_bos, wants_strs, engine)
            )

    def _describe(self, text: str, adds_bos: bool, wants_strs: bool, engine: EngineFacts) -> bytes:
        tokenizer = self._service.tokenizer
        ids = tokenizer.encode(text, adds_bos=adds_bos)
        name_of = tokenizer.tokenizer.id_to_token
        answer = {
            "count": len(ids),
            "max_model_len": engine.max_model_len,
            "tokens": ids,
            "token_strs": [name_of(token) for token in ids.tolist()] if wants_strs else None,
        }
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

    async def _detokenize(self, body: Body) -> bytes:
        service = self._service
        request = parse(DetokenizeRequest, body.data)
        service.check_model(request.model)
        engine, given = service.client.engine(), request.tokens
        if len(given) > engine.max_model_len:
            raise ContextTooLong(
                f"There are {len(given)} tokens; this model's maximum context length is "
                f"{engine.max_model_len} tokens.",
                "tokens",
            )

        def decode() -> bytes:
            ids = parameters.token_ids(given, engine, "tokens").tolist()
            return orjson.dumps({"prompt": service.tokenizer.decode(ids)})

        with service.client.admission.preparing():
            return await service.run(body.num_bytes, decode)


def _response(document: bytes) -> Response:
    return Response(document, media_type="application/json")
