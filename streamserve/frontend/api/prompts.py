"""From a request to prompts in token ids, and from those to what the engine is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.errors import ContextTooLong
from streamserve.frontend.api import parameters
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import Generation
from streamserve.frontend.text.template import Conversation
from streamserve.hashing import BlockHasher
from streamserve.sampling import SEED_MIN, SamplingParams

PromptTokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine.

    Attributes:
        ids: int32[n].
        block_hashes: of its full blocks.
        texts: each token's part of the text, for an answer that begins with the prompt; else empty.
    """

    ids: PromptTokens
    block_hashes: Sequence[bytes]
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Wording:
    """How a kind of request words its prompts.

    Attributes:
        param: the field with the prompt.
        adds_bos: whether a text is to begin with BOS, if the request does not say.
        default_max_tokens: when the request names no limit; None is the rest of the context.
    """

    param: str
    adds_bos: bool
    default_max_tokens: int | None


class Preparation:
    """The way of one request to the engine.

    Args:
        service: the model.
        request: what is asked for.
        wording: how its kind words prompts.

    Raises:
        EngineUnavailable: there is no engine, so its limits are not known.
        ModelNotFound: the request is for another model.
    """

    def __init__(self, service: Service, request: GenerationRequest, wording: Wording) -> None:
        service.check_model(request.model)
        self._service = service
        self._request = request
        self._wording = wording
        self._engine = service.client.engine()

    def check_limits(self, num_prompts: int) -> None:
        """Refuses a request that asks for more than this server gives to one.

        Raises:
            InvalidRequest: names the field.
        """
        max_waiting = self._service.client.admission.max_waiting
        parameters.check_limits(self._request, num_prompts, self._service.api, max_waiting)

    @property
    def max_chars(self) -> int | None:
        """No text that fits is longer, whatever its tokens are. None where what does not fit is cut off."""
        return None if self._request.truncate_prompt_tokens else self._service.max_chars(self._engine)

    def check_chars(self, num_chars: int) -> None:
        """Refuses a text that is too long before anything is done with it.

        Raises:
            ContextTooLong: it is.
        """
        if self.max_chars is not None and num_chars > self.max_chars:
            raise ContextTooLong(
                f"The prompt has {num_chars} characters; this model's maximum context length is at "
                f"most {self.max_chars}.",
                self._wording.param,
            )

    async def render(self, conversation: Conversation, source: str | None = None) -> str:
        """The prompt text of a conversation.

        Args:
            source: the request's own template, if it has one.

        Raises:
            InvalidRequest: the template refuses it, or the request must not bring one.
            ContextTooLong: it is too long.
        """
        self.check_chars(sum(len(message["content"]) for message in conversation.messages))
        return await self._service.render(conversation, source, self.max_chars)

    async def make(self, sources: Sequence[str | list[Any]], num_bytes: int) -> list[Prompt]:
        """Tokenises, checks against the engine's limits and hashes.

        Args:
            sources: texts, or what should be token ids.
            num_bytes: how much they are; much is worked on in a thread.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: too many requests are waiting.
        """
        with self._service.client.admission.preparing():
            return await self._service.run(num_bytes, lambda: [self._make(source) for source in sources])

    def generations(self, prompts: Sequence[Prompt], tenant: str) -> list[list[Generation]]:
        """What the engine is asked: for each prompt, one generation for each candidate.

        Each candidate has a seed of its own, counted up from the request's, so that the same seed gives the
        same texts.

        Raises:
            InvalidRequest: a field is out of range, or the KV cache cannot hold what was asked for.
        """
        request, service = self._request, self._service
        bad_words = service.bad_words(request.bad_words or ())
        deadline_ns = parameters.deadline_ns(request, service.api, time.time_ns())
        return [
            [
                Generation(
                    prompt.ids,
                    params,
                    prompt.block_hashes,
                    request.priority or 0,
                    deadline_ns=deadline_ns,
                    tenant=tenant,
                    cache_salt=request.cache_salt or "",
                )
                for params in _candidates(request, self._params(len(prompt.ids), bad_words))
            ]
            for prompt in prompts
        ]

    def _params(self, num_prompt: int, bad_words: tuple[tuple[int, ...], ...]) -> SamplingParams:
        return parameters.sampling_params(
            self._request,
            self._service.defaults,
            self._engine,
            num_prompt,
            default_max_tokens=self._wording.default_max_tokens,
            seed=self._service.seeds.getrandbits(63),
            bad_words=bad_words,
        )

    def _make(self, source: str | list[Any]) -> Prompt:
        param, engine = self._wording.param, self._engine
        ids = self._truncate(self._read(source))
        parameters.check_prompt_length(len(ids), engine, param)
        texts = self._texts(source, ids) if self._request.echoes else ()
        if not engine.enable_prefix_caching:
            return Prompt(ids, (), texts)
        hasher = BlockHasher(self._service.secret, engine.block_size)
        root = hasher.root((self._request.cache_salt or "").encode())
        return Prompt(ids, hasher.chain(ids, root), texts)

    def _read(self, source: str | list[Any]) -> PromptTokens:
        if isinstance(source, str):
            asked = self._request.add_special_tokens
            adds_bos = self._wording.adds_bos if asked is None else asked
            return self._service.tokenizer.encode(source, adds_bos=adds_bos)
        if self._request.truncate_prompt_tokens is None:
            # First, because the check of each id takes its time.
            parameters.check_prompt_length(len(source), self._engine, self._wording.param)
        parameters.check_token_ids(source, self._engine, self._wording.param)
        return np.asarray(source, dtype=np.int32)

    def _truncate(self, ids: PromptTokens) -> PromptTokens:
        limit = self._request.truncate_prompt_tokens
        if limit is None:
            return ids
        if limit < 0:
            limit = self._room()
        return ids[:limit] if self._request.truncation_side == "right" else ids[-limit:]

    def _room(self) -> int:
        """The longest prompt that leaves room for the answer."""
        asked, _ = self._request.limit()
        num_answer = max(1, asked or self._wording.default_max_tokens or 1)
        places = min(self._engine.max_model_len, self._engine.kv_capacity_tokens + 1)
        return max(1, places - num_answer)

    def _texts(self, source: str | list[Any], ids: PromptTokens) -> list[str]:
        """The text of each token of an echoed prompt; in one where nothing else is told of them."""
        request, tokenizer = self._request, self._service.tokenizer
        given = source if isinstance(source, str) else None
        if given is not None and request.num_top_logprobs is None and not request.truncate_prompt_tokens:
            return [given]
        detokenizer = self._service.detokenizers.start(
            # The caller's own text is given back with all that is in it.
            skip_special_tokens=given is None and request.skip_special_tokens is not False
        )
        texts = [detokenizer.decode((token,)) for token in ids.tolist()]
        texts[-1] += detokenizer.flush()
        if given is not None and ids[0] == tokenizer.bos_id and not given.startswith(texts[0]):
            # That one the tokenizer has put there.
            texts[0] = ""
        return texts


def _candidates(request: GenerationRequest, first: SamplingParams) -> Iterator[SamplingParams]:
    yield first
    # Every choice echoes the prompt's log probabilities; otherwise they are told once.
    prompt_logprobs = first.prompt_logprobs if request.echoes else None
    for index in range(1, request.num_candidates):
        # Counted in 64 bits, like the seed itself.
        seed = (first.seed + index - SEED_MIN) % 2**64 + SEED_MIN
        yield replace(first, seed=seed, prompt_logprobs=prompt_logprobs)
