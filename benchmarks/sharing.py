"""What a chat feels beside background work, what the work keeps, and how fair clients' shares are.

    python -m benchmarks.sharing MODEL.gguf [--runs 5] [--seconds 20]

In each run: a chat alone, six clients' background work alone, both at once, and eight equal clients
(Jain's index of their tokens). What comes first warms up.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any
from uuid import uuid4

import numpy as np

import localrt
from benchmarks.common.command import ROOT, cited_command, make_parser
from benchmarks.common.record import captioned, markdown_table, save, setting
from localrt.common.formatting import format_seconds
from localrt.service.live import LiveModel

_WORKERS, _EQUAL = 6, 8
_EQUAL_TIMES = 3  # as long as the other parts: an answer under way at the end weighs less
_WARM_S = 6.0
_WORDS = (ROOT / "docs/server.md").read_text(encoding="utf-8").split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = make_parser(__doc__, results="sharing", runs=5)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    options = parser.parse_args(arguments)
    runs: list[dict[str, float]] = []
    with localrt.load(options.model, ctx=2048) as model, model.live(most=16) as live:
        _both(live, _WARM_S)
        for _ in range(options.runs):
            runs.append(_run(live, options.seconds))
            print(runs[-1], flush=True)
    medians = {name: median(run[name] for run in runs) for name in runs[0]}
    record = {**setting(cited_command("sharing", arguments)), "medians": medians, "runs": runs}
    save(options.json, record)
    print(sharing_table(record))
    return 0


def sharing_table(record: Mapping[str, Any]) -> str:
    """The chat's first token alone and beside, what the work keeps, and Jain's index."""
    found = record["medians"]
    cells = [
        format_seconds(found["ttft_alone_p95_s"]),
        f"{format_seconds(found['ttft_beside_p95_s'])} ({found['ttft_times']:.2f}x)",
        f"{100 * found['work_kept']:.0f} %",
        f"{found['jain']:.3f}",
    ]
    headers = ["p95 of a chat's first token, alone", "beside background work", "the work keeps"]
    table = markdown_table([*headers, "Jain's index of equal clients"], [cells])
    return captioned(record, table, f"medians of {len(record['runs'])} runs")


def _run(live: LiveModel, seconds: float) -> dict[str, float]:
    alone, _ = _both(live, seconds, workers=0)
    _, work = _both(live, seconds, chats=False)
    beside, kept = _both(live, seconds)
    said = _equal(live, _EQUAL_TIMES * seconds)
    return {
        "ttft_alone_p50_s": median(alone),
        "ttft_beside_p50_s": median(beside),
        "ttft_alone_p95_s": _p95(alone),
        "ttft_beside_p95_s": _p95(beside),
        "ttft_times": _p95(beside) / _p95(alone),
        "work_alone_tok_s": work / seconds,
        "work_kept": kept / work,
        "jain": sum(said) ** 2 / (len(said) * sum(count**2 for count in said)),
    }


def _both(
    live: LiveModel, seconds: float, *, workers: int = _WORKERS, chats: bool = True
) -> tuple[list[float], int]:
    """Return the seconds to the chat's first tokens, and the tokens that the work has computed."""
    until, first = time.monotonic() + seconds, list[float]()

    def work(number: int) -> int:
        rng, count = random.Random(number), 0
        while time.monotonic() < until:
            text = f"{fresh_prose(rng, 250)}. Summarize this."
            count += _answer(live, text, 48, until, number, "background")[0]
        return count

    def chat() -> int:
        rng = random.Random(99)
        while time.monotonic() < until:
            text = f"{fresh_prose(rng, 60)}. Explain this."
            _, ttft = _answer(live, text, 24, until, "chat", "interactive")
            first.extend([] if ttft is None else [ttft])
            time.sleep(rng.uniform(0.3, 1.2))
        return 0

    counts = _together([*(lambda n=n: work(n) for n in range(workers)), *([chat] if chats else [])])
    return first, sum(counts)


def _equal(live: LiveModel, seconds: float) -> list[int]:
    """Return the tokens that each of the equal clients got."""
    until = time.monotonic() + seconds

    def client(number: int) -> int:
        rng, count = random.Random(number), 0
        while time.monotonic() < until:
            text = f"{fresh_prose(rng, 60)}. Explain this."
            count += _answer(live, text, 48, until, ("equal", number), "interactive")[0]
        return count

    return _together([lambda n=n: client(n) for n in range(_EQUAL)])


def _answer(
    live: LiveModel, text: str, tokens: int, until: float, client: object, kind: str
) -> tuple[int, float | None]:
    """Read an answer until the time is over; return its tokens, its prompt's if it began, and the
    seconds to its first one.
    """
    options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began, ttft, count = time.monotonic(), None, 0
    answer = live.submit(text, client=client, request_class=kind, **options)
    for chunk in answer:
        if chunk.token_ids:
            read = chunk.metrics.prompt_tokens - chunk.metrics.cached_tokens
            count += len(chunk.token_ids) + (0 if count else read)
            ttft = time.monotonic() - began if ttft is None else ttft
        if time.monotonic() > until:
            answer.cancel()
    return count, ttft


def _together(tasks: Sequence[Callable[[], int]]) -> list[int]:
    with ThreadPoolExecutor(len(tasks)) as threads:
        return [each.result() for each in [threads.submit(task) for task in tasks]]


def fresh_prose(rng: random.Random, words: int) -> str:
    """Return words that no earlier prompt began with: caches of it would be used."""
    first = rng.randrange(len(_WORDS) - words)
    return " ".join([uuid4().hex[:8], *_WORDS[first : first + words]])


def _p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95, method="nearest"))


if __name__ == "__main__":
    sys.exit(main())
