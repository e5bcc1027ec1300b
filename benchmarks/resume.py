"""A long conversation comes back: its KV cache from the disk, against computing it again.

    .venv/bin/python benchmarks/resume.py [MODEL] [--tokens 8192] [--runs 5] [--kv-format bf16]
        [--out benchmarks/results/resume.json]

Both are the time to the first token of a next turn in a process that has the model loaded: one
where the disk has nothing, one after ``ChatSession.park``. The reading is measured with the file in
the system's cache and without ("cold"), which needs no root: its pages are given up one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import localrt  # noqa: E402
from localrt.formatting import format_bytes  # noqa: E402
from localrt.machine import hardware  # noqa: E402

_WORDS = (
    "the",
    "store",
    "keeps",
    "what",
    "was",
    "packed",
    "and",
    "brings",
    "it",
    "back",
    "in",
    "order",
)


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prefills", type=int, default=3, help="they take long")
    parser.add_argument("--kv-format", choices=("bf16", "int8", "int4"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        os.environ["LOCALRT_CACHE"] = folder
        result = measure(args, Path(folder))
    print(json.dumps(result, indent=1))
    if args.out is not None:
        save(args.out, result)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One model's figures."""
    ctx = args.tokens + 256
    with localrt.load(args.model, ctx=ctx, kv_format=args.kv_format) as model:
        messages = conversation(model, args.tokens)
        again = []
        for _ in range(args.prefills):
            chat = model.chat()
            chat.messages = list(messages)
            again.append(next_turn(chat))
            chat.close()
        chat = model.chat()
        chat.messages = list(messages)
        chat.send("Why?", max_tokens=1, temperature=0.0)
        saved = chat.park()
        times: dict[str, list[float]] = {"warm": [], "cold": []}
        for cold in [False] + [False, True] * args.runs:  # the first warms up
            if cold:
                forget_pages(folder)
            other = model.chat()
            other.messages = list(messages)
            times["cold" if cold else "warm"].append(
                next_turn(other, least_cached=args.tokens // 2)
            )
            other.close()
        prefill, warm, cold_s = (
            statistics.median(t) for t in (again, times["warm"][1:], times["cold"])
        )
        return {
            "model": Path(model.name).name,
            "tokens": model.count(messages),
            "kv_format": args.kv_format or "bf16",
            "saved_bytes": saved,
            "prefill_s": prefill,
            "resume_s": warm,
            "resume_cold_s": cold_s,
            "faster": prefill / warm,
            "faster_cold": prefill / cold_s,
            "saved": format_bytes(saved),
            "command": "benchmarks/resume.py " + " ".join(Path(a).name for a in sys.argv[1:]),
            "machine": hardware.probe().to_dict(),
            "version": localrt.__version__,
        }


def conversation(model: localrt.Model, tokens: int) -> list[localrt.Message]:
    """Turns that come to about ``tokens``."""
    messages: list[localrt.Message] = []
    turn = 0
    while not messages or model.count(messages) < tokens - 350:
        words = [_WORDS[(turn * 7 + i * (turn % 5 + 1)) % len(_WORDS)] for i in range(220)]
        role = "assistant" if turn % 2 else "user"
        messages.append({"role": role, "content": f"{turn}: " + " ".join(words)})
        turn += 1
    if messages[-1]["role"] == "user":
        messages.append({"role": "assistant", "content": "Yes."})
    return messages


def next_turn(chat: localrt.ChatSession, least_cached: int = 0) -> float:
    """Seconds to the first token of a next answer."""
    answer = chat.send("And then?", max_tokens=1, temperature=0.0)
    metrics = answer.metrics
    if metrics.cached_tokens < least_cached:
        raise SystemExit(f"only {metrics.cached_tokens} tokens came back")
    assert metrics.ttft_s is not None, "an answer has a first token"
    return metrics.ttft_s


def forget_pages(folder: Path) -> None:
    """Have the system drop the files' pages."""
    for path in folder.rglob("blocks.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save(path: Path, result: dict[str, Any]) -> None:
    """Beside the other models' results."""
    found = json.loads(path.read_text()) if path.exists() else {"results": []}
    key = (result["model"], result["kv_format"])
    rest = [row for row in found["results"] if (row["model"], row["kv_format"]) != key]
    path.write_text(json.dumps({"results": [*rest, result]}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
