"""Jinja2 for chat templates, which are code from the internet.

Set up as transformers sets it up, since templates are written against that: an immutable sandbox.
Here a meter bounds what compiling and rendering may take. Does not know messages or models.
Importing it imports Jinja2, which takes a tenth of a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.lexer import Token, TokenStream
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from markupsafe import Markup

from localrt.errors import TemplateError
from localrt.models.templates.costs import charge_method, filter_cost, test_cost
from localrt.models.templates.meter import METER, Meter, Steps
from localrt.models.templates.metered_code import FILTERED_ITEM, MeteredCodeGenerator
from localrt.models.templates.printf import spec_size

__all__ = ["SandboxedTemplate"]

_MAX_SOURCE = 250_000  # characters
_TOKEN = 1_800  # units of each token, while a template is compiled
_CODE = 16  # units of each character of the Python that it becomes
_FEW = 16  # arguments of a call
_LONGEST_REASON = 1_000  # characters of what a template says


class SandboxedTemplate:
    """A template ready to render; ``name`` is what an error calls it.

    Raises:
        TemplateError: not valid Jinja2, or too much of it.
    """

    def __init__(self, source: str, name: str) -> None:
        self._name = name
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the {name} is longer than {_MAX_SOURCE} characters")
        try:
            with _metered({}):
                self._template = _MeteredEnvironment().from_string(source)
            return
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {_one_line(error.message)}"
        except TemplateRuntimeError:
            reason = "it is too large to compile"
        except (RecursionError, MemoryError, IndentationError):
            reason = "it is nested too deeply"
        except Exception as error:  # noqa: BLE001 - Python's compiler refuses in many ways
            reason = _one_line(error.msg if isinstance(error, SyntaxError) else error)
        raise TemplateError(f"the {name} is not valid Jinja2: {reason}")

    def render(self, given: Mapping[str, Any]) -> str:
        """The text for the variables ``given``.

        Raises:
            TemplateError: the template refused them, failed, or takes too long or too much
                memory; its own words, on one line.
        """
        try:
            with _metered(given) as meter:
                context = self._template.new_context(dict(given))
                return meter.concat(self._template.root_render_func(context))
        except JinjaError as error:
            reason = error.message or type(error).__name__
        except RecursionError:
            reason = "it calls itself without end, or a value is nested too deeply"
        except AttributeError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - it is code from the internet: anything
            reason = f"{type(error).__name__}: {error}"
        raise TemplateError(f"the {self._name} refused the messages: {_one_line(reason)}")


@contextmanager
def _metered(given: Mapping[str, Any]) -> Iterator[Meter]:
    meter = Meter(given)
    token = METER.set(meter)
    try:
        yield meter
    finally:
        METER.reset(token)


class _GenerationTag(Extension):
    """``{% generation %}`` marks training targets; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that charges the current meter."""

    code_generator_class = MeteredCodeGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.globals = {
            "cycler": self.globals["cycler"],
            "dict": dict,
            "joiner": self.globals["joiner"],
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "range": self.globals["range"],
            "strftime_now": _strftime_now,
        }
        self.filters["tojson"] = _tojson
        self.filters = {name: _charged(name, found) for name, found in self.filters.items()}
        self.tests = {name: _charged_test(name, found) for name, found in self.tests.items()}
        self.tests[FILTERED_ITEM] = _looked_at

    @staticmethod
    def meter() -> Meter:
        """The meter of the render or the compilation that runs in this thread."""
        return METER.get()

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """``"".join(pieces)``, charged."""
        return METER.get().concat(pieces)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what a template calls."""
        meter = METER.get()
        if len(args) > _FEW or len(kwargs) > _FEW:
            meter.spend(32 * len(args) + 128 * len(kwargs))
        if type(__obj) is Macro:
            return super().call(__context, __obj, *args, **kwargs)
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str:  # its methods are safe, where they are in the table, and plain
            for added in _ADDED:
                kwargs.pop(added, None)
            charge_method(meter, owner, __obj.__name__, args, kwargs)
            return meter.took(__obj(*args, **kwargs), owner)
        if owner is not None:
            given = {name: item for name, item in kwargs.items() if name not in _ADDED}
            charge_method(meter, owner, getattr(__obj, "__name__", ""), args, given)
        elif __obj is dict or __obj is _Namespace:
            for item in args:
                meter.spend(meter.weigh(item))
        result = super().call(__context, __obj, *args, **kwargs)
        return meter.took(result, owner)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or an item of that name; a message's are looked up at once."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, each field of which is charged."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        formatter: SandboxedFormatter
        if isinstance(text, Markup):
            formatter = _EscapeFormatter(self, escape=text.escape)
        else:
            formatter = _Formatter(self)
        takes_mapping = value.__name__ == "format_map"

        @wraps(wrapped)
        def formatted(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                (kwargs,) = args
                args = ()
            shown: str = type(text)(formatter.vformat(text, args, kwargs))
            return shown

        return formatted

    def _tokenize(self, *args: Any, **kwargs: Any) -> TokenStream:
        stream = super()._tokenize(*args, **kwargs)
        return TokenStream(_counted(stream), stream.name, stream.filename)

    def _compile(self, source: str, filename: str) -> Any:
        METER.get().spend(_CODE * len(source))
        return super()._compile(source, filename)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_ADDED = ("_loop_vars", "_block_vars")  # by the compiled code to the arguments of every call


def _counted(stream: TokenStream) -> Iterator[Token]:
    meter = METER.get()
    for token in stream:
        meter.spend(_TOKEN)
        yield token


class _Namespace(Namespace):
    """``namespace()``; it is not shown by what is in it, which may be itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Formatter(SandboxedFormatter):
    """``str.format`` whose fields are charged."""

    def format_field(self, value: Any, format_spec: str) -> str:
        meter = METER.get()
        size = spec_size(format_spec)
        if isinstance(value, (str, int, float)):
            meter.afford(4 * (size + len(value) if isinstance(value, str) else size))
        else:
            meter.afford(10 * meter.weigh(value) + size)
        text: str = super().format_field(value, format_spec)
        return meter.show(text)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            meter = METER.get()
            meter.afford(10 * meter.weigh(value))
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """``Markup.format`` whose fields are charged."""


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``function``, charged before and after it runs."""
    cost = filter_cost(name)
    if cost is None:
        return function
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        value = cost(meter, *args[first:], **kwargs)
        result = function(*args[:first], value, *args[first + 1 :], **kwargs)
        if type(result) is GeneratorType:
            return Steps(meter, result, 32)
        return meter.took(result, value)

    return _quick_trim(charged) if name == "trim" else charged


def _quick_trim(trim: Callable[..., Any]) -> Callable[..., Any]:
    """``trim`` with a short way for what most templates do to every message."""

    def quick(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is str and not args and not kwargs:
            return METER.get().took(value.strip(), value)
        return trim(value, *args, **kwargs)

    return quick


def _charged_test(name: str, function: Any) -> Any:
    cost = test_cost(name)
    if cost is None:
        return function
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def charged(*args: Any) -> Any:
        cost(METER.get(), *args[first:])
        return function(*args)

    return charged


def _looked_at(value: Any) -> bool:
    METER.get().spend(64)
    return bool(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object = "") -> NoReturn:
    raise JinjaError(METER.get().show(message))


def _strftime_now(layout: str) -> str:
    METER.get().afford(256 * len(layout))  # Python gives up on what is longer than that
    return datetime.now().strftime(layout)


def _one_line(text: object) -> str:
    line = " ".join(str(text)[: 4 * _LONGEST_REASON].split())
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."
