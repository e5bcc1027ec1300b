"""The terminal app: keys and scrolling in 10,000 lines, and what it costs decoding.

    python -m benchmarks.app [MODEL] [--lines 10000] [--runs 9] [--json FILE]

The app runs as on a terminal of 100 by 40, down to the bytes for it, which are then thrown away.
Times are from a key's arrival to the frame that shows it. For decoding the same model answers the
same prompt bare and in the app by turns, with the long conversation on screen.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from textual import events
from textual.drivers.headless_driver import HeadlessDriver

import localrt
from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import Record, save, setting
from localrt.formatting import table
from localrt.tui import ChatApp
from localrt.tui.app import spare_collector
from localrt.tui.chat.answer import Answer
from localrt.tui.chat.blocks import Block, UserTurn

SIZE = (100, 40)
PROMPT = "Tell a long story about a lighthouse keeper who finds a door in the sea."
TEXT = "the model reads its weights from memory and writes a token to you"
WORDS = TEXT.split(" ")
# Without guesses, whose luck would hide what the app costs.
OPTIONS = {"temperature": 0.0, "ignore_eos": True, "draft": "off"}
CODE = "```python\ndef add(a, b):\n    # the sum of two numbers\n    return a + b\n```\n"


class Terminal(HeadlessDriver):
    """A terminal that counts what it is sent."""

    painted = 0

    @property
    def is_headless(self) -> bool:
        """No: frames are made for it."""
        return False

    def write(self, data: str) -> None:
        """A part of a frame."""
        Terminal.painted += 1


class Kept:
    """A loaded model that outlives the apps which close it."""

    def __init__(self, model: localrt.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def close(self) -> None:
        """Not yet."""


def long_blocks(lines: int) -> list[Block]:
    """Questions and answers of Markdown with about ``lines`` lines in all."""
    draw = random.Random(7)
    blocks: list[Block] = []
    written = 0
    while written < lines:
        parts = []
        for _ in range(draw.randint(1, 12)):
            parts.append(" ".join(draw.choices(WORDS, k=draw.randint(8, 60))) + ".")
            if draw.random() < 0.3:
                parts.append(CODE)
            if draw.random() < 0.3:
                parts.append("\n".join(f"- {' '.join(draw.choices(WORDS, k=6))}" for _ in "12345"))
        blocks += [UserTurn(" ".join(draw.choices(WORDS, k=12))), Answer("\n\n".join(parts))]
        written += 2 + sum(block.estimate(94) for block in blocks[-2:])
    return blocks


def app_of(load: Callable[[Any], Any], **options: Any) -> ChatApp:
    """An app on the counting terminal that keeps nothing."""
    app = ChatApp(load, model_name="bench", system=None, options=options)
    app.driver_class = Terminal
    return app


async def in_app(app: ChatApp, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` beside the open app, then close it."""

    async def pilot(_: object) -> None:
        app.chat.composer.cursor_blink = False  # a blink would pass for an answer
        try:
            await work()
        finally:
            app.exit()

    await app.run_async(size=SIZE, auto_pilot=pilot)  # type: ignore[arg-type]


def send(app: ChatApp, event: events.Event) -> None:
    """As from the terminal."""
    driver: Any = app._driver
    driver.process_message(event)


async def quiet(seconds: float = 0.15) -> None:
    """Wait until nothing has been painted for a while."""
    while True:
        before = Terminal.painted
        await asyncio.sleep(seconds)
        if Terminal.painted == before:
            return


async def frame_after(act: Callable[[], object]) -> float:
    """Seconds from ``act`` to the end of the next frame."""
    before = Terminal.painted
    start = time.perf_counter()
    act()
    while Terminal.painted == before:
        if time.perf_counter() - start > 5:
            raise SystemExit("no frame within 5 s")
        await asyncio.sleep(0)
    return time.perf_counter() - start


