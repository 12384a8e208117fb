"""The bytes of each chunk, the same on every transport.

A chunk of text is two byte strings made once for a choice, and the delta's text as JSON between them: no
model object, no dict and no string formatting for each token. All other chunks are rare, or were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

Usage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """What the answers of an endpoint look like.

    Attributes:
        id_prefix: of the answer's id.
        kind, chunk_kind: the `object` of an answer in one piece, and of its chunks.
        is_chat: a choice is a message by somebody, or a delta of one; else it is a text.
    """

    id_prefix: str
    kind: str
    chunk_kind: str
    is_chat: bool

    def whole(self, text: str) -> dict[str, Any]:
        """The text of an answer in one piece, as members of its choice."""
        return {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}

    def part(self, text: str) -> dict[str, Any]:
        """The text of a chunk, as members of its choice. No text at all is an empty delta."""
        if self.is_chat:
            return {"delta": {"content": text} if text else {}}
        return {"text": text}


@dataclass(frozen=True, slots=True)
class UsageInChunks:
    """What the chunks of a stream say of token counts.

    Attributes:
        is_asked: chunks have a member `usage`, and a last one has the counts.
        so_far: the counts up to now, if every chunk is to have them.
    """

    is_asked: bool
    so_far: Callable[[], Usage] | None = None


class Chunks:
    """The chunks of one choice.

    Args:
        head: the members that all chunks of the answer share: id, object, created, model.
        form: the endpoint's.
        index: the choice's.
        usage: what they say of token counts.

    Attributes:
        is_chat: they are of a chat.
    """

    def __init__(self, head: dict[str, Any], form: Form, index: int, usage: UsageInChunks) -> None:
        self.is_chat = form.is_chat
        self._head = head
        self._form = form
        self._index = index
        self._usage = usage
        mark = "\x00text\x00"
        self._before, self._after = self.chunk(form.part(mark)).split(orjson.dumps(mark))
        self._is_counted = usage.so_far is not None

    def text(self, text: str) -> bytes:
        """A chunk of text and nothing else. Hot: once for each delta."""
        if self._is_counted:
            return self.chunk(self._form.part(text))
        return self._before + orjson.dumps(text) + self._after

    def detailed(
        self,
        text: str,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with more than text.

        Args:
            details: further members of the choice.
        """
        return self.chunk(self._form.part(text), logprobs, reason, details)

    def role(self, members: dict[str, Any]) -> bytes:
        """The first chunk of a choice in a chat.

        Args:
            members: further members of the chunk.
        """
        return self.chunk({"delta": {"role": "assistant", "content": ""}}, members=members)

    def chunk(
        self,
        part: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        details: dict[str, Any] | None = None,
        members: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with one choice."""
        choice = {
            "index": self._index,
            **part,
            "logprobs": logprobs,
            "finish_reason": reason,
            **(details or {}),
        }
        chunk = {**self._head, **(members or {}), "choices": [choice]}
        if self._usage.is_asked:
            chunk["usage"] = None if self._usage.so_far is None else self._usage.so_far()
        return orjson.dumps(chunk)


def usage_chunk(head: dict[str, Any], usage: Usage) -> bytes:
    """The last chunk of a stream that was asked for token counts."""
    return orjson.dumps({**head, "choices": [], "usage": usage})
