"""Where chat templates run: jinja2's sandbox, and ways to stop a template that does not come to an end.

A template is a program from elsewhere: it comes with a model, or with a request. A thread cannot be stopped
from outside, so the program is made to look at the clock itself: at each turn of a loop and at each call a
function is called that the caller of the template has given, and what that raises ends the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The variable with the function to call. No name in a template can have a space in it.
CHECK = "check it"
# No chat template needs larger ones, and the time and memory for a single operation cannot be cut short.
MAX_INT_BITS = 4096
MAX_REPEATED = 1_000_000

_EACH, _ONCE = "check each", "check once"


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of all chat templates: what transformers offers them, within limits."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.filters["tojson"] = _tojson
        self.filters[_EACH] = _check_each
        self.filters[_ONCE] = _check_once
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _EACH, [], [], None, None, lineno=loop.lineno)
            if loop.recursive:
                # What it is called with within itself does not come by there.
                now = nodes.Filter(nodes.Const(None), _ONCE, [], [], None, None, lineno=loop.lineno)
                loop.body.insert(0, nodes.ExprStmt(now, lineno=loop.lineno))
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls something from within a template."""
        __context.parent[CHECK]()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplies, or raises to a power, unless the result would be huge."""
        if not _is_small(operator, left, right):
            raise SecurityError("the result of a multiplication is too large")
        return super().call_binop(context, operator, left, right)


def _is_small(operator: str, left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        if operator == "*":
            return left.bit_length() + right.bit_length() <= MAX_INT_BITS
        return left.bit_length() * abs(right) <= MAX_INT_BITS
    for times, repeated in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(repeated, "__len__"):
            return len(repeated) * times <= MAX_REPEATED
    return True


@pass_context
def _check_each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    check = context.parent[CHECK]
    for value in values:
        check()
        yield value


@pass_context
def _check_once(context: Context, _value: None) -> None:
    context.parent[CHECK]()


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
