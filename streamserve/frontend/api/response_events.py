"""The events of a streamed response, the same on every transport.

Each is a JSON object that begins with its `type`. All but the text's own come a fixed number of times; one of
the text is a few byte strings made once for a response, and the delta as JSON between them.
"""

from __future__ import annotations

from typing import Any

import orjson

from streamserve.frontend.api.problems import Problem

_PLACE = {"output_index": 0, "content_index": 0}


class ResponseEvents:
    """The events of one response, numbered in the order in which they are made.

    Args:
        item_id: of the one message in the response.
    """

    def __init__(self, item_id: str) -> None:
        self._item_id = item_id
        self._number = 0
        mark = "\x00delta\x00"
        head = {"type": "response.output_text.delta", "item_id": item_id, **_PLACE, "delta": mark}
        before, after = orjson.dumps(head).split(orjson.dumps(mark))
        self._before = before
        self._after = after.removesuffix(b"}") + b',"logprobs":'

    def begin(self, response: dict[str, Any], item: dict[str, Any], part: dict[str, Any]) -> list[bytes]:
        """All that comes before the text: the response without output, and its message without content."""
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", item_id=self._item_id, **_PLACE, part=part),
        ]

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """The next text. Hot: once for each delta."""
        number = self._number
        self._number = number + 1
        shown = orjson.dumps(logprobs) if logprobs else b"[]"
        parts = (self._before, orjson.dumps(text), self._after, shown, number)
        return b'%b%b%b%b,"sequence_number":%d}' % parts

    def end(self, item: dict[str, Any]) -> list[bytes]:
        """That the text and the message are complete."""
        (part,) = item["content"]
        place = {"item_id": self._item_id, **_PLACE}
        text, logprobs = part["text"], part["logprobs"]
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=logprobs),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def error(self, problem: Problem) -> bytes:
        """What went wrong, told in two ways: as OpenAI describes it, and as it comes from there.

        Clients read the one or the other.
        """
        flat = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._event("error", **flat, error=problem.error)

    def last(self, kind: str, response: dict[str, Any]) -> bytes:
        """How it ended: `completed`, `incomplete` or `failed`."""
        return self._event(f"response.{kind}", response=response)

    def _event(self, kind: str, **members: Any) -> bytes:
        number = self._number
        self._number = number + 1
        return orjson.dumps({"type": kind, **members, "sequence_number": number})
