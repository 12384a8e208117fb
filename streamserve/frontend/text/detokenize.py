"""Token ids to text, one delta at a time, never showing half a character.

    kind of tokenizer               way                              joined deltas equal the full decode
    byte-level (GPT-2, Llama 3)     table id → bytes, UTF-8 decoder  always
    byte fallback (Llama 2, Gemma)  table id → text or byte          but for bad runs over MAX_BYTE_RUN
    any other                       window over the tokenizer's      if a token's text depends on its
                                    own decode                       neighbours only

A byte-fallback tokenizer turns a whole run of byte tokens into replacement characters if any of it is
invalid, so exactness needs the run's end; the bound keeps a model that produces only byte tokens streaming.
The window is bounded for the same reason. All three cost the same for each token however long the text is.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

MAX_BYTE_RUN = 32
MAX_WINDOW_PENDING = 8

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "�"
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one stream; fed all its ids in order."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; may be empty. Hot: once for each delta."""

    @property
    def has_pending(self) -> bool:
        """Whether a character has begun that is not complete; `flush` has text only then."""

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""


class Detokenizers:
    """Makes a `Detokenizer` for each stream, from tables built once for a tokenizer.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.

    Attributes:
        special_ids: tokens that are no text, such as the end of a turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = None if tokenizer.decoder is None else orjson.loads(tokenizer.decoder.__getstate__())
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._byte_fallback = _ByteFallbackRules.of(decoder)
        piece_of: Callable[[str], Any] = str
        if self._is_byte_level:
            piece_of = _level_piece
        elif self._byte_fallback is not None:
            piece_of = self._byte_fallback.piece
        tokens, self.special_ids = _read_vocabulary(tokenizer)
        # Piece by id; None for an id that contributes nothing, not even a boundary.
        self._all_pieces = [None if token is None else piece_of(token) for token in tokens]
        self._plain_pieces = list(self._all_pieces)
        for token_id in self.special_ids:
            self._plain_pieces[token_id] = None
        self._added = {at: token.content for at, token in tokenizer.get_added_tokens_decoder().items()}

    def start(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        continues: bool = False,
    ) -> Detokenizer:
        """A detokenizer for a new stream.

        Args:
            skip_special_tokens: leave special tokens out of the text.
            spaces_between_special_tokens: leave a space between neighbouring special tokens where the
                tokenizer's own decoder puts one; the first two kinds in the table above never do.
            continues: the text goes on from a prompt, so a space that the tokenizer would strip from the
                start of a text is kept.
        """
        table = self._plain_pieces if skip_special_tokens else self._all_pieces
        if self._is_byte_level:
            return _ByteLevelDetokenizer(table)
        if self._byte_fallback is not None:
            return _ByteFallbackDetokenizer(table, 0 if continues else self._byte_fallback.strip_spaces)
        return _WindowDetokenizer(
            self._tokenizer, table, {} if spaces_between_special_tokens else self._added
        )

    def piece(self, token_id: int) -> str | bytes:
        """What a token stands for by itself: text, or bytes that are no whole characters."""
        piece = self._all_pieces[token_id] if 0 <= token_id < len(self._all_pieces) else None
        if piece is None:
            return ""
        if isinstance(piece, int):
            return bytes((piece,)).decode() if piece < 0x80 else bytes((piece,))
        if self._is_byte_level or self._byte_fallback is not None:
            whole: str | bytes = piece
            return whole
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def _read_vocabulary(tokenizer: Any) -> tuple[list[str | None], frozenset[int]]:
    """Token by id, None where an id has none, and the ids of special tokens."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    size = 1 + max([*vocabulary.values(), *added], default=-1)
    tokens: list[str | None] = [None] * size
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    for token_id, added_token in added.items():
        tokens[token_id] = added_token.content
    special = {token.content for token in added.values() if token.special}
    return tokens, frozenset(at for at, token in enumerate(tokens) if token in special)


def _byte_of_level_char() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_LEVEL_BYTES = _byte_of_level_char()


