"""What the endpoints share: the model's text side, and the way from a request to a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from streamserve.config import ApiConfig
from streamserve.errors import BodyTooLarge, InvalidRequest, ModelNotFound
from streamserve.frontend.api.body import BODY_TIMEOUT_S, BodyLimit
from streamserve.frontend.api.parameters import SamplingDefaults
from streamserve.frontend.api.rendering import Renderer
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.api.sse import WRITE_TIMEOUT_S
from streamserve.frontend.api.structure import max_values
from streamserve.frontend.client import EngineClient
from streamserve.frontend.pump import EngineFacts
from streamserve.frontend.registry import Registry
from streamserve.frontend.resume.store import StreamStore
from streamserve.frontend.text.assemble import StopRules, TextAssembler
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.template import ChatTemplate, Conversation
from streamserve.frontend.text.tokenize import SHORT, PromptTokenizer
from streamserve.frontend.text.trace import TokenTrace

# So much is worked on at once: a text of that size is short for the tokenizer, too.
INLINE_BYTES = SHORT

# A prompt's token takes at most this much of a body: as an id, in a list spread over lines; a character, in
# an escaped form; and all the rest of a request (tools, metadata), for all tokens together.
MAX_ID_BYTES = 32
MAX_CHAR_BYTES = 6
SPARE_BODY_BYTES = 2**20

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Service:
    """One served model, as the endpoints see it.

    Attributes:
        client: the way to the engine.
        tokenizer, detokenizers, template: the model's text side.
        renderer: runs the template.
        defaults: sampling values for what requests leave open.
        secret: key of the block hashes of this server run.
        seeds: draws the seed of a request that brings none.
        threads: where long requests are worked on.
        model_name: the name in the API.
        created_s: when this frontend started, seconds since 1970.
        max_body_bytes: largest request body.
        ping_interval_s: silence after which a stream carries a comment.
        write_timeout_s: how long a stream waits for its client to read.
        body_timeout_s: how long a request's body may take to arrive.
        api: what requests may ask for.
        registry: the live answers, for status and cancellation by id; counts them too.
        kept: the streams that outlive their connections.
        draining: set once the server accepts nothing new; whoever holds a connection open ends it then.
    """

    client: EngineClient
    tokenizer: PromptTokenizer
    detokenizers: Detokenizers
    template: ChatTemplate
    defaults: SamplingDefaults
    secret: bytes
    seeds: Random
    threads: Executor
    model_name: str
    created_s: int
    max_body_bytes: int
    ping_interval_s: float
    write_timeout_s: float = WRITE_TIMEOUT_S
    body_timeout_s: float = BODY_TIMEOUT_S
    api: ApiConfig = field(default_factory=ApiConfig)
    renderer: Renderer = field(init=False)
    registry: Registry = field(default_factory=Registry)
    kept: StreamStore = field(init=False)
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        object.__setattr__(self, "renderer", Renderer(self.template))
        api, metrics = self.api, self.registry.metrics
        object.__setattr__(self, "kept", StreamStore(api.resume_window, api.resume_buffer_bytes, metrics))

    def check_model(self, name: str | None) -> None:
        """Refuses a request for another model; no name means the one there is.

        Raises:
            ModelNotFound: another model was asked for.
        """
        if name and name != self.model_name:
            raise ModelNotFound(
                f"The model {name[:200]!r} is not served here; this server has {self.model_name!r}.", "model"
            )

    def body_limit(self) -> BodyLimit:
        """The longest and richest body worth reading: parsing it holds up all other streams.

        Its length is the operator's limit, or that of any prompt which the model could take if this is less.

        Raises:
            EngineUnavailable: there is no engine, so the model's limits are not known.
        """
        engine = self.client.engine()
        token_bytes = max(MAX_ID_BYTES, MAX_CHAR_BYTES * self.tokenizer.max_token_chars)
        useful_bytes = SPARE_BODY_BYTES + engine.max_model_len * token_bytes
        max_bytes, why = self.max_body_bytes, ""
        if max_bytes > useful_bytes:
            max_bytes = useful_bytes
            why = f"; this model's maximum context length of {engine.max_model_len} tokens takes less"
        error = BodyTooLarge(f"The request body is larger than {max_bytes} bytes{why}.")
        return BodyLimit(
            max_bytes, error, max_values(engine.max_model_len), self.threads, self.body_timeout_s
        )

    def max_chars(self, engine: EngineFacts) -> int:
        """No prompt that fits is longer, whatever its tokens are."""
        return engine.max_model_len * self.tokenizer.max_token_chars

    async def render(
        self, conversation: Conversation, source: str | None = None, max_chars: int | None = None
    ) -> str:
        """The prompt text of a conversation.

        Args:
            source: a template that came with the request.
            max_chars: a longer text is given up.

        Raises:
            InvalidRequest: the template refuses it or takes too long, or requests must not bring templates.
            ContextTooLong: the text is too long.
            Overloaded: too many requests are waiting.
        """
        if source is not None and not self.api.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template: this server takes no templates from requests; its operator can allow them "
                "with --trust-request-chat-template.",
                "chat_template",
            )
        with self.client.admission.preparing():
            return await self.renderer.render(conversation, source=source, max_chars=max_chars)

    async def run(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Does `work`, in a thread if there is much of it, so that no request holds up the others' streams.

        Whatever takes time in proportion to the size of a request, or of its answer, goes through here.

        Args:
            num_bytes: how much there is to work on.
        """
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def assembler(
        self,
        request: GenerationRequest,
        rules: StopRules,
        *,
        continues: bool,
        trace: TokenTrace | None = None,
    ) -> TextAssembler:
        """What turns one answer to `request` into text.

        Args:
            rules: what ends it.
            continues: the text goes on from that of the prompt.
            trace: told of each token's part of it.
        """
        detokenizer = self.detokenizers.start(
            skip_special_tokens=request.skip_special_tokens is not False,
            spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
            continues=continues,
        )
        return TextAssembler(detokenizer, rules, trace)
