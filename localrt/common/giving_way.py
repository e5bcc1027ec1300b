"""A thread that computes only while no other program wants its core.

Linux runs a thread of the idle class when nothing else can run, and takes the core from it at once:
a video player beside it is hardly slowed, which it is beside a thread that is merely ``nice``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_WINDOWS_IDLE = -15
_MACOS_UTILITY = 0x11


def giving_way(name: str) -> ThreadPoolExecutor:
    """Return an executor with one such thread. Threads that it starts give way too on Linux."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_give_way)


def _give_way() -> None:
    with suppress(OSError, AttributeError):  # where it is not allowed or unknown
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        elif sys.platform == "win32":
            kernel = ctypes.windll.kernel32
            kernel.SetThreadPriority(kernel.GetCurrentThread(), _WINDOWS_IDLE)
        elif sys.platform == "darwin":
            ctypes.CDLL(None).pthread_set_qos_class_self_np(_MACOS_UTILITY, 0)
