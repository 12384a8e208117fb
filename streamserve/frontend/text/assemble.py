"""From token ids and a finish code to the text a client may see, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence

from streamserve.frontend.text.detokenize import Detokenizer
from streamserve.frontend.text.stops import StopMatcher
from streamserve.messages import Finish

_REASONS = {int(Finish.STOP): "stop", int(Finish.LENGTH): "length"}


class TextAssembler:
    """The text of one answer, delta by delta. The same for a stream and for an answer in one piece.

    Args:
        detokenizer: of this answer.
        stops: stop strings.
        stop_token_ids: the caller's own stop ids, to name the one that ended the text.
        min_tokens: stop strings are looked for only in the text of later tokens.

    Attributes:
        num_tokens: tokens used so far, the one that ended the text included.
        finish_reason: `stop` or `length` once the text has ended, else None.
        stop_reason: the stop string or stop id that ended it, if one of the caller's did.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops) if stops else None
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens

    def accept(self, tokens: list[int], finish: int) -> str:
        """The text that may be shown now; nothing after the end. Hot: once for each delta."""
        if self.finish_reason is not None:
            return ""
        if finish == Finish.STOP and tokens:
            # The token that means "stop" is no text.
            last = tokens[-1]
            text = self._decode(tokens[:-1])
            if self.finish_reason is None:
                self.num_tokens += 1
                self.stop_reason = last if last in self._stop_token_ids else None
        else:
            text = self._decode(tokens)
        if finish and self.finish_reason is None:
            text += self._end(_REASONS[finish])
        return text

    def _decode(self, tokens: list[int]) -> str:
        if self._stops is None:
            self.num_tokens += len(tokens)
            return self._detokenizer.decode(tokens)
        return self._decode_until_stop(tokens, self._stops)

    def _decode_until_stop(self, tokens: list[int], stops: StopMatcher) -> str:
        """One token at a time, so that the count does not depend on how deltas were merged."""
        shown: list[str] = []
        for token in tokens:
            self.num_tokens += 1
            text = self._detokenizer.decode((token,))
            shown.append(stops.decode(text) if self.num_tokens > self._min_tokens else text)
            if stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", stops.matched
                break
        return "".join(shown)

    def _end(self, reason: str) -> str:
        """Releases all that was held back: an incomplete character, the beginning of a stop string."""
        self.finish_reason = reason
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        text = self._stops.decode(text)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
            return text
        return text + self._stops.flush()
