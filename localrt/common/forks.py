"""Keeps a forked child from using what its parent has opened: methods raise an error there.

A child has none of its parent's threads, locks that may be held for ever, and the same open files.
Using, closing or freeing an object could hang there, or change what the parent works with.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from localrt.common.errors import LocalrtError

Kind = TypeVar("Kind", bound=type)
T = TypeVar("T")

_ENDS = ("cancel", "cancel_all", "close", "unload")
_objects: weakref.WeakSet[Any] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def of_one_process(what: str, do: str = "open") -> Callable[[Kind], Kind]:
    """Class decorator: in a forked child, methods that end the object do nothing, and other public
    ones raise an error, which names ``what`` and says to ``do`` it again.
    """
    error = f"{what} does not survive a fork: {do} it in the child process"

    def guard(kind: Kind) -> Kind:
        for name, method in list(vars(kind).items()):
            if name == "__init__":
                setattr(kind, name, _noting(method))
            elif inspect.isfunction(method) and (name == "__next__" or name[0] != "_"):
                setattr(kind, name, _guarded(method, error, ends=name in _ENDS))
        return kind

    return guard


def _noting(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def begin(self: Any, *args: Any, **options: Any) -> None:
        self._process = os.getpid()
        _objects.add(self)
        method(self, *args, **options)

    return begin


def _guarded(method: Callable[..., Any], error: str, *, ends: bool) -> Callable[..., Any]:
    def is_here(self: Any) -> bool:
        if self._process != os.getpid() and not ends:
            raise LocalrtError(error)
        return bool(self._process == os.getpid())

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return method(self, *args, **options) if is_here(self) else None

    @functools.wraps(method)
    async def acall(self: Any, *args: Any, **options: Any) -> Any:
        return await method(self, *args, **options) if is_here(self) else None

    return acall if inspect.iscoroutinefunction(method) else call


@of_one_process("a model", "load")
class Answering(Iterator[T]):
    """An answer that a generator computes; a forked child neither continues nor ends it."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __next__(self) -> T:
        item: T = next(self._items)
        return item

    def close(self) -> None:
        """Cancel the answer."""
        self._items.close()


def finalize(owner: object, do: Callable[..., object], *args: object) -> weakref.finalize[..., Any]:
    """``weakref.finalize``, which does nothing in a forked child."""
    return weakref.finalize(owner, _unless_forked, os.getpid(), do, *args)


def _unless_forked(process: int, do: Callable[..., object], *args: object) -> None:
    if process == os.getpid():
        do(*args)


def free_in_child(lock: T) -> T:
    """Return ``lock``, the lock of a module, which is free in a forked child."""
    _locks.add(lock)
    return lock


def _in_child() -> None:
    for each in list(_objects):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # it is never freed
    for lock in list(_locks):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
