"""From a request's fields to sampling parameters that this model and this KV cache can carry out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.config import ApiConfig
from streamserve.errors import ConfigError, ContextTooLong, InvalidRequest
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.pump import EngineFacts
from streamserve.sampling import SamplingParams

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


def sampling_params(
    request: GenerationRequest,
    defaults: SamplingDefaults,
    engine: EngineFacts,
    num_prompt: int,
    *,
    default_max_tokens: int | None,
    seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The parameters of `request` for a prompt of `num_prompt` tokens.

    Args:
        default_max_tokens: when the request names no limit; None is the rest of the context.
        seed: when the request brings none.
        bad_words: token ids of what must not come about.

    Raises:
        InvalidRequest: a field is out of range, or the KV cache cannot hold what was asked for.
    """
    max_tokens = _max_tokens(request, engine, num_prompt, default_max_tokens)
    asked, _ = request.limit()
    min_tokens = request.min_tokens or 0
    if asked is None or min_tokens <= asked:
        # The caller's two numbers agree; what was cut off one is cut off the other.
        min_tokens = min(min_tokens, max_tokens)
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, engine, "stop_token_ids")
    top_k = _or(request.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=0 if top_k == -1 else top_k,
        min_p=_or(request.min_p, defaults.min_p),
        seed=_or(request.seed, seed),
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=logit_bias(request.logit_bias or {}, engine),
        bad_words=bad_words,
        allowed_token_ids=allowed_token_ids(request.allowed_token_ids, engine),
        logprobs=_num_logprobs(request),
        prompt_logprobs=_num_prompt_logprobs(request),
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


def allowed_token_ids(ids: Sequence[int] | None, engine: EngineFacts) -> tuple[int, ...] | None:
    """The only tokens that may be sampled, or None.

    Raises:
        InvalidRequest: it names something that is no token.
    """
    if ids is None:
        return None
    check_token_ids(ids, engine, "allowed_token_ids")
    return tuple(sorted(set(ids)))


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


def check_token_ids(ids: Sequence[Any], engine: EngineFacts, param: str) -> None:
    """Refuses what is no id in the model's vocabulary.

    Raises:
        InvalidRequest: the message names the first of them.
    """
    for index, token_id in enumerate(ids):
        # Not isinstance: true is no token id.
        if type(token_id) is not int or not 0 <= token_id < engine.vocab_size:
            raise InvalidRequest(
                f"{param}[{index}] is no token id; this model has ids from 0 to {engine.vocab_size - 1}.",
                param,
            )


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
