"""What the endpoints share: the model's text side, and the way from a request to a generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from streamserve.errors import BodyTooLarge, ContextTooLong, ModelNotFound
from streamserve.frontend.api.body import BodyLimit
from streamserve.frontend.api.parameters import SamplingDefaults, check_prompt_length, sampling_params
from streamserve.frontend.api.problems import HopelessBody
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.api.sse import WRITE_TIMEOUT_S, EventStream
from streamserve.frontend.client import EngineClient, Generation
from streamserve.frontend.pump import EngineFacts
from streamserve.frontend.text.assemble import TextAssembler
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.template import ChatTemplate
from streamserve.frontend.text.tokenize import PromptTokenizer
from streamserve.hashing import BlockHasher

# Bytes of request body from which text is worked on in a thread: no long prompt may stall the other streams.
INLINE_BYTES = 8192

# A prompt's token takes at most this much of a body: as an id, in a list spread over lines; a character, in
# an escaped form; and all the rest of a request (tools, metadata), for all tokens together.
MAX_ID_BYTES = 32
MAX_CHAR_BYTES = 6
SPARE_BODY_BYTES = 2**20

PromptTokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Service:
    """One served model, as the endpoints see it.

    Attributes:
        client: the way to the engine.
        tokenizer, detokenizers, template: the model's text side.
        defaults: sampling values for what requests leave open.
        secret: key of the block hashes of this server run.
        seeds: draws the seed of a request that brings none.
        threads: where long prompts are worked on.
        model_name: the name in the API.
        created_s: when this frontend started, seconds since 1970.
        max_body_bytes: largest request body.
        ping_interval_s: silence after which a stream carries a comment.
        write_timeout_s: how long a stream waits for its client to read.
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
        """The longest body worth reading: parsing it holds up all other streams.

        Raises:
            EngineUnavailable: there is no engine, so the model's limits are not known.
        """
        engine = self.client.engine()
        token_bytes = max(MAX_ID_BYTES, MAX_CHAR_BYTES * self.tokenizer.max_token_chars)
        useful_bytes = SPARE_BODY_BYTES + engine.max_model_len * token_bytes
        if self.max_body_bytes <= useful_bytes:
            error = BodyTooLarge(f"The request body is larger than {self.max_body_bytes} bytes.")
            return BodyLimit(self.max_body_bytes, error)
        return BodyLimit(
            useful_bytes,
            HopelessBody(
                f"The request body is larger than {useful_bytes} bytes; this model's maximum context length "
                f"of {engine.max_model_len} tokens takes less."
            ),
        )

    def check_chars(self, num_chars: int, engine: EngineFacts, param: str) -> None:
        """Refuses a text that is too long whatever its tokens are, before anything is done with it.

        Raises:
            ContextTooLong: it is.
        """
        limit = engine.max_model_len * self.tokenizer.max_token_chars
        if num_chars > limit:
            raise ContextTooLong(
                f"The prompt has {num_chars} characters; this model's maximum context length is "
                f"{engine.max_model_len} tokens, which is at most {limit} characters.",
                param,
            )

    async def prepare(
        self,
        request: GenerationRequest,
        tokenize: Callable[[], PromptTokens],
        *,
        param: str,
        num_bytes: int,
        default_max_tokens: int | None,
    ) -> Generation:
        """Tokenises, checks against the engine's limits and hashes.

        Args:
            tokenize: makes the prompt's ids; runs in a thread if the request is long.
            param: the field that holds the prompt.
            num_bytes: size of the request.
            default_max_tokens: when the request names no limit; None is the rest of the context.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: too many requests are waiting.
            EngineUnavailable: there is no engine.
        """
        engine = self.client.engine()

        def work() -> tuple[PromptTokens, Sequence[bytes]]:
            prompt = tokenize()
            check_prompt_length(len(prompt), engine, param)
            if not engine.enable_prefix_caching:
                return prompt, ()
            return prompt, BlockHasher(self.secret, engine.block_size).chain(prompt)

        with self.client.admission.preparing():
            if num_bytes <= INLINE_BYTES:
                prompt, hashes = work()
            else:
                prompt, hashes = await asyncio.get_running_loop().run_in_executor(self.threads, work)
        params = sampling_params(
            request,
            self.defaults,
            engine,
            len(prompt),
            default_max_tokens=default_max_tokens,
            seed=self.seeds.getrandbits(63),
        )
        return Generation(prompt, params, hashes, request.priority or 0)

    def event_stream(self, first: bytes, events: AsyncGenerator[bytes, None]) -> EventStream:
        """The response that carries `first` and then `events`."""
        return EventStream(
            first, events, ping_interval_s=self.ping_interval_s, write_timeout_s=self.write_timeout_s
        )

    def assembler(
        self, request: GenerationRequest, generation: Generation, *, continues: bool
    ) -> TextAssembler:
        """What turns the answer to `request` into text."""
        skip = request.skip_special_tokens is not False
        return TextAssembler(
            self.detokenizers.start(skip_special_tokens=skip, continues=continues),
            request.stop or (),
            generation.params.stop_token_ids,
            generation.params.min_tokens,
        )
