"""What stays behind: resident memory after many chats and many model switches.

    python -m benchmarks.app.leaks [MODEL] [--chats 200] [--switches 50]

Every tenth chat is stopped in the middle, every fifth parked on the disk; a switch loads the model,
answers once, and closes it. Growth is against the memory after a tenth of each, which fills what is
kept on purpose.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import localrt
from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import save, setting
from localrt.offload.memory.process import current_rss

_PROMPT = "Tell me of number {0}: what is it good for, and who found it? " * 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--switches", type=int, default=50)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCALRT_CACHE"] = folder
        with localrt.load(args.model, ctx=1024) as model:
            chats = grown(lambda number: chat(model, number), args.chats)
        switches = grown(lambda number: switch(args.model, number), args.switches)
    found = {
        "model": Path(args.model).name,
        "chats": args.chats,
        "switches": args.switches,
        "chats_rss": chats,
        "switches_rss": switches,
        "chats_growth_bytes": chats[-1] - chats[0],
        "switches_growth_bytes": switches[-1] - switches[0],
    }
    print(json.dumps(found, indent=1))
    save(args.json, {**setting(cited_command("app.leaks", arguments)), **found})
    return 0


def grown(step: Callable[[int], object], count: int) -> list[int]:
    """Resident bytes after each tenth of the steps, garbage collected."""
    seen = []
    for number in range(count):
        step(number)
        if (number + 1) % max(1, count // 10) == 0:
            gc.collect()
            seen.append(current_rss())
            print(f"{number + 1}: {seen[-1] / 1e6:.1f} MB", file=sys.stderr)
    return seen


def chat(model: localrt.Model, number: int) -> None:
    """One conversation of two turns."""
    session = model.chat(max_tokens=8)
    session.send(_PROMPT.format(number))
    for index, _ in enumerate(session.stream("Go on.")):
        if number % 10 == 0 and index == 3:
            session.cancel()
    if number % 5 == 0:
        session.park()
    session.close()


def switch(name: str, number: int) -> None:
    """Load, answer, close."""
    with localrt.load(name, ctx=1024) as model:
        model.chat().send(_PROMPT.format(number), max_tokens=4)


if __name__ == "__main__":
    raise SystemExit(main())
