"""Fork guard: a forked child cannot use the model that its parent has loaded.

A child has none of its parent's threads, locks that may be held for ever, and the same open files.
Computing or freeing there could hang, or change what the parent works with.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from localrt.common.errors import LocalrtError

T = TypeVar("T")

_forks = 0  # between the first process that imported this and this one
_answers: weakref.WeakSet[Any] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def count_forks() -> int:
    """The number of forks so far: an object notes it when it is made, to know its process."""
    return _forks


def check_process(forks: int) -> None:
    """Check that a model is used by the process that has loaded it, at ``forks``.

    Raises:
        LocalrtError: this process is a fork of it.
    """
    if forks != _forks:
        raise LocalrtError(
            "a model does not survive a fork: load it in the child process, "
            'which multiprocessing starts afresh with its "spawn" method'
        )


class Answering(Iterator[T]):
    """An answer that a generator computes; a forked child neither continues nor ends it."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._made = _forks
        _answers.add(self)

    def __next__(self) -> T:
        check_process(self._made)
        item: T = next(self._items)
        return item

    def close(self) -> None:
        """Cancel the answer."""
        if self._made == _forks:
            self._items.close()


def finalize(owner: object, do: Callable[..., object], *args: object) -> weakref.finalize[..., Any]:
    """``weakref.finalize``, which does nothing in a forked child."""
    return weakref.finalize(owner, _unless_forked, _forks, do, *args)


def _unless_forked(forks: int, do: Callable[..., object], *args: object) -> None:
    if forks == _forks:
        do(*args)


def free_in_child(lock: T) -> T:
    """Return ``lock``, the lock of a module, which is free in a forked child."""
    _locks.add(lock)
    return lock


def _in_child() -> None:
    global _forks
    _forks += 1
    for answer in list(_answers):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(answer))  # it is never freed, so never closed
    for lock in list(_locks):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
