"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from streamserve.errors import InvalidRequest
from streamserve.frontend.api.schema.common import (
    MAX_PARTS,
    GenerationRequest,
    Schema,
    TemplateVariables,
    few_parts,
)
from streamserve.frontend.api.structure import MAX_VALUES, check_structure
from streamserve.frontend.text.template import Conversation


class TextPart(Schema):
    """One text among the parts of a message's content."""

    type: Literal["text", "input_text"]
    text: str


def _branch(content: Any) -> str:
    return "~text" if isinstance(content, str) else "~parts"


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextPart], Tag("~parts")], Discriminator(_branch)
]


class Message(Schema):
    """One turn. What else it carries (a name, tool calls) goes to the template as it is."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: Content | None = None

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect: content is one text."""
        message = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content or ())
        message.update(role=self.role, content=content)
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        return message


class Chat(Schema):
    """A conversation, and how it becomes a prompt."""

    messages: Annotated[list[Message], Field(min_length=1), BeforeValidator(few_parts)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def conversation(self) -> Conversation:
        """What the chat template is given.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                "continue_final_message",
            )
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            add_generation_prompt=self.add_generation_prompt is not False,
            continues_last=bool(self.continue_final_message),
            documents=self.documents or None,
            variables=self.chat_template_kwargs or {},
        )


class ChatRequest(Chat, GenerationRequest):
    """A conversation to go on with."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens told at each position; None tells no log probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    def limit(self) -> tuple[int | None, str]:
        """The number of tokens asked for, and the field that asks for it; the newer field wins."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    def check(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            InvalidRequest: names one of them.
        """
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true.", "top_logprobs")


def _with_parsed_arguments(call: Any) -> Any:
    """The API has a call's arguments as JSON text, templates want the object; other text stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    text = arguments.encode()
    check_structure(text, MAX_VALUES, "The arguments text of a tool call")
    try:
        parsed = orjson.loads(text) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": parsed}}
