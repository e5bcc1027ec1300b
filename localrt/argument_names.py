"""A public function that says which argument was meant by one that it does not have.

Python's own message names the wrong argument alone. Knows no function's meaning.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from localrt.errors import OptionError
from localrt.option_names import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")


def known_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, which raises ``OptionError`` with a name that may have been meant."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: _P.args, **options: _P.kwargs) -> _R:
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            hint = did_you_mean(unknown, known) or f"known: {', '.join(known)}"
            raise OptionError(f"{function.__name__} has no argument {unknown!r:.60}: {hint}")
        return function(*args, **options)

    return checked
