"""Triton's interpreter, without work that it does twice."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


def quicken() -> None:
    """Nearly halve the time of kernels in the interpreter, where Triton is imported to use it."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    language: Any = sys.modules.get("triton.language")
    if language is None or not isinstance(language.sum, interpreter.InterpretedFunction):
        return
    tl = language.core

    # It puts its own functions in the language's place when a kernel begins, and once more, round
    # those, whenever one function of the kernel calls another.
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
        *args, **kwargs
    )
    # Each sum and product of integers is computed once more in 64 bits: a third of the time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

    # Made anew for every tensor and every operation.
    scalar_dtype = cache(interpreter._get_np_dtype)

    def numpy_dtype(type_: Any) -> Any:
        scalar = type_.scalar
        return uint64 if isinstance(scalar, tl.pointer_type) else scalar_dtype(scalar)

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        empty = tl.tensor.__new__(tl.tensor)
        plain_init(empty, None, tl.block_type(tl.int1, sizes) if sizes else tl.int1)
        return empty.shape, empty.numel

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(type.shape if type.is_block() else ())

    uint64 = interpreter._get_np_dtype(tl.pointer_type(tl.int8))
    plain_init = tl.tensor.__init__
    interpreter._get_np_dtype, tl.tensor.__init__ = numpy_dtype, init
    # Shapes are the same objects now, mostly.
    equal = tl.tuple.__eq__
    tl.tuple.__eq__ = lambda self, other: self is other or equal(self, other)
