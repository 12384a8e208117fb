"""POST /v1/completions."""

from __future__ import annotations

import time

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from streamserve.frontend.api import answer
from streamserve.frontend.api.body import read_json
from streamserve.frontend.api.parameters import check_prompt_length, check_token_ids
from streamserve.frontend.api.schema import neutral
from streamserve.frontend.api.schema.common import validate
from streamserve.frontend.api.schema.completion import CompletionRequest
from streamserve.frontend.api.service import PromptTokens, Service
from streamserve.frontend.api.sse import Chunks
from streamserve.frontend.client import Generation

DEFAULT_MAX_TOKENS = 16


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: Request) -> Response:
        """Answers one request: body → checked request → generation → text."""
        service = self._service
        body = await read_json(http.headers, http.receive, service.body_limit())
        request = validate(CompletionRequest, body.data, neutral.COMPLETION)
        service.check_model(request.model)
        generation = await answer.until_disconnect(http.receive, self._prepare(request, body.num_bytes))
        assembler = service.assembler(request, generation, continues=True)
        head = {
            "id": f"cmpl-{answer.answer_id(http.headers)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        if request.stream:
            chunks = Chunks(head, ("text",), include_usage=request.include_usage)
            events = answer.stream(service.client, generation, assembler, chunks, b"")
            first = await answer.first_event(http.receive, events)
            return service.event_stream(first, events)
        text = await answer.until_disconnect(
            http.receive, answer.collect(service.client, generation, assembler)
        )
        return answer.whole(head, {"text": text}, generation, assembler)

    async def _prepare(self, request: CompletionRequest, num_bytes: int) -> Generation:
        service = self._service
        engine = service.client.engine()
        prompt = request.one_prompt()
        if isinstance(prompt, str):
            service.check_chars(len(prompt), engine, "prompt")

        def tokenize() -> PromptTokens:
            if isinstance(prompt, str):
                return service.tokenizer.encode(prompt, is_chat=False)
            # First, because the check of each id takes its time.
            check_prompt_length(len(prompt), engine, "prompt")
            check_token_ids(prompt, engine, "prompt")
            return np.asarray(prompt, dtype=np.int32)

        return await service.prepare(
            request, tokenize, param="prompt", num_bytes=num_bytes, default_max_tokens=DEFAULT_MAX_TOKENS
        )
