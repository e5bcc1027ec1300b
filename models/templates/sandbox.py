"""Jinja2 for chat templates, which are code from the internet.

Set up as transformers sets it up, since templates are written against that: an immutable sandbox,
with bounds on what one operation may compute. Does not know messages or models. Importing it
imports Jinja2, which takes a tenth of a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localrt.errors import TemplateError

__all__ = ["SandboxedTemplate"]

_MAX_REPEATED = 10_000_000  # characters or items that one multiplication may produce
_MAX_POWER_BITS = 100_000


class SandboxedTemplate:
    """A template ready to render; ``name`` is what an error calls it.

    Raises:
        TemplateError: not valid Jinja2.
    """

    def __init__(self, source: str, name: str) -> None:
        self._name = name
        try:
            self._template = _environment().from_string(source)
            return
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {_one_line(error.message)}"
        except RecursionError:
            reason = "it is nested too deeply"
        raise TemplateError(f"the {name} is not valid Jinja2: {reason}")

    def render(self, given: Mapping[str, Any]) -> str:
        """The text for the variables ``given``.

        Raises:
            TemplateError: the template refused them or failed; its own words, on one line.
        """
        try:
            return self._template.render(given)
        except JinjaError as error:
            reason = error.message or type(error).__name__
        except RecursionError:
            reason = "it calls itself without end"
        except (ArithmeticError, LookupError, TypeError, ValueError, MemoryError) as error:
            reason = f"{type(error).__name__}: {error}"
        except AttributeError as error:
            reason = str(error)
        raise TemplateError(f"the {self._name} refused the messages: {_one_line(reason)}")


class _GenerationTag(Extension):
    """``{% generation %}`` marks training targets; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no single operation can take all memory."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and _repeats(left, right) > _MAX_REPEATED:
            raise SecurityError("a repetition in the template is too large")
        if operator == "**" and _power_bits(left, right) > _MAX_POWER_BITS:
            raise SecurityError("a power in the template is too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise JinjaError(str(message))


def _repeats(left: object, right: object) -> int:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            return len(value) * count
    return 0


def _power_bits(base: object, exponent: object) -> int:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * max(exponent, 0)
    return 0


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
