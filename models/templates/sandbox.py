"""Jinja2 for chat templates, which are code from the internet.

Set up as transformers sets it up, since templates are written against that: an immutable sandbox,
with bounds on what one operation may compute. Does not know messages or models.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from localrt.errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["compile_template"]

_MAX_REPEATED = 10_000_000  # characters or items that one multiplication may produce
_MAX_POWER_BITS = 100_000


def compile_template(source: str, name: str) -> Template:
    """A template ready to render; ``name`` is what an error calls it.

    Raises:
        TemplateError: not valid Jinja2.
    """
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {' '.join(str(error.message).split())}"
    except RecursionError:
        reason = "it is nested too deeply"
    raise TemplateError(f"the {name} is not valid Jinja2: {reason}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja2 as transformers sets it up, since templates are written against that."""
    from jinja2.exceptions import SecurityError
    from jinja2.exceptions import TemplateError as JinjaError
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """``{% generation %}`` marks training targets; here it only shows its body."""

        tags = {"generation"}  # noqa: RUF012 - the base class has it so

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """A sandbox in which no single operation can take all memory."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*" and _repeats(left, right) > _MAX_REPEATED:
                raise SecurityError("a repetition in the template is too large")
            if operator == "**" and _power_bits(left, right) > _MAX_POWER_BITS:
                raise SecurityError("a power in the template is too large")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: object) -> NoReturn:
        raise JinjaError(str(message))

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _repeats(left: object, right: object) -> int:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            return len(value) * count
    return 0


def _power_bits(base: object, exponent: object) -> int:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * max(exponent, 0)
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
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


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
