"""What stays behind: resident memory after many chats and many model switches.

    .venv/bin/python benchmarks/leaks.py [MODEL] [--chats 200] [--switches 50] [--ram SIZE]
        [--out benchmarks/results/leaks.json]

Every tenth chat is stopped in the middle, every fifth parked on the disk; a switch loads the model,
answers once, and closes it. Growth is against the memory after a tenth of each, which fills what is
kept on purpose. Asked: under 20 MB in all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import localrt  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.offload.memory.process import current_rss  # noqa: E402

_PROMPT = "Tell me of number {0}: what is it good for, and who found it? " * 6


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--switches", type=int, default=50)
    parser.add_argument("--ram", help="a budget under which the model is streamed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCALRT_CACHE"] = folder
        options = {"ctx": 1024, "ram": args.ram}
        with localrt.load(args.model, **options) as model:
            chats = grown(lambda number: chat(model, number), args.chats)
        switches = grown(lambda number: switch(args.model, options, number), args.switches)
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "ram": args.ram,
        "chats": args.chats,
        "switches": args.switches,
        "chats_rss": chats,
        "switches_rss": switches,
        "chats_growth_bytes": chats[-1] - chats[1],
        "switches_growth_bytes": switches[-1] - switches[1],
        "command": "benchmarks/leaks.py " + " ".join(sys.argv[1:]),
        "machine": hardware.probe().to_dict(),
        "version": localrt.__version__,
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def grown(step: Any, count: int) -> list[int]:
    """Resident bytes before, and after each tenth of the steps."""
    seen = [rss()]
    for number in range(count):
        step(number)
        if (number + 1) % max(1, count // 10) == 0:
            seen.append(rss())
            print(f"{number + 1}: {seen[-1] / 1e6:.1f} MB", file=sys.stderr)
    return seen


def rss() -> int:
    """Resident bytes, garbage collected."""
    gc.collect()
    return current_rss()


def chat(model: localrt.Model, number: int) -> None:
    """One conversation of two turns."""
    talk = model.chat(max_tokens=8)
    talk.send(_PROMPT.format(number))
    for index, _ in enumerate(talk.stream("Go on.")):
        if number % 10 == 0 and index == 3:
            talk.cancel()
    if number % 5 == 0:
        talk.park()
    talk.close()


def switch(name: str, options: dict[str, Any], number: int) -> None:
    """Load, answer, close."""
    with localrt.load(name, **options) as model:
        model.chat().send(_PROMPT.format(number), max_tokens=4)


if __name__ == "__main__":
    raise SystemExit(main())
