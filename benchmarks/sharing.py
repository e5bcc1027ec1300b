"""What a chat feels beside background work, what the work keeps, and how fair clients' shares are.

    python -m benchmarks.sharing MODEL.gguf [--runs 5] [--seconds 20]

In each run: a chat alone, six clients' background work alone, both at once, and eight equal clients
(Jain's index of their tokens). Then the frame times of a video player alone, beside an answer, and
beside an answer of the model loaded with ``gentle=True``. What comes first warms up.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any
from uuid import uuid4

import localrt
from benchmarks.common.command import ROOT, cited_command, make_parser
from benchmarks.common.record import save, setting
from localrt.bench.mix.mix import Neighbour
from localrt.bench.mix.neighbours import RunningNeighbour
from localrt.service.live import LiveModel

_WORKERS, _EQUAL = 6, 8
_EQUAL_TIMES = 3  # as long as the other parts: an answer under way at the end weighs less
_WARM_S = 6.0
_WORDS = (ROOT / "docs/server.md").read_text(encoding="utf-8").split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = make_parser(__doc__, results="sharing")
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    options = parser.parse_args(arguments)
    runs: list[dict[str, float]] = []
    with localrt.load(options.model, ctx=2048) as model, model.live(most=16) as live:
        _both(live, _WARM_S)
        for _ in range(options.runs):
            runs.append(_run(live, options.seconds))
            print(_line(runs[-1]), flush=True)
    for run in runs:
        run |= _frames(options.model, options.seconds / 2)
        print(_line(run), flush=True)
    medians = {name: median(run[name] for run in runs) for name in runs[0]}
    print(f"medians: {_line(medians)}")
    record = {**setting(cited_command("sharing", arguments)), "medians": medians, "runs": runs}
    save(options.json, record)
    return 0


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
    until, first, counts = time.monotonic() + seconds, list[float](), [0] * workers

    def work(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            text = f"{fresh_prose(rng, 250)}. Summarize this."
            counts[number] += _answer(live, text, 48, until, number, "background")

    def chat() -> None:
        rng = random.Random(99)
        while time.monotonic() < until:
            asked = time.monotonic()
            seen = list[float]()
            _answer(
                live,
                f"{fresh_prose(rng, 60)}. Explain this.",
                24,
                until,
                "chat",
                "interactive",
                seen,
            )
            if seen:
                first.append(seen[0] - asked)
            time.sleep(rng.uniform(0.3, 1.2))

    _together([*(lambda n=n: work(n) for n in range(workers)), *([chat] if chats else [])])
    return first, sum(counts)


def _frames(model: str, seconds: float) -> dict[str, float]:
    """Return frame times in ms, alone and beside answers, and the answers' tokens a second."""
    found = _video("alone", seconds)
    for name, gentle in (("plain", False), ("gentle", True)):
        with localrt.load(model, ctx=2048, draft="off", gentle=gentle) as loaded:
            said, cancel = list[int](), threading.Event()
            thread = threading.Thread(target=_write, args=(loaded, said, cancel))
            thread.start()
            while not said:
                time.sleep(0.01)
            began, before = time.monotonic(), sum(said)
            found |= _video(name, seconds)
            found[f"{name}_tok_s"] = (sum(said) - before) / (time.monotonic() - began)
            cancel.set()
            thread.join()
    return found


def _write(model: localrt.Model, said: list[int], cancel: threading.Event) -> None:
    """Write until it is cancelled; ``said`` gets the tokens of each chunk."""
    options: dict[str, Any] = {"ignore_eos": True, "cancel": cancel}
    for chunk in model.stream("Write a story about the sea.", **options):
        said.append(len(chunk.token_ids))


def _video(beside: str, seconds: float) -> dict[str, float]:
    neighbour = Neighbour(name="video", kind="video", work={"frame_ms": 16.7, "work_mb": 4})
    with RunningNeighbour(neighbour) as running:
        running.start()
        time.sleep(seconds)
        times = running.stop()["frame_ms"]
    return {f"frame_{beside}_{name}_ms": times[name] for name in ("p50", "p99")}


def _line(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def _equal(live: LiveModel, seconds: float) -> list[int]:
    """Return the tokens that each of the equal clients got."""
    until, counts = time.monotonic() + seconds, [0] * _EQUAL

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            text = f"{fresh_prose(rng, 60)}. Explain this."
            counts[number] += _answer(live, text, 48, until, ("equal", number), "interactive")

    _together([lambda n=n: client(n) for n in range(_EQUAL)])
    return counts


def _answer(
    live: LiveModel,
    text: str,
    tokens: int,
    until: float,
    client: object,
    kind: str,
    seen: list[float] | None = None,
) -> int:
    """Read an answer until the time is over; return its tokens, its prompt's if it began."""
    options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer, count = live.submit(text, client=client, request_class=kind, **options), 0
    for chunk in answer:
        if chunk.token_ids:
            read = chunk.metrics.prompt_tokens - chunk.metrics.cached_tokens
            count += len(chunk.token_ids) + (0 if count else read)
            if seen is not None:
                seen.append(time.monotonic())
        if time.monotonic() > until:
            answer.cancel()
    return count


def _together(tasks: Sequence[Any]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fresh_prose(rng: random.Random, words: int) -> str:
    """Return words that no earlier prompt began with: caches of it would be used."""
    first = rng.randrange(len(_WORDS) - words)
    return " ".join([uuid4().hex[:8], *_WORDS[first : first + words]])


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1) + 0.5)]


if __name__ == "__main__":
    sys.exit(main())
