from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamserve.errors import ConfigError, ContextTooLong, InvalidRequest
from streamserve.frontend.text.template import CHATML, ChatTemplate, Conversation, special_tokens

HELLO = [{"role": "user", "content": "hi"}]


HELLO_THERE = Conversation(HELLO)


def render(source: str, messages: list[dict[str, Any]] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(Conversation(messages, **options))


def test_chatml_is_the_default(tmp_path: Path) -> None:
    text = ChatTemplate.load(tmp_path, {}).render(HELLO_THERE)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == render(CHATML)


def test_no_generation_prompt() -> None:
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_jinja_file_goes_before_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    config = {"chat_template": "config", "bos_token": {"content": "<b>", "special": True}}
    assert ChatTemplate.load(tmp_path, config).render(HELLO_THERE) == "<b>file"


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert ChatTemplate.load(tmp_path, {"chat_template": named}).render(HELLO_THERE) == "plain"


@pytest.mark.parametrize(
    "found",
    [
        [1, 2],
        5,
        {"default": "plain"},
        ["plain"],
        [{"name": "default"}],
        [{"name": [], "template": "plain"}],
        [{"name": "default", "template": ["plain"]}],
    ],
)
def test_a_chat_template_that_is_no_text_is_the_operators_error(tmp_path: Path, found: Any) -> None:
    complaint = "chat_template must be text, or a list of objects with a name and a template"
    with pytest.raises(ConfigError, match=complaint) as caught:
        ChatTemplate.load(tmp_path, {"chat_template": found})
    assert str(tmp_path / "tokenizer_config.json") in str(caught.value)


@pytest.mark.parametrize("found", [None, [], [{"name": "tool_use", "template": "tools"}]])
def test_without_a_default_template_it_is_chatml(tmp_path: Path, found: Any) -> None:
    assert ChatTemplate.load(tmp_path, {"chat_template": found}).render(HELLO_THERE) == render(CHATML)


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
        "{{ 9 ** 9999999 }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [1] * 10 ** 9 }}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_cannot_do_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


# Each would make gigabytes, or take minutes, in an operation that cannot be cut short.
BOMBS = [
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "{% set ns = namespace(x='x' * 100000) %}{{ ('{0.x}' * 100000).format(ns) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ ['x'] | map('center', 1000000000) | join }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.rjust(1000000000, '-') }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ 'x'.encode().center(1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "{{ ('y' * 100000).join(['x'] * 100000) }}",
    "{{ (['x'] * 100000) | join('y' * 100000) }}",
    "{{ range(99999) | join('y' * 100000) }}",
    "{{ ('\n' * 100000) | indent(100000) }}",
    "{{ ('x' * 100000) | wordwrap(1, true, 'y' * 100000) }}",
    "{{ [1] | batch(1000000000, 0) | list }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{{ 1 | round(1000000000, 'floor') }}",
    "{{ 1 | round(-1000000000) }}",
    "{{ ([[1] * 1000] * 10000) | sum(start=[]) | length }}",
    "{{ lipsum(n=100000000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ ['x' * 1000000] * 1000000 }}",
    "{{ ([['x' * 1000] * 1000] * 1000) | string | length }}",
    "{{ ([['x' * 1000] * 1000] * 1000) | tojson | length }}",
    "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set big = 'x' * 1000000 %}{% set x %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    "{% set x %}{% for i in range(99999) %}" + "static" * 10_000 + "{% endfor %}{% endset %}",
    "{% macro f() %}" + "static" * 10_000 + "{% endmacro %}"
    "{% set x %}{% for i in range(99999) %}{{ f() }}{% endfor %}{% endset %}",
    "{% set n = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set n.x = n.x + ['x' * 1000000] %}{% endfor %}",
    "{{ strftime_now('%1000000000Y') }}",
]


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_what_would_be_huge_is_not_made(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ ['b'] }}", "a1None['b']"),
        ("{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 1 + 2 }}{{ 7 % 4 }}", "ab[1, 2]33"),
        ("{{ '%s is %05.1f' % ('x', 1.25) }}", "x is 001.2"),
        ("{{ '%(a)s' % {'a': 1} }}{{ '%s-%s' | format('a', 'b') }}", "1a-b"),
        ("{{ '{:>5}|{x:.2f}'.format('a', x=0.5) }}", "    a|0.50"),
        ("{{ 'x' | center(5) }}{{ 'x'.ljust(3) }}|", "  x  x  |"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        (
            "{{ ', '.join(['a', 'b']) }}{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '+') }}",
            "a, ba+ba+b",
        ),
        ("{{ 'a\nb' | indent(2) }}{{ 'abc def' | wordwrap(3) }}", "a\n  babc\ndef"),
        ("{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]][[1, 2], [3]]"),
        ("{{ 2.5678 | round(2) }}{{ [1, 2] | sum }}{{ [{'a': 2}] | sum(attribute='a') }}", "2.5732"),
        ("{{ ' aB ' | trim | upper | lower | title | capitalize }}", "Ab"),
        (
            "{{ 'x' * 3 }}{{ [1] * 2 }}{{ 'a b'.split() }}{{ 'abcdef' | truncate(4, true, '', 0) }}",
            "xxx[1, 1]['a', 'b']abcd",
        ),
        ("{{ '<&>' | e }}{{ 'a b' | urlencode }}{{ 'a b' | wordcount }}", "&lt;&amp;&gt;a%20b2"),
        ("{{ [1, 'é'] | tojson(indent=1, separators=(',', ':')) }}", '[\n 1,\n "é"\n]'),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
    ],
)
def test_text_is_made_as_ever(source: str, text: str) -> None:
    assert render(source) == text


