"""A stream's chunks put together to the answer that the request would have got in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

from streamserve_client.documents import ChatChunk, ChatCompletion, Completion, Response, ResponseEvent
from streamserve_client.errors import InvalidAnswer, api_error

Json = dict[str, Any]
Chunk_co = TypeVar("Chunk_co", covariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)


class Accumulator(Protocol[Chunk_co, Answer_co]):
    """What has come of one stream.

    Attributes:
        has_begun: a chunk has come, so the request cannot be made again unnoticed.
        is_complete: the stream's end has come.
        text: of the first choice.
    """

    has_begun: bool
    is_complete: bool

    @property
    def text(self) -> str: ...

    def add(self, chunk: Json) -> Chunk_co:
        """Takes the next chunk, and returns it. Hot: once a chunk.

        Raises:
            APIError: it tells of the stream's failure.
            InvalidAnswer: it is no chunk.
        """

    def text_of(self, chunk: Any) -> str:
        """What a chunk adds to the text of the first choice."""

    def end(self) -> None:
        """The transport says that the stream is over."""

    def answer(self) -> Answer_co:
        """What has come, in the form of a whole answer."""


class ChoicesAccumulator:
    """Of chats and completions, whose chunks have choices.

    Args:
        is_chat: the choices have deltas of messages, else parts of a text.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self.has_begun = False
        self.is_complete = False
        self._is_chat = is_chat
        self._head: Json = {}
        self._usage: Json | None = None
        self._choices: dict[int, Json] = {}
        self._texts: dict[int, list[str]] = {}

    @property
    def text(self) -> str:
        """Of the first choice."""
        return "".join(self._texts.get(0, ()))

    def add(self, chunk: Json) -> Json:
        """Takes the next chunk. Hot: once a chunk."""
        if chunk.get("error") is not None:
            raise api_error(chunk["error"])
        try:
            if not self.has_begun:
                self._head = {name: chunk[name] for name in ("id", "created", "model")}
                self.has_begun = True
            if "prompt_token_ids" in chunk:
                self._head["prompt_token_ids"] = chunk["prompt_token_ids"]
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk["choices"]:
                self._add_choice(choice)
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidAnswer(f"the server sent a chunk that is none: {str(chunk)[:200]}") from error
        return chunk

    def text_of(self, chunk: Any) -> str:
        """What a chunk adds to the text of the first choice."""
        return "".join(self._part(choice) for choice in chunk["choices"] if choice["index"] == 0)

    def end(self) -> None:
        """The stream is over."""
        self.is_complete = True

    def answer(self) -> Json:
        """What has come, in the form of a whole answer."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = [self._whole(index) for index in sorted(self._choices)]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage}

    def _part(self, choice: Json) -> str:
        part = choice["delta"].get("content") if self._is_chat else choice["text"]
        return part or ""

    def _add_choice(self, choice: Json) -> None:
        index = choice["index"]
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = {"index": index, "logprobs": None, "finish_reason": None}
            self._texts[index] = []
        self._texts[index].append(self._part(choice))
        for name, value in choice.items():
            if name in ("index", "delta", "text") or value is None:
                continue
            if name == "token_ids":
                known.setdefault(name, []).extend(value)
            elif name == "logprobs":
                known[name] = _joined(known[name], value)
            else:
                known[name] = value

    def _whole(self, index: int) -> Json:
        text = "".join(self._texts[index])
        said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {**self._choices[index], **said}


def _joined(known: Json | None, new: Mapping[str, list[Any]]) -> Json:
    """Log probabilities are lists, which go on from chunk to chunk."""
    if known is None:
        return {name: list(values or ()) for name, values in new.items()}
    for name, values in new.items():
        known[name].extend(values or ())
    return known


class ResponseAccumulator:
    """Of the Responses API, whose last event has the whole answer."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_complete = False
        self._response: Json = {}
        self._item: Json = {}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Of the one message."""
        return "".join(self._texts)

    def add(self, event: Json) -> Json:
        """Takes the next event. Hot: once an event."""
        try:
            kind = event["type"]
            if kind == "error":
                raise api_error(event.get("error") or event)
            if kind == "response.output_text.delta":
                self._texts.append(event["delta"])
            elif kind == "response.output_item.added":
                self._item = event["item"]
            elif kind == "response.failed":
                raise api_error(event["response"]["error"])
            elif "response" in event:
                self._response = event["response"]
                self.is_complete = kind in ("response.completed", "response.incomplete")
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidAnswer(f"the server sent an event that is none: {str(event)[:200]}") from error
        self.has_begun = True
        return event

    def text_of(self, event: Any) -> str:
        """What an event adds to the text."""
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""

    def end(self) -> None:
        """Means nothing: the last event does."""

    def answer(self) -> Json:
        """What has come, in the form of a whole answer."""
        if self.is_complete or not self._item:
            return self._response
        part = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}
        return {**self._response, "output": [{**self._item, "content": [part]}]}


def chat_accumulator() -> Accumulator[ChatChunk, ChatCompletion]:
    """For a chat."""
    return cast(Accumulator[ChatChunk, ChatCompletion], ChoicesAccumulator(is_chat=True))


def completion_accumulator() -> Accumulator[Completion, Completion]:
    """For a completion."""
    return cast(Accumulator[Completion, Completion], ChoicesAccumulator(is_chat=False))


def response_accumulator() -> Accumulator[ResponseEvent, Response]:
    """For a response."""
    return cast(Accumulator[ResponseEvent, Response], ResponseAccumulator())


def text_of(answer: ChatCompletion | Completion | Response) -> str:
    """The text of an answer, of its first choice if it has several."""
    document = cast(Json, answer)
    if document.get("object") == "response":
        return "".join(part["text"] for item in document["output"] for part in item["content"])
    choice = document["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])
