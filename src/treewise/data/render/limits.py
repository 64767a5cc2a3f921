"""Limits on what a chat template may compute: a template is a program, and one from others may never end.

transformers compiles and renders templates in Jinja's sandbox, which bounds `range` alone. Here the template that it
has compiled is compiled once more in a sandbox that counts: seconds, characters, and the size of what an operator, a
filter or a method of text makes, before it is made. Outside of `limited` nothing is counted.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 10.0  # of one conversation
MAX_CHARACTERS = 100_000_000
MAX_ITEMS = 10_000_000  # of a list
MAX_WIDTH = 100_000  # to which a text is padded, or an indentation
MAX_BITS = 100_000  # of an integer
_DIGITS = rf"\d{{{len(str(MAX_WIDTH)) + 1},}}"
_WIDE = re.compile(rf"%(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?{_DIGITS}|\{{[^{{}}]*:[^{{}}]*{_DIGITS}")  # widths of fields
_BY_VALUE = re.compile(r"%[-+ #0]*(?:\d*\.)?\*|\{[^{}]*:[^{}]*\{")  # that are values


class TemplateLimitError(Exception):
    """A template went beyond a limit; the message follows its name."""


@dataclass(slots=True)
class _Clock:
    deadline: float
    depth: int = 0


_clock: ContextVar[_Clock | None] = ContextVar("chat_template_clock", default=None)


@contextmanager
def limited(text: str) -> Iterator[None]:
    """Inside, what transformers renders of a chat template is limited, by the conversation.

    Raises:
        TemplateLimitError: it goes beyond a limit.
    """
    _limit(text)
    token = _clock.set(_Clock(time.monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _clock.reset(token)


def _limit(text: str) -> None:
    """Puts the limited template in the place of the one that transformers keeps for a text."""
    from transformers.utils import chat_template_utils

    _check_constants(text)
    compiled = chat_template_utils._compile_jinja_template(text)  # noqa: SLF001
    if not isinstance(compiled.environment, _Limited):
        compiled.__dict__.update(_Limited.of(compiled.environment).from_string(text).__dict__)


@lru_cache(maxsize=128)
def _check_constants(text: str) -> None:
    """Checks what Jinja computes of a text's constants while it compiles it, from the inside to the outside."""
    from transformers.utils import chat_template_utils

    plain = _Limited.of(chat_template_utils._compile_jinja_template("").environment)  # noqa: SLF001
    plain.intercepted_binops = frozenset()
    evaluation = nodes.EvalContext(plain)
    for node in reversed(list(plain.parse(text).find_all((nodes.BinExpr, nodes.Filter)))):
        try:
            if isinstance(node, nodes.BinExpr):
                check_operator(node.operator, node.left.as_const(evaluation), node.right.as_const(evaluation))
            else:
                node.as_const(evaluation)
        except nodes.Impossible as error:
            if isinstance(error.__cause__, TemplateLimitError):
                raise error.__cause__ from None


