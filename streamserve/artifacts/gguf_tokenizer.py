"""GGUF tokenizer keys → tokenizer.json and tokenizer_config.json.

Two families: `gpt2` is byte-level BPE, whose rule for cutting text into words GGUF names but does not hold
(`tokenizer.ggml.pre`); `llama` is SentencePiece BPE, where scores stand for the merges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from streamserve.artifacts.gguf_metadata import GgufMetadata, one_line

_SPACE = "\u2581"

# Contractions, words, numbers, punctuation, whitespace: as Llama 3 and Qwen 2 cut text. They differ in how
# many digits stand together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type` that matter here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _WordRule:
    """How a byte-level tokenizer cuts text before BPE.

    Attributes:
        pre_tokenizer: makes the pre-tokenizer.
        nfc: text is first brought to Unicode normal form C.
        whole_words: a word that is a token is taken as it is, without merging.
        bos_by_default: a beginning-of-sequence token is added unless the file says otherwise.
    """

    pre_tokenizer: Callable[[], Any]
    nfc: bool = False
    whole_words: bool = False
    bos_by_default: bool = False


def _gpt2_words() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm_words() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _regex_words(digits: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = _WordRule(_gpt2_words)
_WORD_RULES: Mapping[str, _WordRule] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _WordRule(_smollm_words),
    "llama-bpe": _WordRule(lambda: _regex_words("{1,3}"), whole_words=True, bos_by_default=True),
    "qwen2": _WordRule(lambda: _regex_words(""), nfc=True),
}


def build_tokenizer(metadata: GgufMetadata) -> Any:
    """The `tokenizers.Tokenizer` that the file describes.

    Raises:
        ConfigError: the tokenizer is of a family or cuts words by a rule that is not known here.
    """
    from tokenizers import AddedToken

    family = metadata.tokenizer("ggml.model")
    if family == "gpt2":
        tokenizer = _byte_level_bpe(metadata)
    elif family == "llama":
        tokenizer = _sentencepiece_bpe(metadata)
    else:
        raise metadata.error(f"tokenizers of type {family} are not supported; use the model's own folder.")
    special, plain = [], []
    tokens = metadata.tokenizer("ggml.tokens")
    for token, kind in zip(tokens, metadata.tokenizer("ggml.token_type", ()), strict=False):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    _frame_sequences(tokenizer, metadata)
    return tokenizer


def tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    add_bos, add_eos = _added_ends(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(metadata.model("context_length")),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, role in roles.items():
        token = _token(metadata, role)
        if token is not None:
            config[name] = token
    template = metadata.tokenizer("chat_template", None)
    if template is not None:
        config["chat_template"] = template
    return config


def _byte_level_bpe(metadata: GgufMetadata) -> Any:
    from tokenizers import decoders, normalizers

    rule = _word_rule(metadata)
    vocabulary = _vocabulary(metadata)
    merges = []
    for merge in metadata.tokenizer("ggml.merges"):
        left, _, right = merge.partition(" ")
        # The library reports some of these, and panics over others.
        if not vocabulary.keys() >= {left, right, left + right}:
            raise metadata.error(
                f"the GGUF file is damaged: not all of its merge {merge!r} is in its tokens."
            )
        merges.append((left, right))
    tokenizer = _bpe(metadata, vocabulary, merges, ignore_merges=rule.whole_words)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: GgufMetadata) -> Any:
    from tokenizers import decoders, normalizers

    vocabulary = _vocabulary(metadata)
    merges = _merges_from_scores(vocabulary, metadata.tokenizer("ggml.scores"))
    tokenizer = _bpe(
        metadata,
        vocabulary,
        merges,
        unk_token=_token(metadata, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.tokenizer("ggml.add_space_prefix", True))
    spaces = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _bpe(
    metadata: GgufMetadata, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> Any:
    from tokenizers import Tokenizer, models

    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    # The library raises bare Exception for any fault in the tables.
    except Exception as error:
        raise metadata.error(f"the GGUF file is damaged: no tokenizer ({one_line(error)}).") from error


def _merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merge list under which BPE joins pieces in the order of their scores, best first.

    SentencePiece joins the neighbours whose union scores best, however that union is cut, so every cut of a
    piece into two pieces is a merge with the piece's own rank.
    """
    ranked = sorted(vocabulary, key=lambda piece: (-scores[vocabulary[piece]], vocabulary[piece]))
    return [
        (piece[:at], piece[at:])
        for piece in ranked
        for at in range(1, len(piece))
        if piece[:at] in vocabulary and piece[at:] in vocabulary
    ]


def _frame_sequences(tokenizer: Any, metadata: GgufMetadata) -> None:
    """Lets the tokenizer add the beginning and end tokens that the model was trained with."""
    from tokenizers import processors

    add_bos, add_eos = _added_ends(metadata)
    bos = [_token(metadata, "bos")] if add_bos else []
    eos = [_token(metadata, "eos")] if add_eos else []
    added = dict.fromkeys(bos + eos)
    if added:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{t}:1" for t in eos)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in added],
        )


def _added_ends(metadata: GgufMetadata) -> tuple[bool, bool]:
    """Whether a beginning and an end token are added to a sequence."""
    is_sentencepiece = metadata.tokenizer("ggml.model") == "llama"
    default = is_sentencepiece or _word_rule(metadata).bos_by_default
    add_bos = bool(metadata.tokenizer("ggml.add_bos_token", default))
    add_eos = bool(metadata.tokenizer("ggml.add_eos_token", False))
    return add_bos and _token(metadata, "bos") is not None, add_eos and _token(metadata, "eos") is not None


def _word_rule(metadata: GgufMetadata) -> _WordRule:
    name = metadata.tokenizer("ggml.pre", "default")
    if name not in _WORD_RULES:
        raise metadata.error(
            f"its pre-tokenizer {name!r} is not supported (known: {', '.join(sorted(_WORD_RULES))}); "
            "use the model's own folder."
        )
    return _WORD_RULES[name]


def _vocabulary(metadata: GgufMetadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata.tokenizer("ggml.tokens"))}


def _token(metadata: GgufMetadata, role: str) -> str | None:
    index = metadata.token_id(role)
    tokens: Sequence[str] = metadata.tokenizer("ggml.tokens")
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None
