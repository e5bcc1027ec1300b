"""Triton's interpreter, without work that it does twice."""

from __future__ import annotations

import sys
from typing import Any


def quicken() -> None:
    """Call a kernel's functions as they are, where Triton has been imported.

    The interpreter puts its own functions in the language's place when a kernel begins, and once
    more, round those, whenever one function of the kernel calls another.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
            *args, **kwargs
        )
