"""What chat and completion requests share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from streamserve.errors import InvalidRequest
from streamserve.frontend import request_ids
from streamserve.frontend.api.schema.neutral import refuse_unsupported
from streamserve.frontend.text.template import RESERVED

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1024
# All of them together.
MAX_BAD_WORDS_CHARS = 4000
# Messages of a conversation, and parts of their contents, all together.
MAX_PARTS = 4096

# Labels of the branches of a union; pydantic puts them into error locations, and they are no field names.
BRANCH = "~"


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_list(value: Any) -> Any:
    if not isinstance(value, list):
        raise PydanticCustomError("list_type", "Input should be a valid list")
    return value


def few_parts(messages: Any) -> Any:
    """Refuses a conversation in so many pieces that looking at each would hold up everybody."""
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages[:MAX_PARTS] if isinstance(message, dict)]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if len(messages) + num_parts > MAX_PARTS:
            raise PydanticCustomError(
                "too_long", "There may be at most {limit} messages and parts of them", {"limit": MAX_PARTS}
            )
    return messages


def at_most(limit: int) -> BeforeValidator:
    """Refuses an object or a list with more members before each of them is looked at, and found wrong."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise PydanticCustomError("too_long", "There may be at most {limit} of them", {"limit": limit})
        return value

    return BeforeValidator(check)


def _not_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(RESERVED & variables.keys())
    if taken:
        raise PydanticCustomError("reserved", "There must be no {name} among them", {"name": taken[0]})
    return variables


# May be very long, so each id is looked at where that holds up nobody (streamserve.frontend.api.parameters).
TokenIds = Annotated[SkipValidation[list[int]], AfterValidator(_is_list)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_not_reserved)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_listed)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Schema(BaseModel):
    """Strict types; fields that nobody knows are ignored, as other servers do."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Schema):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    resumable: bool | None = None


class GenerationRequest(Schema):
    """Fields that both endpoints have. None is the same as absent."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: (
        Annotated[dict[str, Number], Field(max_length=MAX_LOGIT_BIASES), at_most(MAX_LOGIT_BIASES)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    max_queue_time: Annotated[Number, Field(gt=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    user: str | None = None
    request_id: Annotated[str, Field(pattern=f"^{request_ids.PATTERN}$")] | None = None

    @property
    def num_choices(self) -> int:
        """Choices in the answer, for each prompt."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Choices that are generated, for each prompt; the best of them are answered."""
        return self.num_choices

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens told at each position; None tells no log probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer's text begins with the prompt."""
        return False

    @property
    def is_scoring(self) -> bool:
        """Whether nothing but the prompt itself is asked for."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def asks_resume(self) -> bool:
        """Whether a stream should outlive its connection."""
        return self.stream_options is not None and bool(self.stream_options.resumable)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the token counts so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def limit(self) -> tuple[int | None, str]:
        """The number of tokens asked for, and the field that asks for it."""
        return self.max_tokens, "max_tokens"

    def check(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            InvalidRequest: names one of them.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs are not available when stream is true.", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 (as much as fits) or at least 1.", "truncate_prompt_tokens"
            )
        if sum(map(len, self.bad_words or ())) > MAX_BAD_WORDS_CHARS:
            raise InvalidRequest(
                f"bad_words: all of them together may have at most {MAX_BAD_WORDS_CHARS} characters.",
                "bad_words",
            )


Body = TypeVar("Body", bound=Schema)
Request = TypeVar("Request", bound=GenerationRequest)


def validate(kind: type[Request], body: dict[str, Any], unsupported: dict[str, tuple[Any, ...]]) -> Request:
    """`body` as a request of `kind`.

    Args:
        unsupported: fields with which this server cannot do anything yet, and their harmless values.

    Raises:
        InvalidRequest: names the first field at fault.
    """
    refuse_unsupported(body, unsupported)
    request = parse(kind, body)
    request.check()
    return request


def parse(kind: type[Body], body: dict[str, Any]) -> Body:
    """`body` in the form of `kind`.

    Raises:
        InvalidRequest: names the first field at fault.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidRequest:
    # The input itself is not quoted: it may be huge.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not part.startswith(BRANCH):
            param += f".{part}" if param else part
    return InvalidRequest(f"{param}: {first['msg']}.", param or None)
