"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from streamserve.errors import InvalidRequest
from streamserve.frontend.api import answer
from streamserve.frontend.api.body import read_json
from streamserve.frontend.api.schema import neutral
from streamserve.frontend.api.schema.chat import ChatRequest
from streamserve.frontend.api.schema.common import validate
from streamserve.frontend.api.service import PromptTokens, Service
from streamserve.frontend.api.sse import Chunks
from streamserve.frontend.client import Generation
from streamserve.frontend.text.template import RESERVED


class ChatCompletions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: Request) -> Response:
        """Answers one request: body → checked request → generation → text."""
        service = self._service
        body = await read_json(http.headers, http.receive, service.body_limit())
        request = validate(ChatRequest, body.data, neutral.CHAT)
        service.check_model(request.model)
        generation = await answer.until_disconnect(http.receive, self._prepare(request, body.num_bytes))
        assembler = service.assembler(request, generation, continues=False)
        head = {
            "id": f"chatcmpl-{answer.answer_id(http.headers)}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        if request.stream:
            chunks = Chunks(head, ("delta", "content"), include_usage=request.include_usage)
            events = answer.stream(service.client, generation, assembler, chunks, chunks.role())
            first = await answer.first_event(http.receive, events)
            return service.event_stream(first, events)
        text = await answer.until_disconnect(
            http.receive, answer.collect(service.client, generation, assembler)
        )
        message = {"role": "assistant", "content": text}
        return answer.whole(head, {"message": message}, generation, assembler)

    async def _prepare(self, request: ChatRequest, num_bytes: int) -> Generation:
        service = self._service
        variables = request.chat_template_kwargs or {}
        reserved = sorted(RESERVED & variables.keys())
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs must not contain {reserved[0]}.", "chat_template_kwargs"
            )
        engine = service.client.engine()
        service.check_chars(request.num_chars(), engine, "messages")

        def tokenize() -> PromptTokens:
            text = service.template.render(
                [message.for_template() for message in request.messages],
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=variables,
            )
            service.check_chars(len(text), engine, "messages")
            return service.tokenizer.encode(text, is_chat=True)

        return await service.prepare(
            request, tokenize, param="messages", num_bytes=num_bytes, default_max_tokens=None
        )
