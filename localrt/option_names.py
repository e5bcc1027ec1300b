"""Options named in messages, spelled as the reader knows them.

A message is written far from its reader. Where it names an option it calls ``option``, which writes
the Python spelling between marks that no terminal shows. Who shows the message spells it anew:
``ctx=512`` in Python, ``--ctx 512`` on the command line, ``/set ctx 512`` in the app. Knows no
option's meaning.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable

__all__ = ["Spelling", "flag_value", "on_command_line", "option", "python_option", "spelled"]

# An option's name, and its value or None, as one kind of reader writes them.
Spelling = Callable[[str, object], str]

_MARK = "\N{WORD JOINER}"
_MARKED = re.compile(f"{_MARK}([a-z_]+)(?:=([^{_MARK}]*))?{_MARK}")


def option(name: str, value: object = None) -> str:
    """An option by its Python name, and its value where the message gives one."""
    return f"{_MARK}{python_option(name, value)}{_MARK}"


def spelled(text: str, spelling: Spelling) -> str:
    """A message with every option as ``spelling`` writes it."""

    def respelled(found: re.Match[str]) -> str:
        return spelling(found[1], None if found[2] is None else ast.literal_eval(found[2]))

    return _MARKED.sub(respelled, text) if _MARK in text else text


def python_option(name: str, value: object) -> str:
    """``ctx=512``, ``ram="2GB"``; without a value ``ctx``."""
    if value is None:
        return name
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return f"{name}={text}"


def on_command_line(name: str, value: object) -> str:
    """``--ctx 512``, ``--kv-format``; what has no flag is spelled as in Python."""
    if name in _NO_FLAGS:
        return python_option(name, value)
    flag = "--" + _FLAGS.get(name, name).replace("_", "-")
    return flag if value is None else f"{flag} {flag_value(value)}"


def flag_value(value: object) -> str:
    """A value as it is typed behind an option's name: ``on``, ``512``, ``'two words'``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return shlex.quote(str(value))


# Flags that are called otherwise than their options in Python, and options without a flag.
_FLAGS = {
    "adapters": "adapter",
    "dry_sequence_breakers": "dry_sequence_breaker",
    "drain_s": "drain",
    "long_prompt_tokens": "long_prompt",
}
_NO_FLAGS = frozenset(
    {
        *("ignore_eos", "line_seconds", "logit_bias", "logprobs", "min_indent"),
        *("token_ids", "tool_choice", "tree_depth"),
    }
)
