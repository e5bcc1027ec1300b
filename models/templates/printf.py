"""How long a text that is made from a format can become."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["printf_size", "spec_size"]

_FIELD = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
_NUMBER = re.compile(r"\d+")
_MOST_DIGITS = 9  # of a width; Python refuses longer ones itself


def printf_size(text: Any, values: Any, largest: int) -> int:
    """A bound on the bytes of ``text % values``, where no value takes over ``largest``."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if not isinstance(text, str):
        return 0
    size = len(text)
    if "%(" in text:  # names may hold parentheses themselves: every number counts as a width
        return 4 * (size + largest * text.count("%") + spec_size(text))
    for field in _FIELD.finditer(text):
        size += largest
        for width in field.groups():
            if width == "*":
                size += _widest(values)
            elif width:
                size += int(width[:_MOST_DIGITS])
    return 4 * size


def spec_size(spec: str) -> int:
    """A bound on the characters that the format ``spec`` adds to a value."""
    return sum(int(number[:_MOST_DIGITS]) for number in _NUMBER.findall(spec))


def _widest(values: Any) -> int:
    items = values if isinstance(values, tuple) else (values,)
    return max((abs(item) for item in items if isinstance(item, int)), default=0)
