"""POST /v1/chat/completions."""

from __future__ import annotations

from streamserve.frontend.api.answer import GenerationAnswer, Plan
from streamserve.frontend.api.chunks import Form
from streamserve.frontend.api.endpoint import Call
from streamserve.frontend.api.prompts import Preparation, Wording
from streamserve.frontend.api.schema import neutral
from streamserve.frontend.api.schema.chat import ChatRequest
from streamserve.frontend.api.schema.common import validate
from streamserve.frontend.api.service import Service

FORM = Form("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)
WORDING = Wording("messages", adds_bos=False, default_max_tokens=None)


class ChatEndpoint:
    """The endpoint: body → checked request → prompt text → ids → generations → answer."""

    names_events = False

    def __init__(self, service: Service) -> None:
        self._service = service

    async def accept(self, call: Call) -> GenerationAnswer:
        """Checks and prepares a request."""
        request = validate(ChatRequest, call.body, neutral.CHAT)
        preparation = Preparation(self._service, request, WORDING)
        preparation.check_limits(1)
        conversation = await self._service.run(call.num_bytes, request.conversation)
        text = await preparation.render(conversation, request.chat_template)
        prompts = await preparation.make([text], call.num_bytes + len(text), call.tenant)
        plan = Plan(request, prompts, continues=bool(request.continue_final_message))
        return GenerationAnswer(self._service, FORM, call, plan)
