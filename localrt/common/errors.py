"""Every error that localrt raises on purpose. A message says what is wrong and what to do.

    LocalrtError
    ├── OptionError (ValueError)       an unusable option, size or sampling value
    ├── CheckpointError                a model's files are missing, truncated or malformed
    ├── UnsupportedModelError          well-formed, but an unknown architecture or type
    ├── TokenizerError                 no tokenizer, or text that it cannot handle
    ├── TemplateError                  the chat template refused the messages
    ├── ContextOverflowError           prompt and history do not fit the context
    ├── MemoryBudgetError (MemoryError)  weights, KV cache and scratch exceed a budget
    ├── HubError                       download, authentication or network
    │   ├── ModelNotFoundError         no such model, revision or file
    │   ├── GatedModelError            401 / 403: a token or an accepted licence is needed
    │   └── OfflineError               the network is needed and is off or unreachable
    ├── StorageError (OSError)         a folder cannot be written, or the disk is full
    ├── MissingExtraError (ImportError)  an optional dependency is needed; says which to install
    └── CancelledError                 the caller cancelled the work

This module imports nothing but ``option_names``, so every layer may use it.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from localrt.common.option_names import Spelling, did_you_mean, python_option, spelled

__all__ = [
    "CancelledError",
    "CheckpointError",
    "ContextOverflowError",
    "GatedModelError",
    "HubError",
    "LocalrtError",
    "MemoryBudgetError",
    "MissingExtraError",
    "ModelNotFoundError",
    "OfflineError",
    "OptionError",
    "StorageError",
    "TemplateError",
    "TokenizerError",
    "UnsupportedModelError",
]


class LocalrtError(Exception):
    """Root of localrt's errors. ``str(error)`` is one line fit for a user.

    It names options as Python spells them (``ctx=512``); ``told`` spells them for other readers.
    """

    def __str__(self) -> str:
        return spelled(super().__str__(), python_option)

    def told(self, spelling: Spelling) -> str:
        """The message, with options spelled by ``spelling``."""
        return spelled(self.marked, spelling)

    @property
    def marked(self) -> str:
        """The message with its options still marked, for use in another message."""
        return super().__str__()


class OptionError(LocalrtError, ValueError):
    """An option cannot be used as given."""


class CheckpointError(LocalrtError):
    """A model's files are missing, truncated or malformed."""


class UnsupportedModelError(LocalrtError):
    """A well-formed model of an architecture or weight type that localrt does not know."""


class TokenizerError(LocalrtError):
    """The model has no tokenizer, or one that cannot be built."""


class TemplateError(LocalrtError):
    """The model's chat template failed or refused the messages."""


class ContextOverflowError(LocalrtError):
    """Prompt, history and answer have at least ``tokens`` tokens, more than the context's ``ctx``.

    Both are None if unknown.
    """

    def __init__(self, message: str, *, tokens: int | None = None, ctx: int | None = None) -> None:
        super().__init__(message)
        self.tokens, self.ctx = tokens, ctx


class MemoryBudgetError(LocalrtError, MemoryError):
    """What the model needs exceeds a memory budget or the machine."""


class HubError(LocalrtError):
    """A download failed."""


class ModelNotFoundError(HubError):
    """No such model, revision or file."""


class GatedModelError(HubError):
    """The hub requires a token or an accepted licence (HTTP 401 or 403)."""


class OfflineError(HubError):
    """The network is needed, and is unreachable or switched off."""


class StorageError(LocalrtError, OSError):
    """A file or folder cannot be written."""


class MissingExtraError(LocalrtError, ImportError):
    """An optional dependency is missing; the message says which extra to install."""


class CancelledError(LocalrtError):
    """The caller cancelled the work."""


@contextmanager
def disk_errors(place: object) -> Iterator[None]:
    """Raise the system's errors in the block as ``StorageError``, with the file, or ``place``."""
    try:
        yield
    except LocalrtError:
        raise
    except OSError as error:
        raise StorageError(f"{error.filename or place}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """What the system says of an error, without its number and its file."""
    if not isinstance(error, OSError):
        return str(error)
    # Windows' own words are in the user's language; this number stands for many.
    if getattr(error, "winerror", None) and error.errno not in (None, errno.EINVAL):
        return os.strerror(error.errno)
    return error.strerror or str(error)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def known_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make ``function`` raise ``OptionError`` for unknown arguments, with a suggested name.

    Python's own message names only the wrong argument.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: _P.args, **options: _P.kwargs) -> _R:
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            hint = did_you_mean(unknown, known) or f"known: {', '.join(known)}"
            raise OptionError(f"{function.__name__} has no argument {unknown!r:.60}: {hint}")
        return function(*args, **options)

    return checked
