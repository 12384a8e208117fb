"""Where chat templates run: jinja2's sandbox, and ways to stop a template that does not come to an end.

A template is a program from elsewhere: it comes with a model, or with a request. A thread cannot be stopped
from outside, so the program is made to look at the clock itself: at each turn of a loop and at each call a
function is called that the caller of the template has given, and what that raises ends the template. What a
single operation would make is estimated before it is carried out (streamserve.frontend.text.allowance).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from streamserve.frontend.text import allowance
from streamserve.frontend.text.allowance import Allowance

# The variable with the rendering's `Allowance`. No name in a template can have a space in it.
ALLOWANCE = "allowance of this rendering"
# No chat template needs larger ones, and the time and memory for a single operation cannot be cut short.
MAX_INT_BITS = 4096
MAX_REPEATED = 1_000_000

# A part of a date padded to hundreds of characters or more.
_WIDE_DATE = re.compile(r"%[^a-zA-Z%]*[0-9]{3}")
_EACH, _ONCE, _JOINED = "check each", "check once", "joined"
# Web pages need them, prompts do not, and what they make is hard to tell.
_LEFT_OUT = ("urlize", "xmlattr")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of all chat templates: what transformers offers them, within limits."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = [loopcontrols, _GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_shown)
        self.filters["tojson"] = _tojson
        for name in _LEFT_OUT:
            del self.filters[name]
        for name, size in allowance.FILTER_SIZES.items():
            self.filters[name] = _within_allowance(self.filters[name], size)
        self.filters[_EACH] = _check_each
        self.filters[_ONCE] = _check_once
        self.filters[_JOINED] = _joined
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Concatenations().visit(super()._parse(source, name, filename))
        for loop in template.find_all(nodes.For):
            size = nodes.Const(num_static(loop))
            loop.iter = nodes.Filter(loop.iter, _EACH, [size], [], None, None, lineno=loop.lineno)
            if loop.recursive:
                # What it is called with within itself does not come by there.
                now = nodes.Filter(nodes.Const(None), _ONCE, [], [], None, None, lineno=loop.lineno)
                loop.body.insert(0, nodes.ExprStmt(now, lineno=loop.lineno))
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls something from within a template."""
        left = _allowance_of(__context)
        left.step(None if isinstance(__obj, Macro) else 0)
        # What the sandbox has in place of `format` and `format_map` wraps them.
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes):
            if name == "join":
                args = (list(args[0]),)
            left.admit((*args, *kwargs.values()))
            left.spend(allowance.method_size(owner, name, args, kwargs))
        elif isinstance(owner, int):
            for number in (*args, *kwargs.values()):
                allowance.check_count(number)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Adds, multiplies, raises to a power or fills in a pattern, unless the result would be huge."""
        if not _is_small(operator, left, right):
            raise SecurityError("the result of a multiplication is too large")
        if operator == "%" and isinstance(left, str | bytes):
            _allowance_of(context).admit((right,))
            _allowance_of(context).spend(allowance.percent_size(left, right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _allowance_of(context).spend(len(left) + len(right))
        elif operator == "*":
            _allowance_of(context).spend(_repeated(left, right))
        return super().call_binop(context, operator, left, right)


def num_static(node: nodes.Node) -> int:
    """Characters of text in a template, or in a part of it."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


class _Concatenations(NodeTransformer):
    """`a ~ b` is no operator that can be intercepted, so it becomes a filter."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


def _allowance_of(context: Context) -> Allowance:
    found: Allowance = context.parent[ALLOWANCE]
    return found


def _is_small(operator: str, left: Any, right: Any) -> bool:
    if operator not in ("*", "**"):
        return True
    if isinstance(left, int) and isinstance(right, int):
        if operator == "*":
            return left.bit_length() + right.bit_length() <= MAX_INT_BITS
        return left.bit_length() * abs(right) <= MAX_INT_BITS
    return _repeated(left, right) <= MAX_REPEATED


def _repeated(left: Any, right: Any) -> int:
    """The length of a sequence times a number; 0 of anything else."""
    for times, repeated in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(repeated, "__len__"):
            return int(len(repeated) * times)
    return 0


@pass_context
def _check_each(context: Context, values: Iterable[Any], num_static: int) -> Iterator[Any]:
    step = _allowance_of(context).step
    for value in values:
        step(num_static)
        yield value


@pass_context
def _check_once(context: Context, _value: None) -> None:
    _allowance_of(context).step()


@pass_context
def _joined(context: Context, parts: list[Any]) -> str:
    _allowance_of(context).admit(parts)
    return "".join(map(str, parts))


@pass_context
def _shown(context: Context, value: Any) -> Any:
    """Whatever a template shows comes by here."""
    _allowance_of(context).admit((value,))
    return value


def _within_allowance(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    """The filter `function`, while there is room for what it makes, which is `size` of its arguments."""
    # Which of its own objects jinja2 hands to it before the value.
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, Iterator):
            value = list(value)
        left = _allowance_of(context)
        left.admit((value, *args, *kwargs.values()))
        left.spend(size(value, *args, **kwargs))
        objects = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        head = (objects[passed],) if passed else ()
        return function(*head, value, *args, **kwargs)

    return bounded


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it an instance-less set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if _WIDE_DATE.search(format):
        raise SecurityError("no part of a date is that wide")
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
