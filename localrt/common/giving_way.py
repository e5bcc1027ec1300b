"""A thread that computes only while no other program wants its core.

Linux runs a thread of the idle class when nothing else can run, and takes the core from it at once:
a video player beside it is hardly slowed, which it is beside a thread that is merely ``nice``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from localrt import system


def giving_way(name: str) -> ThreadPoolExecutor:
    """Return an executor with one such thread. Threads that it starts give way too on Linux."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=system.give_way)
