"""The fields of requests as types. docs/api.md of the server says what each means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class StreamOptions(TypedDict, total=False):
    """What a stream carries besides text. By default the last chunk has the token counts."""

    include_usage: bool
    continuous_usage_stats: bool


class SamplingOptions(TypedDict, total=False):
    """Fields that all endpoints have."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    min_tokens: int
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    return_tokens_as_token_ids: bool
    priority: int
    max_queue_time: float
    cache_salt: str
    request_id: str
    user: str


class GenerationOptions(SamplingOptions, total=False):
    """Fields of chats and completions."""

    n: int
    max_tokens: int
    stream_options: StreamOptions
    prompt_logprobs: int
    return_token_ids: bool
    truncate_prompt_tokens: int
    truncation_side: Literal["left", "right"]
    add_special_tokens: bool


class ChatOptions(GenerationOptions, total=False):
    """Fields of a chat besides its messages."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    documents: Sequence[Mapping[str, Any]]


class CompletionOptions(GenerationOptions, total=False):
    """Fields of a completion besides its prompt."""

    echo: bool
    logprobs: int
    best_of: int


class ResponseOptions(SamplingOptions, total=False):
    """Fields of a response besides its input."""

    instructions: str
    max_output_tokens: int
    top_logprobs: int
    include: Sequence[str]
    text: Mapping[str, Any]
    metadata: Mapping[str, str]
    store: bool
    safety_identifier: str
    prompt_cache_key: str
    chat_template_kwargs: Mapping[str, Any]


ChatMessage = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
ResponseInput = str | Sequence[Mapping[str, Any]]
