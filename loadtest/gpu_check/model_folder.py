"""Folders of models whose weights are made up when they are loaded, with a tokenizer as large as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """All that a worker needs; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return folder


def write_served(folder: Path, config: Mapping[str, Any]) -> Path:
    """All that a server needs; returns `folder`.

    A word for each id of the vocabulary, so that every token that the model comes up with is text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {f"Ġw{index}": index for index in range(int(config["vocab_size"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    write_config(folder, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prompt_of(first: int, num_tokens: int, vocab_size: int) -> str:
    """A text of as many tokens, which differs with `first`."""
    return " ".join(f"w{(first * 7919 + place) % vocab_size}" for place in range(num_tokens))
