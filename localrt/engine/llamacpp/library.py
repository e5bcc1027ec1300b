"""The llama.cpp library: found, initialized once, and silent.

llama.cpp has one log sink and one backend per process, so this module holds one `Library` for all
engines. What the library would print is kept as the reason for the next error instead.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

from localrt.errors import MissingExtraError

__all__ = ["Library", "load_library"]

_ERROR_LEVEL = 4


@dataclass(frozen=True, slots=True)
class Library:
    """llama-cpp-python's ctypes module, and the last error lines that llama.cpp reported.

    ``log_sink`` is only held: the library would call into freed memory without it.
    """

    api: Any
    errors: deque[str]
    log_sink: Any

    def reason(self, fallback: str) -> str:
        """What llama.cpp last gave as the cause of a failure, in one line; forgets it."""
        # The first line names the cause; those after it are the callers giving up in turn.
        text = self.errors[0] if self.errors else fallback
        self.errors.clear()
        return text


@cache
def load_library() -> Library:
    """The library, with its backend started and its log kept from the terminal.

    Raises:
        MissingExtraError: llama-cpp-python is not installed, or its library cannot be loaded.
    """
    install = "pip install 'localrt[llamacpp]'"
    try:
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        raise MissingExtraError(f"the llamacpp engine needs llama-cpp-python: {install}") from error
    except (OSError, RuntimeError) as error:
        cause = str(error).splitlines()[0] if str(error) else "unknown cause"
        raise MissingExtraError(
            f"llama-cpp-python is installed but its library does not load ({cause}); try again"
            f" with {install} --force-reinstall"
        ) from error

    errors: deque[str] = deque(maxlen=16)

    def keep(level: int, text: bytes, _data: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == _ERROR_LEVEL and line:
            errors.append(" ".join(line.split()))

    log_sink = api.llama_log_callback(keep)
    api.llama_log_set(log_sink, ctypes.c_void_p(None))
    api.llama_backend_init()
    return Library(api, errors, log_sink)