def test_a_long_conversation_has_room_for_what_templates_do_with_it() -> None:
    messages = [
        {"role": "user", "content": "x" * 50_000},
        {"role": "assistant", "content": "y" * 50_000},
    ] * 50
    source = (
        "{% set ns = namespace(text='') %}"
        "{% for m in messages %}{% set ns.text = ns.text ~ m.role + ': ' + m.content | trim + '\n' %}"
        "{% endfor %}{{ ns.text | replace('x', 'zz') }}"
    )
    assert len(render(source, messages)) > 7_500_000


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


class Enough(Exception):
    pass


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}",
        "{% for i in range(99999) if range(99999) | list | length == 0 %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_can_be_ended(source: str) -> None:
    num_calls = 0

    def check() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1000:
            raise Enough

    with pytest.raises(Enough):
        ChatTemplate(source, {}).render(HELLO_THERE, check)


def test_loops_know_their_place() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
        "{{ loop.previtem.role if loop.previtem }}{% else %}none{% endfor %}"
    )
    assert render(source, HELLO * 2) == "1/2,2/2.user"
    assert render(source, []) == "none"


def test_a_text_that_gets_too_long_is_given_up() -> None:
    template = ChatTemplate("{% for i in range(1000) %}0123456789{% endfor %}", {})
    assert len(template.render(HELLO_THERE, max_chars=10_000)) == 10_000
    with pytest.raises(ContextTooLong, match="9999 characters"):
        template.render(HELLO_THERE, max_chars=9_999)


@pytest.mark.parametrize("content", ["Once upon a time  ", "", "  a\n", "x<|im_end|>"])
def test_the_last_message_can_be_continued(content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, messages, continues_last=True) == start + content


def test_a_trimmed_message_is_continued_where_it_ends() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(source, [{"role": "assistant", "content": " a b "}], continues_last=True) == "[a b "


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ messages[0].role }}", continues_last=True)
    assert caught.value.param == "continue_final_message"


def test_documents_go_to_templates_that_use_them() -> None:
    documents = [{"title": "t", "text": "x"}]
    assert render("{% for d in documents or [] %}{{ d.text }}{% endfor %}", documents=documents) == "x"
    with pytest.raises(InvalidRequest) as caught:
        render(CHATML, documents=documents)
    assert caught.value.param == "documents"


def test_the_operators_file_goes_before_all(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("model")
    (tmp_path / "mine.jinja").write_text("mine")
    assert ChatTemplate.load(tmp_path, {}, str(tmp_path / "mine.jinja")).render(HELLO_THERE) == "mine"
    with pytest.raises(ConfigError, match="--chat-template"):
        ChatTemplate.load(tmp_path, {}, str(tmp_path / "none.jinja"))


def test_templates_nested_too_deeply_do_not_compile() -> None:
    with pytest.raises(ConfigError):
        ChatTemplate("{% if x %}" * 3000 + "{% endif %}" * 3000, {})
    with pytest.raises(ConfigError):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})
