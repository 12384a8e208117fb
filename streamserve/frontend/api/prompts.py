"""From a request to prompts in token ids, and from those to what the engine is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamserve.errors import ContextTooLong
from streamserve.frontend.api import parameters
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import Generation
from streamserve.frontend.text.template import Conversation
from streamserve.frontend.text.tokenize import TokenIds
from streamserve.hashing import BlockHasher
from streamserve.sampling import SEED_MIN, SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and what the engine is asked about it.

    Attributes:
        ids: int32[n].
        texts: each token's part of the text, for an answer that begins with the prompt; else empty.
        generations: one for each candidate.
    """

    ids: TokenIds
    texts: Sequence[str]
    generations: Sequence[Generation]


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

    async def make(self, sources: Sequence[str | list[Any]], num_bytes: int, tenant: str) -> list[Prompt]:
        """Tokenises, checks against the engine's limits and hashes.

        Args:
            sources: texts, or what should be token ids.
            num_bytes: of the request and all that has been made of it.
            tenant: whom it is charged to.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: too many requests are waiting.
        """
        with self._service.client.admission.preparing():
            return await self._service.run(num_bytes, lambda: self._make_all(sources, tenant))

    def _make_all(self, sources: Sequence[str | list[Any]], tenant: str) -> list[Prompt]:
        request, service = self._request, self._service
        bad_words = parameters.bad_words(request.bad_words or (), service.tokenizer)
        sampling = parameters.Sampling(request, service.defaults, self._engine, bad_words)
        return [self._make(source, sampling, tenant) for source in sources]

    def _make(self, source: str | list[Any], sampling: parameters.Sampling, tenant: str) -> Prompt:
        request, service = self._request, self._service
        ids = self._truncate(self._read(source))
        parameters.check_prompt_length(len(ids), self._engine, self._wording.param)
        texts = self._texts(source, ids) if request.echoes else ()
        first = sampling.of(len(ids), self._wording.default_max_tokens, service.seeds.getrandbits(63))
        block_hashes = self._hash(ids)
        deadline_ns = parameters.deadline_ns(request, service.api, time.time_ns())
        generations = [
            Generation(
                ids,
                params,
                block_hashes,
                request.priority or 0,
                deadline_ns=deadline_ns,
                tenant=tenant,
                cache_salt=request.cache_salt or "",
            )
            for params in _candidates(request, first)
        ]
        return Prompt(ids, texts, generations)

    def _hash(self, ids: TokenIds) -> Sequence[bytes]:
        if not self._engine.enable_prefix_caching:
            return ()
        hasher = BlockHasher(self._service.secret, self._engine.block_size)
        return hasher.chain(ids, hasher.root((self._request.cache_salt or "").encode()))

    def _read(self, source: str | list[Any]) -> TokenIds:
        if isinstance(source, str):
            asked = self._request.add_special_tokens
            adds_bos = self._wording.adds_bos if asked is None else asked
            return self._service.tokenizer.encode(source, adds_bos=adds_bos)
        if self._request.truncate_prompt_tokens is None:
            # First, because the check of each id takes its time.
            parameters.check_prompt_length(len(source), self._engine, self._wording.param)
        return parameters.token_ids(source, self._engine, self._wording.param)

    def _truncate(self, ids: TokenIds) -> TokenIds:
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

    def _texts(self, source: str | list[Any], ids: TokenIds) -> list[str]:
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
    """The parameters of each candidate.

    Each has a seed of its own, counted up from the request's, so that the same seed gives the same texts.
    """
    yield first
    # Every choice echoes the prompt's log probabilities; otherwise they are told once.
    prompt_logprobs = first.prompt_logprobs if request.echoes else None
    for index in range(1, request.num_candidates):
        # Counted in 64 bits, like the seed itself.
        seed = (first.seed + index - SEED_MIN) % 2**64 + SEED_MIN
        yield replace(first, seed=seed, prompt_logprobs=prompt_logprobs)
