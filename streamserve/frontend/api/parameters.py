"""From a request's fields to sampling parameters that this model and this KV cache can carry out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.config import ApiConfig
from streamserve.errors import ConfigError, ContextTooLong, InvalidRequest
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.pump import EngineFacts
from streamserve.frontend.text.assemble import StopRules
from streamserve.frontend.text.stops import StopStrings
from streamserve.frontend.text.tokenize import CHUNK, PromptTokenizer
from streamserve.sampling import SamplingParams, TokenSet

MAX_BAD_WORD_TOKENS = 1024
# Longer than any server runs, and short enough for every clock.
MAX_QUEUE_S = 1e9


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for what a request leaves open, from the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Reads the file's content.

        Raises:
            ConfigError: a value is of the wrong type or out of range.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
        try:
            defaults = cls(**given)
            SamplingParams(
                1,
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            )
        except (InvalidRequest, TypeError) as error:
            raise ConfigError(f"generation_config.json cannot be used: {error}") from error
        return defaults


def check_prompt_length(num_prompt: int, engine: EngineFacts, param: str) -> None:
    """Refuses a prompt that is empty, or leaves no room for an answer.

    Raises:
        InvalidRequest: it is empty.
        ContextTooLong: it is longer than the model's context or the KV cache.
    """
    if num_prompt == 0:
        raise InvalidRequest("The prompt is empty.", param)
    if num_prompt >= engine.max_model_len:
        raise ContextTooLong(
            f"The prompt has {num_prompt} tokens; this model's maximum context length is "
            f"{engine.max_model_len} tokens, prompt and answer together, so the prompt may have at most "
            f"{engine.max_model_len - 1}.",
            param,
        )
    if num_prompt > engine.kv_capacity_tokens:
        raise ContextTooLong(
            f"The prompt has {num_prompt} tokens; the KV cache of this server holds "
            f"{engine.kv_capacity_tokens}.",
            param,
        )


class Sampling:
    """What a request wants its answers to be sampled by, checked once for all of its prompts.

    Args:
        request: what is asked for.
        defaults: of the model, for what it leaves open.
        engine: whose limits count.
        bad_words: token ids of what must not come about.

    Raises:
        InvalidRequest: a field is out of range.
    """

    def __init__(
        self,
        request: GenerationRequest,
        defaults: SamplingDefaults,
        engine: EngineFacts,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self._request = request
        self._engine = engine
        top_k = _or(request.top_k, defaults.top_k)
        # Of one prompt or another are only the lengths, and the seed unless there is one for all.
        self._common = SamplingParams(
            max_tokens=1,
            temperature=_or(request.temperature, defaults.temperature),
            top_p=_or(request.top_p, defaults.top_p),
            top_k=0 if top_k == -1 else top_k,
            min_p=_or(request.min_p, defaults.min_p),
            seed=_or(request.seed, 0),
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=tuple(token_ids(request.stop_token_ids or (), engine, "stop_token_ids").tolist()),
            presence_penalty=_or(request.presence_penalty, 0.0),
            frequency_penalty=_or(request.frequency_penalty, 0.0),
            repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=logit_bias(request.logit_bias or {}, engine),
            bad_words=bad_words,
            allowed_token_ids=allowed_tokens(request.allowed_token_ids, engine),
            logprobs=_num_logprobs(request),
            prompt_logprobs=_num_prompt_logprobs(request),
        )

    def of(self, num_prompt: int, default_max_tokens: int | None, seed: int) -> SamplingParams:
        """The parameters for a prompt of `num_prompt` tokens.

        Args:
            default_max_tokens: when the request names no limit; None is the rest of the context.
            seed: when the request brings none.

        Raises:
            InvalidRequest: the lengths do not fit together, or the KV cache cannot hold what was asked for.
        """
        request = self._request
        max_tokens = _max_tokens(request, self._engine, num_prompt, default_max_tokens)
        asked, _ = request.limit()
        min_tokens = request.min_tokens or 0
        if asked is None or min_tokens <= asked:
            # The caller's two numbers agree; what was cut off one is cut off the other.
            min_tokens = min(min_tokens, max_tokens)
        return replace(
            self._common, max_tokens=max_tokens, min_tokens=min_tokens, seed=_or(request.seed, seed)
        )


def logit_bias(biases: Mapping[str, float], engine: EngineFacts) -> tuple[tuple[int, float], ...]:
    """What is added to the logits of tokens; JSON has their ids as text.

    Raises:
        InvalidRequest: the message names the first key that is no token id.
    """
    for key in biases:
        # Exactly as a number is written: " 5" and "05" would be two keys for one token.
        if not (key.isascii() and key.isdecimal() and key == str(int(key[:20]))):
            raise InvalidRequest(f"logit_bias: {key[:20]!r} is no token id.", "logit_bias")
        if int(key) >= engine.vocab_size:
            raise InvalidRequest(
                f"logit_bias: {key} is no token id; this model has ids from 0 to {engine.vocab_size - 1}.",
                "logit_bias",
            )
    return tuple((int(key), float(bias)) for key, bias in biases.items())


def allowed_tokens(ids: Sequence[Any] | None, engine: EngineFacts) -> TokenSet | None:
    """The only tokens that may be sampled, or None.

    Raises:
        InvalidRequest: there are more than the model has, or one of them is none.
    """
    if ids is None:
        return None
    if len(ids) > engine.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids: there are {len(ids)} ids; this model has {engine.vocab_size} tokens.",
            "allowed_token_ids",
        )
    return TokenSet.of(token_ids(ids, engine, "allowed_token_ids"))


def bad_words(words: Sequence[str], tokenizer: PromptTokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of `words`, in each way to write them.

    Raises:
        InvalidRequest: they are too many tokens.
    """
    found = tuple(tokenizer.words(words))
    if sum(map(len, found)) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words: all of them together may have at most {MAX_BAD_WORD_TOKENS} tokens.", "bad_words"
        )
    return found