def tick() -> str:
    """Checks the time; in each turn of a loop and each call of a macro."""
    clock = _clock.get()
    if clock is not None and time.monotonic() > clock.deadline:
        raise TemplateLimitError(f"takes more than {MAX_SECONDS:g} seconds")
    return ""


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Checks the size of what `left operator right` makes. Raises `TemplateLimitError`."""
    if operator == "*":
        several, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(several, int) and isinstance(times, int):
            _check_bits(several.bit_length() + times.bit_length())
        elif isinstance(times, int) and hasattr(several, "__len__"):
            _check_size(several, len(several) * max(0, times))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(0, right))
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(left, len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_widths(left, right if isinstance(right, tuple) else (right,))


class _Generator(CodeGenerator):
    """Writes `~` with a check of its size."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Writes the parts, checked, as Jinja joins them."""
        self.write("markup_join" if frame.eval_ctx.autoescape and not frame.eval_ctx.volatile else "str_join")
        self.write("(environment.checked((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Limited(ImmutableSandboxedEnvironment):
    """transformers' sandbox with limits."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    @classmethod
    def of(cls, environment: Any) -> "_Limited":
        """A limited copy of an environment."""
        copy = object.__new__(cls)
        copy.__dict__.update(environment.__dict__)
        copy.filters = {name: _checked_filter(name, function) for name, function in environment.filters.items()}
        return copy

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        loops: list[Any] = list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in loops:
            attribute = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
            call = nodes.Call(attribute, [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return super()._generate(source, *args, **kwargs)

    tick = staticmethod(tick)

    def concat(self, pieces: Iterable[str]) -> str:
        """The pieces of a rendering, or of a macro, in one text."""
        clock = _clock.get()
        if clock is None:
            return "".join(pieces)
        if isinstance(pieces, GeneratorType) and not clock.depth:  # a conversation begins
            clock.deadline = time.monotonic() + MAX_SECONDS
        clock.depth += 1
        try:
            return "".join(self._counted(pieces))
        finally:
            clock.depth -= 1

    @staticmethod
    def _counted(pieces: Iterable[str]) -> Iterator[str]:
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise TemplateLimitError(f"makes more than {MAX_CHARACTERS:,} characters")
            tick()
            yield piece

    @staticmethod
    def checked(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `~` joins, as text."""
        texts = tuple(part if isinstance(part, str) else str(part) for part in parts)
        _check_size("", sum(map(len, texts)))
        return texts

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator whose size was checked."""
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a call; methods of text are checked."""
        if __obj is tick:
            return tick()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `str.format`
        holder, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(holder, str | bytes):
            args = (_held(args[0]), *args[1:]) if name == "join" and args else args
            _check_text(name, holder, (*args, *kwargs.values()), is_method=True)
        elif name == "generate_lorem_ipsum":
            _check_width((*args, *kwargs.values()), 1000)
        return super().call(__context, __obj, *args, **kwargs)


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks what it makes of a text."""
    passes = bool(getattr(function, "jinja_pass_arg", None))  # Jinja's context is the first argument

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[passes:]
        value = _held(value) if name == "join" else value
        _check_text(name, value, (*rest, *kwargs.values()))
        tick()
        result = function(*args[:passes], value, *rest, **kwargs)
        if isinstance(result, str | list):
            _check_size(result, len(result))
        return result

    return checked


def _held(items: Any) -> Any:
    """Items that can be counted before they are joined."""
    return items if hasattr(items, "__len__") else list(items)


def _check_text(name: str, value: Any, args: tuple[Any, ...], *, is_method: bool = False) -> None:
    """Checks what a filter or method of text of this name makes."""
    if name in ("format", "format_map", "format_string"):
        _check_widths(str(value), args)
    elif name in ("center", "ljust", "rjust", "zfill", "batch", "slice", "tojson"):
        _check_width(args, MAX_WIDTH if name != "tojson" else 100)
    elif name == "wordwrap":
        _check_size("", len(str(value)) * max((len(each) for each in args if isinstance(each, str)), default=1))
    elif name in ("expandtabs", "indent"):
        text = str(value)
        width = max((each if isinstance(each, int) else len(str(each)) for each in args), default=8)
        _check_size("", len(text) + max(0, width) * (text.count("\t" if name == "expandtabs" else "\n") + 1))
    elif name == "replace" and len(args) >= 2:
        whole, old, new = (each if isinstance(each, bytes) else str(each) for each in (value, *args[:2]))
        _check_size("", len(whole) + whole.count(old) * len(new))  # type: ignore[arg-type]
    elif name == "translate" and args and isinstance(args[0], dict):
        _check_size("", len(value) * max((len(str(each)) for each in args[0].values()), default=1))
    elif name == "join":
        items, between = (args[0], value) if is_method else (value, next(iter(args), ""))
        _check_size("", len(str(between)) * len(items))
        _check_size("", sum(len(str(item)) + len(str(between)) for item in items))


def _check_widths(text: str, values: tuple[Any, ...]) -> None:
    """Of a text with fields: their widths, which may be values."""
    if _WIDE.search(text):
        raise TemplateLimitError(f"pads a text to more than {MAX_WIDTH:,} characters")
    if _BY_VALUE.search(text):
        _check_width(values, MAX_WIDTH)


def _check_width(values: Iterable[Any], limit: int) -> None:
    if any(isinstance(value, int) and value > limit for value in values):
        raise TemplateLimitError(f"pads or repeats a text more than {limit:,} times")


def _check_size(kind: Any, size: int) -> None:
    limit, what = (MAX_CHARACTERS, "characters") if isinstance(kind, str | bytes) else (MAX_ITEMS, "items of a list")
    if size > limit:
        raise TemplateLimitError(f"makes more than {limit:,} {what}")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"computes a number of more than {MAX_BITS:,} bits")
