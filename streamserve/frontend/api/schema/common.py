"""What chat and completion requests share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from streamserve.errors import InvalidRequest
from streamserve.frontend.api.schema.neutral import refuse_unsupported

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024

# Labels of the branches of a union; pydantic puts them into error locations, and they are no field names.
BRANCH = "~"


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_listed)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Schema(BaseModel):
    """Strict types; fields that nobody knows are ignored, as other servers do."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Schema):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class GenerationRequest(Schema):
    """Fields that both endpoints have. None is the same as absent."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def limit(self) -> tuple[int | None, str]:
        """The number of tokens asked for, and the field that asks for it."""
        return self.max_tokens, "max_tokens"


Request = TypeVar("Request", bound=GenerationRequest)


def validate(kind: type[Request], body: dict[str, Any], unsupported: dict[str, tuple[Any, ...]]) -> Request:
    """`body` as a request of `kind`.

    Args:
        unsupported: fields with which this server cannot do anything yet, and their harmless values.

    Raises:
        InvalidRequest: names the first field at fault.
    """
    refuse_unsupported(body, unsupported)
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _invalid(error) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", "stream_options")
    return request


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
