"""Text to token ids, with the model folder's tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

from streamserve.errors import ConfigError


class PromptTokenizer:
    """Tokenises prompts. Safe to use from several threads at once.

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

    def encode(self, text: str, *, adds_bos: bool) -> npt.NDArray[np.int32]:
        """The ids of `text`, int32[n], never with two BOS at the start.

        Args:
            adds_bos: begin with BOS, if the tokenizer asks for it. A chat template has written it already.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.bos_id is not None:
            if self._adds_bos and adds_bos and ids[:1] != [self.bos_id]:
                ids = [self.bos_id, *ids]
            while len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
                ids = ids[1:]
        return np.asarray(ids, dtype=np.int32)

    def words(self, word: str) -> list[tuple[int, ...]]:
        """The ways to tokenise `word`, at the start of a text and within it; each at least one id long."""
        spelled = (word,) if word.startswith(" ") else (word, " " + word)
        found = [tuple(self.tokenizer.encode(text, add_special_tokens=False).ids) for text in spelled]
        return [ids for ids in dict.fromkeys(found) if ids]


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
