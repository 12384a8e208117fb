"""Chat messages to prompt text, by the model's own jinja2 template in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from streamserve.errors import ConfigError, ContextTooLong, InvalidRequest
from streamserve.frontend.text.allowance import Allowance, size_of
from streamserve.frontend.text.sandbox import ALLOWANCE, Sandbox, num_static

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
    MemoryError,
)
# Stands at the end of a message that is to be continued, for the template may put anything behind it.
_OPEN_END = "<|end of the unfinished message|>"


def _never() -> None:
    """Lets a rendering take as long as it takes."""


Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given.

    Attributes:
        messages: role, content (text) and whatever else the template knows.
        add_generation_prompt: end with the start of an assistant's turn.
        continues_last: end within the last message, so that the answer goes on with it.
        documents: texts that the answer is to be based on.
        variables: further values for the template; none of `RESERVED`.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continues_last: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """The template's variables."""
        messages = list(self.messages)
        if self.continues_last:
            last = messages[-1]
            messages[-1] = {**last, "content": last["content"] + _OPEN_END}
        return {
            **self.variables,
            "messages": messages,
            "add_generation_prompt": self.add_generation_prompt and not self.continues_last,
            "tools": None,
            "documents": self.documents,
        }


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: jinja2 text.
        special_tokens: names the template may use (`bos_token`, `eos_token` …) and their text.

    Raises:
        ConfigError: the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = Sandbox()
        try:
            parsed = environment.parse(source)
            self._uses_documents = any(name.name == "documents" for name in parsed.find_all(nodes.Name))
            self._num_static = num_static(parsed)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"The chat template does not compile: line {error.lineno}: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise ConfigError("The chat template does not compile: it is nested too deeply.") from error
        self.special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, tokenizer_config: Mapping[str, Any], path: str | None = None) -> ChatTemplate:
        """The template of the model in `folder`, or ChatML if it has none.

        Args:
            path: a file to use instead.

        Raises:
            ConfigError: the template does not compile or cannot be read.
        """
        if path is not None:
            source = _read(Path(path))
            if source is None:
                raise ConfigError(f"--chat-template: there is no file {path}.")
        else:
            source = _read(folder / "chat_template.jinja") or _default(folder, tokenizer_config)
        return cls(CHATML if source is None else source, special_tokens(tokenizer_config))

    def render(self, conversation: Conversation, check: Check = _never, max_chars: int | None = None) -> str:
        """The prompt text of `conversation`.

        Args:
            check: called again and again meanwhile; what it raises ends the rendering. So a template that
                loops for ever can be stopped, which a thread cannot.
            max_chars: a longer text is given up.

        Raises:
            InvalidRequest: the template refuses the conversation or cannot handle it.
        """
        if conversation.documents is not None and not self._uses_documents:
            raise InvalidRequest("The chat template of this model does not use documents.", "documents")
        values = {**self.special_tokens, **conversation.values()}
        allowance = Allowance(check, size_of(values), self._num_static)
        try:
            text = self._generate({**values, ALLOWANCE: allowance}, check, max_chars)
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"The chat template refuses these messages: {error}", "messages") from error
        if not conversation.continues_last:
            return text
        end = text.rfind(_OPEN_END)
        if end < 0:
            raise InvalidRequest(
                "The chat template does not show the last message's text, so it cannot be continued.",
                "continue_final_message",
            )
        return text[:end]

    def _generate(self, values: dict[str, Any], check: Check, max_chars: int | None) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(values):
            check()
            num_chars += len(piece)
            if max_chars is not None and num_chars > max_chars:
                raise ContextTooLong(
                    f"The prompt has more than {max_chars} characters, too many for this model's context.",
                    "messages",
                )
            pieces.append(piece)
        return "".join(pieces)


def _default(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    found = tokenizer_config.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if not isinstance(found, list) or not all(_is_named_template(entry) for entry in found):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text, or a list of objects with a "
            "name and a template."
        )
    return {entry["name"]: entry["template"] for entry in found}.get("default")


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable text: {error}") from error


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, by name, as text."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        token = tokenizer_config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found
