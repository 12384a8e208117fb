"""From token ids and a finish code to the text a client may see, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass

from streamserve.frontend.text.detokenize import Detokenizer
from streamserve.frontend.text.stops import StopMatcher, StopStrings
from streamserve.frontend.text.trace import Place, TokenTrace, TracedToken
from streamserve.messages import Finish, Logprobs

_NO_STRINGS = StopStrings()
_REASONS = {int(Finish.STOP): "stop", int(Finish.LENGTH): "length", int(Finish.ABORT): "abort"}


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a text, apart from its length.

    Attributes:
        strings: stop strings.
        token_ids: the caller's own stop ids, to name the one that ended the text.
        min_tokens: stop strings are looked for only in the text of later tokens.
        shows_stop: the stop string, or the text of the stop id, is the end of the text.
    """

    strings: StopStrings = _NO_STRINGS
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    shows_stop: bool = False


class TextAssembler:
    """The text of one answer, delta by delta. The same for a stream and for an answer in one piece.

    Args:
        detokenizer: of this answer.
        rules: what ends it.
        trace: told of each token's part of the text, if anybody wants to know.

    Attributes:
        num_tokens: tokens used so far, the one that ended the text included.
        finish_reason: `stop`, `length` or `abort` once the text has ended, else None.
        stop_reason: the stop string or stop id that ended it, if one of the caller's did.
    """

    def __init__(
        self, detokenizer: Detokenizer, rules: StopRules | None = None, trace: TokenTrace | None = None
    ) -> None:
        rules = rules or StopRules()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._stops = StopMatcher(rules.strings, shows_match=rules.shows_stop) if rules.strings else None
        self._stop_token_ids = rules.token_ids
        self._min_tokens = rules.min_tokens
        self._shows_stop = rules.shows_stop
        self._trace = trace
        # Tokens are text one after the other, and nobody looks at each.
        self._is_plain = self._stops is None and trace is None

    def accept(self, tokens: list[int], finish: int, logprobs: Logprobs | None = None) -> str:
        """The text that may be shown now; nothing after the end. Hot: once for each delta.

        Args:
            logprobs: a row for each of `tokens`, for the trace.
        """
        if self.finish_reason is not None:
            return ""
        if self._is_plain and not finish:
            self.num_tokens += len(tokens)
            return self._detokenizer.decode(tokens)
        # The token that means "stop" is text only if the caller wants it.
        is_hidden = finish == Finish.STOP and not self._shows_stop
        text = self._decode(tokens[:-1] if is_hidden else tokens, logprobs)
        if finish and self.finish_reason is None:
            text += self._end(finish, tokens, logprobs)
        if self._trace is not None:
            self._show_to(self._trace, len(text))
        return text

    def _show_to(self, trace: TokenTrace, num_chars: int) -> None:
        trace.show(num_chars)
        if self.finish_reason is not None:
            trace.end()

    def _decode(self, tokens: list[int], logprobs: Logprobs | None) -> str:
        if self._is_plain:
            self.num_tokens += len(tokens)
            return self._detokenizer.decode(tokens)
        return self._decode_one_by_one(tokens, logprobs)

    def _decode_one_by_one(self, tokens: list[int], logprobs: Logprobs | None) -> str:
        """So that counts and parts do not depend on how deltas were merged."""
        shown: list[str] = []
        stops, trace = self._stops, self._trace
        for at, token in enumerate(tokens):
            self.num_tokens += 1
            text = self._detokenizer.decode((token,))
            if trace is not None:
                place, is_whole = _place(logprobs, at), not self._detokenizer.has_pending
                trace.add(TracedToken(token, text, place=place), is_whole=is_whole)
            if stops is None or self.num_tokens <= self._min_tokens:
                shown.append(text)
                continue
            shown.append(stops.decode(text))
            if stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", stops.matched
                break
        return "".join(shown)

    def _end(self, finish: int, tokens: list[int], logprobs: Logprobs | None) -> str:
        """Releases all that was held back: an incomplete character, the beginning of a stop string."""
        self.finish_reason = _REASONS[finish]
        text = self._detokenizer.flush()
        if self._trace is not None and text:
            self._trace.extend_last(text)
        if self._stops is not None:
            text = self._stops.decode(text)
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
                return text
            text += self._stops.flush()
        if finish == Finish.STOP and tokens:
            self._take_stop_token(tokens[-1], _place(logprobs, len(tokens) - 1))
        return text

    def _take_stop_token(self, token: int, place: Place | None) -> None:
        """Counts and names the token that ended the text."""
        if token in self._stop_token_ids:
            self.stop_reason = token
        if not self._shows_stop:
            self.num_tokens += 1
            if self._trace is not None:
                self._trace.add(TracedToken(token, "", is_text=False, place=place))


def _place(logprobs: Logprobs | None, at: int) -> Place | None:
    return None if logprobs is None else Place(logprobs, at)
