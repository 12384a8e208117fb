"""The JSON objects of the API as types: answers, and the chunks and events of streams.

They are plain dictionaries; what a newer server adds is in them as well.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length", "abort"]


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class PromptTokensDetails(TypedDict):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class TopLogprob(TypedDict):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenLogprob]


class ChatChoice(TypedDict):
    """One answer to a conversation. `finish_reason` is None in a stream that was left early."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int] | None]


class ChatCompletion(TypedDict):
    """The answer to a chat. `usage` is None in a stream that did not come to its end."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


class Delta(TypedDict, total=False):
    """What is new in a chunk."""

    role: Literal["assistant"] | None
    content: str | None


class ChatChunkChoice(TypedDict):
    """A part of one answer."""

    index: int
    delta: Delta
    logprobs: NotRequired[ChatLogprobs | None]
    finish_reason: NotRequired[FinishReason | None]
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int] | None]


class ChatChunk(TypedDict):
    """One event of a streamed chat. The last one has the token counts and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int] | None]


class CompletionLogprobs(TypedDict):
    """Lists of the same length, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation, or in a stream a part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


class Completion(TypedDict):
    """The answer to a completion, or one event of a stream; the last has the token counts and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class OutputText(TypedDict):
    """The text of a response."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    """The one item of a response's output."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(TypedDict):
    """The answer of the Responses API; it has more members, which tell what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[OutputMessage]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """One event of a streamed response; which of the optional members it has depends on its type."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item: NotRequired[OutputMessage]
    part: NotRequired[OutputText]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