def stop_rules(request: GenerationRequest) -> StopRules:
    """What ends the texts of all answers to `request`; `min_tokens` is up to each."""
    return StopRules(
        StopStrings(request.stop or ()),
        frozenset(request.stop_token_ids or ()),
        shows_stop=bool(request.include_stop_str_in_output),
    )


def check_limits(request: GenerationRequest, num_prompts: int, limits: ApiConfig, max_waiting: int) -> None:
    """Refuses a request that asks for more than this server gives to one.

    Raises:
        InvalidRequest: names the field.
    """
    num_candidates = request.num_candidates
    if num_candidates > limits.max_n:
        param = "n" if num_candidates == request.num_choices else "best_of"
        raise InvalidRequest(f"{param} may be at most {limits.max_n} here.", param)
    if num_prompts * num_candidates > max_waiting:
        raise InvalidRequest(
            f"{num_prompts} prompts with {num_candidates} choices each are more than the {max_waiting} that "
            "may wait for the engine.",
            "n" if num_prompts == 1 else "prompt",
        )
    # A chat says how many of the likeliest tokens it wants in a field of its own.
    top_param = "top_logprobs" if isinstance(getattr(request, "logprobs", None), bool) else "logprobs"
    for param, asked in (
        (top_param, request.num_top_logprobs),
        ("prompt_logprobs", request.prompt_logprobs),
    ):
        if asked is not None and not 0 <= asked <= limits.max_logprobs:
            raise InvalidRequest(f"{param} must be between 0 and {limits.max_logprobs} here.", param)


def deadline_ns(request: GenerationRequest, limits: ApiConfig, now_ns: int) -> int:
    """Until when a request may wait for its turn, in ns since 1970; 0 is no limit."""
    asked = [seconds for seconds in (request.max_queue_time, limits.max_queue_time) if seconds]
    return now_ns + int(min(*asked, MAX_QUEUE_S) * 1e9) if asked else 0


def _num_logprobs(request: GenerationRequest) -> int | None:
    if request.num_top_logprobs is None and request.num_candidates > request.num_choices:
        # The best are the likeliest.
        return 0
    return request.num_top_logprobs


def _num_prompt_logprobs(request: GenerationRequest) -> int | None:
    echoed = request.num_top_logprobs if request.echoes else None
    asked = [number for number in (request.prompt_logprobs, echoed) if number is not None]
    return max(asked) if asked else None


def token_ids(ids: Sequence[Any], engine: EngineFacts, param: str) -> npt.NDArray[np.int32]:
    """`ids` as int32[n].

    Raises:
        InvalidRequest: one of them is no id in the model's vocabulary; the message names the first.
    """
    array = np.empty(len(ids), dtype=np.int32)
    # In parts, so that a long list lets others have the interpreter now and then.
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        if not _are_token_ids(part, engine.vocab_size):
            index = next(at for at, one in enumerate(part) if not _are_token_ids((one,), engine.vocab_size))
            raise InvalidRequest(
                f"{param}[{start + index}] is no token id; this model has ids from 0 to "
                f"{engine.vocab_size - 1}.",
                param,
            )
        array[start : start + CHUNK] = part
    return array


def _are_token_ids(ids: Sequence[Any], vocab_size: int) -> bool:
    # Not isinstance: true is no token id.
    return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size


def _max_tokens(request: GenerationRequest, engine: EngineFacts, num_prompt: int, default: int | None) -> int:
    asked, param = request.limit()
    if request.is_scoring:
        # The engine has to run the prompt, and then knows a token that nobody asked for.
        asked = 1
    if asked is not None and asked < 1:
        raise InvalidRequest(f"{param} must be at least 1.", param)
    room = engine.max_model_len - num_prompt
    limit: int = min(room, _or(asked, _or(default, room)))
    # The last token is never fed back, so it needs no place in the cache.
    kv_room = engine.kv_capacity_tokens - num_prompt + 1
    if limit <= kv_room:
        return limit
    if asked is None:
        return kv_room
    raise InvalidRequest(
        f"{param}: a prompt of {num_prompt} tokens and {limit} more need a KV cache of "
        f"{num_prompt + limit - 1} tokens; this server's holds {engine.kv_capacity_tokens}, so {param} may "
        f"be at most {kv_room}.",
        param,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
