"""From `localrt chat MODEL` to a prompt that takes keys, and to the first token of an answer.

    .venv/bin/python benchmarks/chat_start.py [MODEL] [--runs 7] [--out FILE]

The real app on a pseudo-terminal of 100 x 30, in a process of its own, files in the system's cache.
A message is typed as soon as the prompt is drawn, so that it waits for the model like a person's
would; the answer is limited to one token, and counts when the line that says so is drawn.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import localrt  # noqa: E402
from localrt.machine import hardware  # noqa: E402

_READY = b"rite now"  # the cursor is on its first letter
_ECHO = b"zebra"
_ANSWERED = b"cut off"
_LIMIT_S = 60.0


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = [start(args.model) for _ in range(args.runs + 1)][1:]  # the first warms up
    prompts, echoes, tokens = (statistics.median(times) for times in zip(*runs, strict=True))
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "prompt_s": prompts,
        "typed_s": echoes,
        "first_token_s": tokens,
        "runs": runs,
        "command": "benchmarks/chat_start.py " + " ".join(Path(a).name for a in sys.argv[1:]),
        "machine": hardware.probe().to_dict(),
        "version": localrt.__version__,
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def start(model: str) -> tuple[float, float, float]:
    """Seconds to the prompt, to the first typed word on screen, and to the first token."""
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        child, terminal = pty.fork()
        if not child:
            os.environ.update(TERM="xterm-256color", XDG_DATA_HOME=home, LOCALRT_CACHE=home)
            command = [sys.executable, "-m", "localrt", "chat", model, "--max-tokens", "1"]
            os.execv(sys.executable, command)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        try:
            ready = wait_for(terminal, _READY) - began
            os.write(terminal, _ECHO)
            echoed = wait_for(terminal, _ECHO) - began
            os.write(terminal, b"\r")
            answered = wait_for(terminal, _ANSWERED) - began
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(terminal)
    return ready, echoed, answered


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
