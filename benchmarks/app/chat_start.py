"""From `localrt chat MODEL` to a prompt that takes keys, and to the first token of an answer.

    python -m benchmarks.app.chat_start [MODEL] [--runs 7] [--json FILE]

The real app on a pseudo-terminal of 100 x 30, in a process of its own, files in the system's cache.
A message is typed as soon as the prompt is drawn, so that it waits for the model like a person's
would; the answer is limited to one token, and counts when the line that says so is drawn.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import save, setting

_READY = b"rite now"  # the cursor is on its first letter
_ECHO = b"zebra"
_ANSWERED = b"cut off"
_LIMIT_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args(arguments)
    runs = [start(args.model) for _ in range(args.runs + 1)][1:]  # the first warms up
    echoes, tokens = (statistics.median(times) for times in zip(*runs, strict=True))
    found = {"typed_s": echoes, "first_token_s": tokens, "runs": runs}
    print(json.dumps(found, indent=1))
    command = setting(cited_command("app.chat_start", arguments))
    save(args.json, {**command, "model": Path(args.model).name, **found})
    return 0


def start(model: str) -> tuple[float, float]:
    """Seconds to the first typed word on screen, and to the first token."""
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        child, terminal = pty.fork()
        if not child:
            os.environ.update(TERM="xterm-256color", XDG_DATA_HOME=home, LOCALRT_CACHE=home)
            command = [sys.executable, "-m", "localrt", "chat", model, "--max-tokens", "1"]
            os.execv(sys.executable, command)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        try:
            wait_for(terminal, _READY)
            os.write(terminal, _ECHO)
            echoed = wait_for(terminal, _ECHO) - began
            os.write(terminal, b"\r")
            answered = wait_for(terminal, _ANSWERED) - began
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(terminal)
    return echoed, answered


def wait_for(terminal: int, text: bytes) -> float:
    """When ``text`` was drawn."""
    seen = b""
    ends = time.perf_counter() + _LIMIT_S
    while time.perf_counter() < ends:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # Linux's end of file
            break
        if text in seen:
            return time.perf_counter()
    raise SystemExit(f"the app did not show {text.decode()!r}: it ended with {seen[-300:]!r}")


if __name__ == "__main__":
    raise SystemExit(main())
