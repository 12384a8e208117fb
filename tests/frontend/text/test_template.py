from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamserve.errors import ConfigError, InvalidRequest
from streamserve.frontend.text.template import CHATML, ChatTemplate, special_tokens

HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_chatml_is_the_default(tmp_path: Path) -> None:
    text = ChatTemplate.load(tmp_path, {}).render(HELLO)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == render(CHATML)


def test_no_generation_prompt() -> None:
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_jinja_file_goes_before_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    config = {"chat_template": "config", "bos_token": {"content": "<b>", "special": True}}
    assert ChatTemplate.load(tmp_path, config).render(HELLO) == "<b>file"


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert ChatTemplate.load(tmp_path, {"chat_template": named}).render(HELLO) == "plain"


def test_blocks_are_trimmed_and_loops_can_be_left() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}"
    )
    assert render(source, HELLO * 3) == "user\n"


def test_generation_blocks_are_their_content() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_tojson_does_not_escape_for_html() -> None:
    assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": "<é>"}]) == (
        '{"role": "user", "content": "<é>"}'
    )
    assert json.loads(render("{{ messages | tojson(indent=2) }}")) == HELLO


def test_the_date_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_variables_reach_the_template() -> None:
    assert render("{{ mood }}{{ bos_token }}", variables={"mood": "calm"}) == "calm<s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('System role not supported') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.attribute }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_cannot_do_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_templates_own_message_is_told() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_compile_is_the_operators_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="chat_template"):
        ChatTemplate.load(tmp_path, {})


def test_special_tokens_by_name() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "other_token": "x"}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}
