"""Resuming a long conversation: reading its KV cache from disk, compared with recomputing it.

    python -m benchmarks.resume [MODEL] [--tokens 8192] [--runs 5] [--json FILE]

Both are the time to the first token of a next turn in a process that has the model loaded: once
with nothing saved, once after ``ChatSession.park``. Reading is measured with the file in the
system's cache and without ("cold"), which needs no root: the file's own pages are dropped.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import localrt
from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.memory_limit import drop_from_cache
from benchmarks.common.record import Record, Results, captioned, markdown_table
from localrt.common.formatting import format_bytes

TEXT = "the store keeps what was packed and brings it back in order "
PREFILLS = 3  # few, since they take long


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and save along with other models' results."""
    parser = make_parser(__doc__, runs=5)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args(arguments)
    results = Results(args.json, cited_command("resume", arguments))
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        os.environ["LOCALRT_CACHE"] = folder
        results.put(measure(args.model, args.tokens, args.runs, Path(folder)))
    print(resume_table(results.record))
    return 0


def resume_table(record: Mapping[str, Any]) -> str:
    """The table of resuming a conversation from disk, relative to recomputing it."""
    rows = []
    for row in record["rows"]:
        saved, name = format_bytes(row["saved_bytes"]), row["name"].removesuffix(".gguf")
        times = [
            f"{row[f'resume{kind}_s']:.2f} s, {row[f'faster{kind}']:.0f}x" for kind in ("", "_cold")
        ]
        rows.append([f"{row['tokens']:,} tokens of {name} ({saved})", *times])
    headers = ["from the disk, times as fast as computed again", "in the page cache", "not cached"]
    return captioned(record, markdown_table(headers, rows))


def measure(name: str, tokens: int, runs: int, folder: Path) -> Record:
    """One model's figures."""
    with localrt.load(name, ctx=tokens + 256) as model:
        messages = conversation(model, tokens)

        def answered(least_cached: int = 0) -> float:
            chat = model.chat()
            chat.messages = list(messages)
            seconds = next_turn(chat, least_cached)
            chat.close()
            return seconds

        prefill = statistics.median(answered() for _ in range(PREFILLS))
        chat = model.chat()
        chat.messages = list(messages)
        chat.send("Why?", max_tokens=1, temperature=0.0)
        saved = chat.park()
        times: dict[bool, list[float]] = {False: [], True: []}
        for cold in [False] + [False, True] * runs:  # the first warms up
            if cold:
                forget_pages(folder)
            times[cold].append(answered(tokens // 2))
        warm, cold_s = statistics.median(times[False][1:]), statistics.median(times[True])
        return {
            "name": Path(model.name).name,
            "tokens": model.count(messages),
            "saved_bytes": saved,
            "prefill_s": prefill,
            "resume_s": warm,
            "resume_cold_s": cold_s,
            "faster": prefill / warm,
            "faster_cold": prefill / cold_s,
        }


def conversation(model: localrt.Model, tokens: int) -> list[localrt.Message]:
    """Messages of about ``tokens`` tokens in all."""
    messages: list[localrt.Message] = []
    while not messages or model.count(messages) < tokens - 350:
        turn = len(messages) // 2
        messages.append({"role": "user", "content": f"{turn}: {TEXT * 18}"})
        messages.append({"role": "assistant", "content": f"{turn}: yes."})
    return messages


def next_turn(chat: localrt.ChatSession, least_cached: int) -> float:
    """Seconds to the first token of the next answer."""
    answer = chat.send("And then?", max_tokens=1, temperature=0.0)
    metrics = answer.metrics
    if metrics.cached_tokens < least_cached:
        raise SystemExit(f"only {metrics.cached_tokens} tokens came back")
    assert metrics.ttft_s is not None, "an answer has a first token"
    return metrics.ttft_s


def forget_pages(folder: Path) -> None:
    """Have the system drop the files' pages, after they have been written to disk."""
    files = list(folder.rglob("blocks.bin"))
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    drop_from_cache(files)


if __name__ == "__main__":
    sys.exit(main())