async def responsiveness(lines: int, result: list[Record]) -> None:
    """Typing and scrolling in a conversation of ``lines`` lines."""

    def wait_for_ever(progress: Any) -> Any:
        raise localrt.LocalrtError("this benchmark needs no model")

    app = app_of(wait_for_ever)

    spare_collector()

    async def work() -> None:
        view = app.chat.view
        await quiet()
        blocks = long_blocks(lines)
        opened = await frame_after(lambda: view.add(*blocks))
        view.follow()
        await quiet()
        total = view.virtual_size.height
        result.append({"what": f"opening {total:,} lines", "worst_ms": opened * 1e3})

        def press(key: str, character: str | None = None) -> Callable[[], None]:
            return lambda: send(app, events.Key(key, character))

        async def several(what: str, acts: Sequence[Callable[[], object]], pause: float) -> None:
            seconds = []
            for act in acts:
                seconds.append(await frame_after(act))
                await asyncio.sleep(pause)
            median_ms, worst_ms = statistics.median(seconds) * 1e3, max(seconds) * 1e3
            result.append({"what": what, "median_ms": median_ms, "worst_ms": worst_ms})

        letters = "the quick brown fox jumps over the lazy dog" * 3
        typed = [press("space" if letter == " " else letter, letter) for letter in letters]
        await several("key to frame", typed, 0.02)
        await several("page up to frame (not seen before)", [press("pageup")] * 150, 0.02)
        await several("page down to frame", [press("pagedown")] * 100, 0.02)

        def wheel() -> None:
            send(app, events.MouseScrollUp(None, 20, 10, 0, -1, 0, False, False, False))

        await several("wheel step to frame", [wheel] * 150, 0.01)
        jumps = [press(key) for key in ("ctrl+home", "ctrl+end") * 5]
        await several("to the first or last line", jumps, 0.0)

    await in_app(app, work)


def bare(model: localrt.Model, tokens: int) -> float:
    """Tokens per second without an app."""
    chat = model.chat(max_tokens=tokens, **OPTIONS)
    rate = 0.0
    for chunk in chat.stream(PROMPT):
        rate = chunk.metrics.decode_tok_s or rate
    chat.close()
    return rate


async def shown(model: localrt.Model, tokens: int, lines: int) -> tuple[float, float]:
    """Tokens per second of the same answer in the app, and the app's share of one core."""
    app = app_of(lambda progress: Kept(model), max_tokens=tokens, **OPTIONS)
    rates: list[float] = []
    share = 0.0

    async def work() -> None:
        nonlocal share
        while app.state.session is None:
            await asyncio.sleep(0.02)
        app.chat.view.add(*long_blocks(lines))
        app.chat.view.follow()
        await quiet()
        app.chat.composer.put(PROMPT)
        send(app, events.Key("enter", "\r"))
        while not app.chat.queue.answering:
            await asyncio.sleep(0.01)
        start, spent = time.perf_counter(), time.thread_time()
        while app.chat.queue.answering:
            await asyncio.sleep(0.1)
        share = (time.thread_time() - spent) / (time.perf_counter() - start)
        rates.append(app.chat.footer.status.rate or 0.0)

    await in_app(app, work)
    return rates[0], share


def decoding(name: str, runs: int, tokens: int, lines: int) -> Record:
    """Both by turns, after one of each to warm up."""
    rates: dict[str, list[float]] = {"bare": [], "app": [], "core": [], "cost": []}
    with localrt.load(name) as model:
        for run in range(runs + 1):
            before = bare(model, tokens)
            rate, core = asyncio.run(shown(model, tokens, lines))
            after = bare(model, tokens)
            if run:
                rates["bare"].append((before + after) / 2)  # of the same seconds
                rates["app"].append(rate)
                rates["core"].append(core)
                rates["cost"].append(1 - rate / rates["bare"][-1])
    medians = {key: statistics.median(values) for key, values in rates.items()}
    return {
        "what": f"decoding {Path(name).name}, {tokens} tokens",
        "bare_tok_s": medians["bare"],
        "app_tok_s": medians["app"],
        "cost": medians["cost"],
        "app_share_of_a_core": medians["core"],
        "runs": rates,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args(arguments)
    os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
    os.environ.pop("NO_COLOR", None)
    results: list[Record] = []
    asyncio.run(responsiveness(args.lines, results))
    rows = [
        [
            r["what"],
            f"{r['median_ms']:.1f} ms" if "median_ms" in r else "",
            f"{r['worst_ms']:.1f} ms",
        ]
        for r in results
    ]
    print(table(rows, ["", "median", "worst"], "lrr"))
    cost = decoding(str(find_model(args.model)), args.runs, args.tokens, args.lines)
    results.append(cost)
    print(
        f"{cost['what']}: {cost['bare_tok_s']:.1f} tok/s bare, {cost['app_tok_s']:.1f} in the app:"
        f" a cost of {cost['cost']:.1%}; the app took {cost['app_share_of_a_core']:.1%} of one core"
    )
    save(args.json, {**setting(cited_command("app", arguments), "textual"), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
