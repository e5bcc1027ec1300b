"""The sandbox of chat templates: Jinja2, configured as in transformers, in a process of its own.

Chat templates are code from the internet. Jinja2's immutable sandbox renders them in a process that
``sandbox.py`` starts, and that imports only Jinja2; its 12 MB count as this process's. It reads one
request per line and answers each with a line. It limits itself by the kernel: to a second of CPU
time and 128 MB, and more in proportion to its input. On Linux it has no network, starts no program
and no thread, and opens no files but Python's. MiniJinja's fuel was tried instead: it rendered 19
of 275 published cases differently, and took minutes to compare, show and add nested lists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import NoReturn

from jinja2 import Template, TemplateSyntaxError
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localrt.system.confined import confine, limiter

_SECONDS = 1.0  # CPU time of a request, so that a busy machine refuses nothing; then by its bytes
_SECONDS_PER_BYTE = 2e-6
_NBYTES = 128 << 20  # memory, likewise
_NBYTES_PER_BYTE = 40
_CHARACTERS = 4 << 20  # of the rendered text, likewise
_CHARACTERS_PER_BYTE = 4
_LONGEST_REASON = 1_000  # characters of an error message
_COMPILED = 16  # cached templates


def answer(source: str, variables: Mapping[str, object] | None, size: int) -> dict[str, str]:
    """Render the template with ``variables``, as ``text``; None only checks the template.

    Instead, ``invalid`` says why the template is not valid, ``refused`` why rendering failed. The
    longest text allowed depends on ``size``, the bytes of the request.
    """
    try:
        template = _compiled(source)
    except TemplateSyntaxError as error:
        return {"invalid": f"line {error.lineno}: {_one_line(error.message)}"}
    except (RecursionError, IndentationError):
        return {"invalid": "it is nested too deeply"}
    except Exception as error:  # noqa: BLE001 - Python's compiler raises many types of errors
        return {"invalid": _one_line(error.msg if isinstance(error, SyntaxError) else error)}
    if variables is None:
        return {"text": ""}
    room = _CHARACTERS + _CHARACTERS_PER_BYTE * size
    pieces = []
    try:
        for piece in template.generate(dict(variables)):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                return {"refused": "it writes too much"}
        return {"text": "".join(pieces)}
    except JinjaError as error:
        reason = error.message or type(error).__name__
    except RecursionError:
        reason = "it calls itself without end, or a value is nested too deeply"
    except AttributeError as error:
        reason = str(error)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - it is code from the internet: anything
        reason = f"{type(error).__name__}: {error}"
    return {"refused": _one_line(reason)}


@lru_cache(_COMPILED)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # compute nothing while compiling
        extensions=[LoopControlExtension, _GenerationTag],
    )
    environment.filters |= {"tojson": _tojson, "from_json": json.loads}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks training targets; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object = "") -> NoReturn:
    raise JinjaError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _one_line(text: object) -> str:
    shown = str(text)[: 4 * _LONGEST_REASON]
    line = " ".join("".join(c if c.isprintable() else " " for c in shown).split())
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    """Answer requests on stdin until it closes."""
    _environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the parent process
    limit = limiter()
    datetime.now().astimezone()  # reads the time zone, which it cannot later
    confine(sys.path)
    for line in sys.stdin.buffer:
        size = len(line)
        limit(_NBYTES + _NBYTES_PER_BYTE * size, _SECONDS + _SECONDS_PER_BYTE * size)
        try:
            request = json.loads(line)
            variables = answer(request["source"], request["variables"], size)
            found = json.dumps(variables, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(1)
        sys.stdout.buffer.write(found + b"\n")
        sys.stdout.buffer.flush()
