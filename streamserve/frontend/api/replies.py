"""The bodies of answers, as /openapi.json describes them.

Answers are written as bytes without these models (one for each token would be too slow); tests hold the two
together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort"]
StatusWord = Literal["ok", "loading", "restarting", "draining", "stuck", "dead", "failed"]


class Reply(BaseModel):
    """What is not described does not come."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Error(Reply):
    """What went wrong."""

    message: str = Field(description="For a person to read.")
    type: str = Field(description="The kind of error, such as invalid_request_error.")
    param: str | None = Field(description="The field at fault, if it is one.")
    code: str = Field(description="The exact error, for programs.")


class ErrorReply(Reply):
    """Every answer with a status of 400 or above but those of probes."""

    error: Error


class PromptTokensDetails(Reply):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(Reply):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Reply):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """One entry for each token."""

    content: list[TokenLogprob]


class PromptLogprob(Reply):
    """A token that was likely at a place in the prompt, or that is there."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AssistantMessage(Reply):
    """The answer's text."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Reply):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    """An answer to /v1/chat/completions in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Reply):
    """What is new in a chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Reply):
    """A part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Reply):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Reply):
    """Lists of the same length, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    """One continuation, or in a stream a part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Reply):
    """An answer to /v1/completions: in one piece, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class OutputText(Reply):
    """The text of a response."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    """The one item of a response's output."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ResponseUsage(Reply):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(BaseModel):
    """An answer to /v1/responses in one piece; members that are not described have their defaults."""

    model_config = ConfigDict(strict=True, extra="allow")

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


class ResponseEvent(BaseModel):
    """One event of a streamed response; what else it has depends on its type."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    sequence_number: int


class StreamEvent(BaseModel):
    """One event of a stream that somebody comes back to: what that kind of answer has as its events."""

    model_config = ConfigDict(strict=True, extra="allow")


class Tokens(Reply):
    """The ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(Reply):
    """The text of token ids."""

    prompt: str


class ModelCard(Reply):
    """A served model. Its greatest length is known once it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(Reply):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Stream(Reply):
    """A live answer of the caller."""

    id: str
    object: Literal["stream"]
    status: Literal["queued", "running", "detached", "cancelled"]
    created: int
    age_seconds: float
    choices: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class StreamList(Reply):
    """All live answers of the caller."""

    object: Literal["list"]
    data: list[Stream]


class Progress(Reply):
    """How far a start is."""

    stage: str
    fraction: float = Field(ge=0, le=1)


class Status(Reply):
    """What the server is doing."""

    status: StatusWord
    progress: Progress | None = None
    seconds: float | None = Field(None, description="What the token of a deep look took.")
    error: str | None = Field(None, description="Why there was none.")


class Load(BaseModel):
    """How busy the engine is; the counters beside these are those of its STATS frame."""

    model_config = ConfigDict(strict=True, extra="allow")

    server_load: int
    running: int
    waiting: int
    num_blocks: int
    free_blocks: int


class Version(Reply):
    """The version of the server."""

    version: str


class Done(Reply):
    """That it was done."""

    ok: Literal[True]
