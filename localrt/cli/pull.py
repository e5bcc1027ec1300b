"""``localrt pull MODEL``: download a model, or its newest revision, and say where it lies."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TextIO

from localrt.formatting import format_bytes, format_seconds
from localrt.hub import DEMO_NAME, resolve
from localrt.progress import Progress
from localrt.settings import Settings

__all__ = ["HELP", "add_arguments", "run"]

HELP = "download a model"

_CLEAR_LINE = "\r\x1b[K"
_VERBS = {"download": "downloading", "verify": "checking"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help=f"{DEMO_NAME}, org/name or org/name:Q4_K_M of the hub"
    )
    parser.add_argument("--revision", help="a branch, tag or commit of the repository")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Download; returns the exit status. An interrupted download is continued by the next one."""
    line = ProgressLine(sys.stderr)
    try:
        found = resolve(
            args.model,
            settings=Settings.from_environment(),
            revision=args.revision,
            refresh=True,
            progress=line,
        )
    finally:
        line.close()
    if args.json:
        result = {
            "name": found.name,
            "path": str(found.path),
            "revision": found.revision,
            "source": found.source,
            "downloaded_bytes": line.downloaded,
        }
        print(json.dumps(result, indent=2))
    else:
        done = "is here" if line.downloaded else "is up to date"
        print(f"{found.name} {done}: {found.path}")
    return 0


class ProgressLine:
    """One line on a terminal, rewritten as bytes arrive; elsewhere, one line at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._stage = ""
        self._started = 0.0
        self._first = 0
        self._download_s = 0.0
        self.downloaded = 0

    def __call__(self, progress: Progress) -> None:
        """Show one step. Bytes that an earlier run had brought do not count for the rate."""
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._started, self._first = progress.stage, now, progress.done
        elapsed = now - self._started
        if progress.stage == "download":
            self.downloaded, self._download_s = progress.done, elapsed
        if self._live:
            self._stream.write(_CLEAR_LINE + describe(progress, self._first, elapsed))
            self._stream.flush()

    def close(self) -> None:
        """Leave a clean line; without a terminal, say what was downloaded."""
        if self._live:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
        elif self.downloaded:
            self._stream.write(
                f"downloaded {format_bytes(self.downloaded)} in "
                f"{format_seconds(self._download_s)}\n"
            )


def describe(progress: Progress, first: int, elapsed_s: float) -> str:
    """``downloading model.gguf  43 %  42 MB of 98 MB  12 MB/s  5 s left``, at most 100 columns."""
    name = progress.detail.rpartition("/")[2]
    parts = [f"{_VERBS.get(progress.stage, progress.stage)} {name[-40:]}"]
    total = progress.total
    if total:
        parts.append(f"{100 * progress.done // total} %")
        parts.append(f"{format_bytes(progress.done)} of {format_bytes(total)}")
    else:
        parts.append(format_bytes(progress.done))
    rate = (progress.done - first) / elapsed_s if elapsed_s > 0.2 else 0.0
    if rate > 0:
        parts.append(f"{format_bytes(int(rate))}/s")
        if total:
            left = (total - progress.done) / rate
            parts.append(f"{f'{left:.0f} s' if left < 99.5 else format_seconds(left)} left")
    return "  ".join(parts)
