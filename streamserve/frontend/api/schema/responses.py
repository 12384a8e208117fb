"""The body of /v1/responses: the part of OpenAI's API that is text in and text out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from streamserve.errors import InvalidRequest
from streamserve.frontend.api.schema.common import (
    GenerationRequest,
    Schema,
    TemplateVariables,
    at_most,
    few_parts,
)
from streamserve.frontend.text.template import Conversation

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_INCLUDE = 64

_OFF = (None, False)
_NONE: tuple[Any, ...] = (None,)
_EMPTY_LIST: tuple[Any, ...] = (None, [])

# Padding beside the text is for those who fear that its length is overheard. There is none.
_STREAM_OPTIONS = tuple(
    {**padding, **resumption}
    for padding in ({}, {"include_obfuscation": False}, {"include_obfuscation": True})
    for resumption in ({}, {"resumable": False}, {"resumable": True}, {"resumable": None})
)

# Refused by name, unless they have one of these values (streamserve.frontend.api.schema.neutral).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": _OFF,
    "conversation": _NONE,
    "prompt": _NONE,
    "context_management": _EMPTY_LIST,
    "moderation": _NONE,
    "tools": _EMPTY_LIST,
    "tool_choice": (None, "none", "auto"),
    "truncation": (None, "disabled"),
    "stream_options": (None, *_STREAM_OPTIONS),
    "enable_response_messages": _OFF,
    "previous_input_messages": _NONE,
    "structured_outputs": _NONE,
    # Fields of the other endpoints; here they have another name or no meaning.
    "messages": _NONE,
    "max_tokens": _NONE,
    "max_completion_tokens": _NONE,
    "n": (None, 1),
    "logprobs": _OFF,
    "prompt_logprobs": _NONE,
    "response_format": _NONE,
    "truncate_prompt_tokens": _NONE,
    "return_token_ids": _OFF,
}


class PreviousResponseNotFound(InvalidRequest):
    """The request goes on from an earlier response, and none is kept."""

    code = "previous_response_not_found"


def _text_only(part: Any) -> Any:
    """Names what is not supported, where a list of what is would not help."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("input_text", "output_text"):
        raise PydanticCustomError(
            "content", "Parts of type {kind} are not supported here", {"kind": kind[:80]}
        )
    return part


def _messages_only(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind != "message":
        raise PydanticCustomError("item", "Items of type {kind} are not supported here", {"kind": kind[:80]})
    return item


class TextPart(Schema):
    """One text among the parts of a message's content."""

    type: Literal["input_text", "output_text"]
    text: str


def _branch(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~list"


Content = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[Annotated[TextPart, BeforeValidator(_text_only)]], Tag("~list")],
    Discriminator(_branch),
]


class InputMessage(Schema):
    """One turn, as a caller writes it or as an earlier answer had it."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect; few of them know developers."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


Input = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[
        list[Annotated[InputMessage, BeforeValidator(_messages_only)]],
        Field(min_length=1),
        BeforeValidator(few_parts),
        Tag("~list"),
    ],
    Discriminator(_branch),
]


class TextFormat(Schema):
    """Text may be anything."""

    type: Literal["text"]


class TextConfig(Schema):
    """What the text is like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Schema):
    """That the model does not think first."""

    effort: Literal["none"] | None = None
    summary: None = None


# Of all that an answer could include besides its text, there is one thing here; the rest never comes about.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(GenerationRequest):
    """A conversation to go on with.

    `store` may be true, as it is where a caller does not mention it; the answer says that nothing is stored.
    """

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: Annotated[list[Includable], Field(max_length=MAX_INCLUDE), at_most(MAX_INCLUDE)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
            at_most(MAX_METADATA),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told at each position; None tells no log probability."""
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None

    def limit(self) -> tuple[int | None, str]:
        """The number of tokens asked for, and the field that asks for it."""
        return self.max_output_tokens, "max_output_tokens"

    def check(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            InvalidRequest: names one of them.
        """
        super().check()
        if self.previous_response_id is not None:
            raise PreviousResponseNotFound(
                "previous_response_id is not supported here, as no response is stored; send the whole "
                "conversation as input.",
                "previous_response_id",
            )
        if self.top_logprobs and self.num_top_logprobs is None:
            raise InvalidRequest(f"top_logprobs needs include to have {LOGPROBS}.", "top_logprobs")

    def conversation(self) -> Conversation:
        """What the chat template is given."""
        given = self.input
        messages = (
            [{"role": "user", "content": given}]
            if isinstance(given, str)
            else [message.for_template() for message in given]
        )
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return Conversation(messages=messages, variables=self.chat_template_kwargs or {})
