"""Chat messages to prompt text, by the model's own jinja2 template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamserve.errors import ConfigError, InvalidRequest

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})

# Whatever foreign template code may do wrong with the caller's messages.
_RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: jinja2 text.
        special_tokens: names the template may use (`bos_token`, `eos_token` …) and their text.

    Raises:
        ConfigError: the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"The chat template does not compile: line {error.lineno}: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
        """The template of the model in `folder`, or ChatML if it has none.

        Raises:
            ConfigError: the template does not compile or cannot be read.
        """
        path = folder / "chat_template.jinja"
        source: Any = tokenizer_config.get("chat_template")
        try:
            source = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not readable text: {error}") from error
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return cls(source if isinstance(source, str) else CHATML, special_tokens(tokenizer_config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`.

        Args:
            messages: role, content (text) and whatever else the template knows.
            add_generation_prompt: end with the start of an assistant's turn.
            variables: further values for the template; none of `RESERVED`.

        Raises:
            InvalidRequest: the template refuses the messages or cannot handle them.
        """
        values = {**self._special_tokens, **(variables or {})}
        try:
            return self._template.render(
                values,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"The chat template refuses these messages: {error}", "messages") from error


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, by name, as text."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        token = tokenizer_config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it an instance-less set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own filter, which escapes for HTML: models are trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