def _level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token with other characters stands for itself."""
    try:
        return bytes([_LEVEL_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def _level_piece(token: str) -> str | bytes:
    """The text of a token that is whole characters, else its bytes."""
    level_bytes = _level_bytes(token)
    try:
        return level_bytes.decode()
    except UnicodeDecodeError:
        return level_bytes


class _ByteLevelDetokenizer:
    """All tokens are bytes, and the text is their UTF-8 decoding."""

    def __init__(self, table: list[str | bytes | None]) -> None:
        self._table = table
        self._size = len(table)
        self._utf8 = _utf8_decoder("replace")
        self._is_within_character = False

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            token_id = ids[0]
            if token_id < self._size and not self._is_within_character:
                piece = self._table[token_id]
                if isinstance(piece, str):
                    return piece
            return self._decode_one(token_id)
        return "".join([self._decode_one(token_id) for token_id in ids])

    def _decode_one(self, token_id: int) -> str:
        piece = self._table[token_id] if token_id < self._size else None
        if piece is None:
            return ""
        if isinstance(piece, str):
            if not self._is_within_character:
                return piece
            piece = piece.encode()
        text = self._utf8.decode(piece)
        self._is_within_character = self._utf8.getstate()[0] != b""
        return text

    @property
    def has_pending(self) -> bool:
        return self._is_within_character

    def flush(self) -> str:
        self._is_within_character = False
        return self._utf8.decode(b"", True)


class _ByteFallbackRules:
    """What a decoder of the form Replace, ByteFallback, Fuse [, Strip] does to each token."""

    def __init__(self, replaced: str, content: str, strip_spaces: int) -> None:
        self.replaced = replaced
        self.content = content
        self.strip_spaces = strip_spaces

    @classmethod
    def of(cls, decoder: Any) -> _ByteFallbackRules | None:
        """The rules of `decoder`, or None if it has another form."""
        if decoder is None or decoder["type"] != "Sequence":
            return None
        steps = decoder["decoders"]
        if [step["type"] for step in steps][:3] != ["Replace", "ByteFallback", "Fuse"]:
            return None
        replaced = steps[0]["pattern"].get("String")
        strips = steps[3:]
        plain = all(s["type"] == "Strip" and s["content"] == " " and s["stop"] == 0 for s in strips)
        if replaced is None or len(strips) > 1 or not plain:
            return None
        return cls(replaced, steps[0]["content"], strips[0]["start"] if strips else 0)

    def piece(self, token: str) -> str | int:
        """The token's text, or its value if it stands for a byte."""
        text = token.replace(self.replaced, self.content)
        match = _BYTE_TOKEN.fullmatch(text)
        return text if match is None else int(match[1], 16)


class _ByteFallbackDetokenizer:
    """Tokens are text, and bytes where the vocabulary has no text for a character."""

    def __init__(self, table: list[str | int | None], strip_spaces: int) -> None:
        self._table = table
        self._strip_spaces = strip_spaces
        self._run = bytearray()
        # Set while a run is too long to be held: it is then shown as it comes.
        self._open_run: codecs.IncrementalDecoder | None = None

    def decode(self, ids: Sequence[int]) -> str:
        table = self._table
        parts: list[str] = []
        for token_id in ids:
            piece = table[token_id] if token_id < len(table) else None
            if isinstance(piece, str):
                parts.append(self._close_run() + piece)
            elif piece is not None:
                parts.append(self._extend_run(piece))
        return self._strip("".join(parts))

    @property
    def has_pending(self) -> bool:
        return bool(self._run) or self._open_run is not None

    def flush(self) -> str:
        return self._strip(self._close_run())

    def _extend_run(self, byte: int) -> str:
        if self._open_run is not None:
            return self._open_run.decode(bytes((byte,)))
        self._run.append(byte)
        if len(self._run) < MAX_BYTE_RUN:
            return ""
        self._open_run = _utf8_decoder("replace")
        run, self._run = bytes(self._run), bytearray()
        return self._open_run.decode(run)

    def _close_run(self) -> str:
        if self._open_run is not None:
            text = self._open_run.decode(b"", True)
            self._open_run = None
            return text
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        if self._strip_spaces and text:
            stripped = text.lstrip(" ")
            spaces = min(len(text) - len(stripped), self._strip_spaces)
            self._strip_spaces = 0 if stripped else self._strip_spaces - spaces
            return text[spaces:]
        return text


class _WindowDetokenizer:
    """Decodes a short window of tokens with and without the new ones, and shows the difference.

    Args:
        joined: text of tokens that are put behind each other without what the decoder puts between them.
    """

    def __init__(self, tokenizer: Any, table: list[str | None], joined: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._joined = joined
        self._is_after_joined = False
        self._window: list[int] = []
        self._num_shown = 0
        self._shown_text = ""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([self._append(token_id) for token_id in ids])

    @property
    def has_pending(self) -> bool:
        return len(self._window) > self._num_shown

    def flush(self) -> str:
        text = self._decode_window()[len(self._shown_text) :]
        self._window, self._num_shown, self._shown_text = [], 0, ""
        return text

    def _append(self, token_id: int) -> str:
        if token_id >= len(self._table) or self._table[token_id] is None:
            return ""
        joined = self._joined.get(token_id)
        if joined is not None and self._is_after_joined:
            # The window stays as it is: its last token is one of this kind already.
            return joined
        self._is_after_joined = joined is not None
        self._window.append(token_id)
        text = self._decode_window()
        num_pending = len(self._window) - self._num_shown
        if text.endswith(_REPLACEMENT) and num_pending < MAX_WINDOW_PENDING:
            return ""
        new = text[len(self._shown_text) :]
        # What was just shown stays as left context for the tokens to come.
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown_text = self._decode_window()
        return new

    def _decode_window(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return text
