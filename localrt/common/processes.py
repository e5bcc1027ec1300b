"""Processes by names that are never used again, as their ids are, and by their port."""

from __future__ import annotations

import os
from contextlib import suppress


def process_name(number: int) -> str | None:
    """The id and start time of a process; None if there is none with this id."""
    import psutil  # takes ten milliseconds

    try:
        return f"{number}@{psutil.Process(number).create_time():.2f}"
    except (psutil.Error, ValueError, OverflowError):
        return None


def own_name() -> str | None:
    """This process's id and start time."""
    return process_name(os.getpid())


def is_alive(name: str | None) -> bool:
    """Whether the process with this ``process_name`` still runs."""
    import psutil  # as above

    try:
        number, began = (name or "").split("@")
        process = psutil.Process(int(number))
        same = abs(process.create_time() - float(began)) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.Error):
        return False


def port_holder(port: int) -> str:
    """Name and id of the process that listens on a TCP port; empty if the system does not say."""
    import psutil  # as above

    with suppress(psutil.Error, OSError):  # macOS tells only root
        for each in psutil.net_connections("tcp"):
            listens = each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
            if listens and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""
