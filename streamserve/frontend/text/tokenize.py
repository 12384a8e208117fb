"""Text to token ids, with the model folder's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

from streamserve.errors import ConfigError

# Characters, or tokens, of which the library does not take longer than an event loop may be held up.
SHORT = 8192
# As many ids are converted at once: for so long nobody else gets the interpreter.
CHUNK = 1 << 16

TokenIds = npt.NDArray[np.int32]


class PromptTokenizer:
    """Tokenises prompts. Safe to use from several threads at once.

    The library keeps the interpreter lock while it works on a single text, so that a thread helps nobody; it
    drops it in its calls for several. Those wait for threads of the library's own, which may be busy, so what
    is short, and may be asked for by an event loop, does without them.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; its truncation and padding are turned off.
        bos_token: text of the beginning-of-sequence token, if the model has one.

    Attributes:
        tokenizer: the same object.
        bos_id: id of the beginning-of-sequence token, if there is one.
        max_token_chars: no token stands for more characters of a prompt than this.
    """

    def __init__(self, tokenizer: Any, bos_token: str | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.max_token_chars = _max_token_chars(tokenizer)
        self.bos_id: int | None = None if bos_token is None else tokenizer.token_to_id(bos_token)
        # A tokenizer says through its post-processor whether a text is to begin with BOS.
        self._adds_bos = tokenizer.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    @classmethod
    def load(cls, folder: Path, bos_token: str | None) -> PromptTokenizer:
        """Reads `tokenizer.json` in `folder`.

        Raises:
            ConfigError: the file is missing or is no tokenizer.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; export the model with a fast tokenizer.")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        # The library raises bare Exception for any fault in the file.
        except Exception as error:
            raise ConfigError(f"{path} is not a readable tokenizer: {error}") from error
        return cls(tokenizer, bos_token)

    def encode(self, text: str, *, adds_bos: bool) -> TokenIds:
        """The ids of `text`, int32[n], never with two BOS at the start.

        Args:
            adds_bos: begin with BOS, if the tokenizer asks for it. A chat template has written it already.
        """
        (encoding,) = self._encode([text])
        ids = _as_array(encoding.ids)
        return ids if self.bos_id is None else self._with_one_bos(ids, self.bos_id, adds_bos)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        if len(ids) <= SHORT:
            text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        else:
            (text,) = self.tokenizer.decode_batch([ids], skip_special_tokens=False)
        return text

    def words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The ways to tokenise each of `words`, at the start of a text and within it; none of them empty."""
        spelled: list[str] = []
        for word in words:
            spelled += (word,) if word.startswith(" ") else (word, " " + word)
        found = [tuple(encoding.ids) for encoding in self._encode(spelled)]
        return [ids for ids in dict.fromkeys(found) if ids]

    def _encode(self, texts: list[str]) -> list[Any]:
        if sum(map(len, texts)) <= SHORT:
            return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        encodings: list[Any] = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return encodings

    def _with_one_bos(self, ids: TokenIds, bos_id: int, adds_bos: bool) -> TokenIds:
        others = np.flatnonzero(ids != bos_id)
        num_bos = int(others[0]) if len(others) else len(ids)
        if num_bos:
            return ids[num_bos - 1 :]
        return np.insert(ids, 0, bos_id) if self._adds_bos and adds_bos else ids


def _as_array(ids: list[int]) -> TokenIds:
    array = np.empty(len(ids), dtype=np.int32)
    for start in range(0, len(ids), CHUNK):
        array[start : start + CHUNK] = ids[start : start + CHUNK]
    return array


def _max_token_chars(tokenizer: Any) -> int:
    """An upper bound, from the longest token.

    A normalizer may shorten a text before it is cut into tokens (composition, dropped accents), by no more
    than a factor of four in scripts that people write.
    """
    longest = max((len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return longest if tokenizer.normalizer is None else 4 * longest


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not hold a JSON object.")
    return data
