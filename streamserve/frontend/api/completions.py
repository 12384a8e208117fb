"""POST /v1/completions."""

from __future__ import annotations

from streamserve.frontend.api.answer import GenerationAnswer, Plan
from streamserve.frontend.api.chunks import Form
from streamserve.frontend.api.endpoint import Call
from streamserve.frontend.api.prompts import Preparation, Wording
from streamserve.frontend.api.schema import neutral
from streamserve.frontend.api.schema.common import validate
from streamserve.frontend.api.schema.completion import CompletionRequest
from streamserve.frontend.api.service import Service

FORM = Form("cmpl", "text_completion", "text_completion", is_chat=False)
WORDING = Wording("prompt", adds_bos=True, default_max_tokens=16)


class CompletionEndpoint:
    """The endpoint: body → checked request → ids → generations → answer."""

    names_events = False

    def __init__(self, service: Service) -> None:
        self._service = service

    async def accept(self, call: Call) -> GenerationAnswer:
        """Checks and prepares a request."""
        request = validate(CompletionRequest, call.body, neutral.COMPLETION)
        preparation = Preparation(self._service, request, WORDING)
        sources = request.prompts()
        preparation.check_limits(len(sources))
        for source in sources:
            if isinstance(source, str):
                preparation.check_chars(len(source))
        prompts = await preparation.make(sources, call.num_bytes, call.tenant)
        plan = Plan(request, prompts, continues=True)
        return GenerationAnswer(self._service, FORM, call, plan)
