"""How long the app and the page take over huge answers and long lists, and for how long nothing
else is done meanwhile.

    python -m tests.tui.growth [--megabytes 2] [--turns 3000] [--conversations 20000]

Each row is one thing that a user does: the seconds until its result is on the screen, and the
longest time in which the event loop takes no key. It asks no model.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import Selection

from localrt import Conversation, History
from localrt.history.database import insert
from localrt.server import conversations as page
from localrt.tui import ChatApp
from localrt.tui.chat.blocks import AnswerBlock
from localrt.tui.screens.dialogs import ConversationsScreen
from tests.tui import screen
from tests.tui.conftest import app_for
from tests.tui.fakes import FakeLoader, FakeModel

_SIZE = (100, 40)
_QUIET_S = 0.3  # in which what an action leaves to be done is also done


def _blocks(size: int) -> str:
    """Small blocks of every kind."""
    parts, length, number = list[str](), 0, 0
    while length < size:
        number += 1
        kinds = (
            f"## Part {number}",
            f"Paragraph {number} has **bold** words, `code` and a few more to fill a line.",
            f"- item {number}\n- another with *em*\n- a third",
            f"```python\nresult = compute({number})\n```",
            f"It goes on in paragraph {number}, with [a link](https://example.org/{number}).",
        )
        parts.append(kinds[number % 5])
        length += len(parts[-1]) + 2
    return "\n\n".join(parts)


def _lines(size: int, line: str) -> str:
    return "\n".join(line.format(number) for number in range(size // len(line)))


def _answers(size: int) -> dict[str, tuple[str, str]]:
    """Answers by kind, and a word in each."""
    rows = _lines(size, "| cell {0} | **some** words |")
    return {
        "small blocks": (_blocks(size), "paragraph 77"),
        "one fence": (f"```python\n{_lines(size, 'x_{0} = compute({0}, 3)')}\n```", "(77"),
        "one paragraph": (_lines(size, "word{0} **bold**").replace("\n", " "), "word77"),
        "one table": (f"| a | b |\n|---|---|\n{rows}", "cell 77"),
        "one list": (_lines(size, "- item {0} of a list with `code`"), "item 77"),
    }


class Heartbeat:
    """Beats in the event loop; ``longest`` is the longest pause between two beats."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now

    def stop(self) -> float:
        self._task.cancel()
        return self.longest


async def measured(name: str, act: Callable[[], Any], shown: Callable[[], object]) -> None:
    """Do something and wait until it is ``shown``, then print a row."""
    beat = Heartbeat()
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    found = act()
    if inspect.isawaitable(found):
        await found
    while not shown():
        await asyncio.sleep(0.001)
    took = time.perf_counter() - began
    await asyncio.sleep(_QUIET_S)
    print(f"| {name} | {took:.2f} | {beat.stop():.3f} |", flush=True)


@asynccontextmanager
async def started(file: Path) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    app = app_for(FakeLoader(FakeModel()), history=lambda: History(file))
    async with app.run_test(size=_SIZE) as pilot:
        while not screen.idle(app):
            await asyncio.sleep(0.005)
        yield app, pilot


def _count(app: ChatApp) -> str:
    return str(app.query_one("#find-count").render())


def opening(app: ChatApp, kept: Conversation) -> Callable[[], None]:
    return lambda: app.chat.open_conversation(lambda: app.state.open(kept.id))


async def answer(file: Path, kind: str, text: str, word: str) -> None:
    """What is done with one answer, in the app."""
    with History(file) as history:
        kept = history.new(model="tiny", system=None)
        kept.add("user", "Hi")
        kept.add("assistant", text)
    async with started(file) as (app, _):
        view = screen.conversation(app)
        here = lambda: screen.shown(app).strip()  # noqa: E731
        await measured(f"{kind}: open", opening(app, kept), lambda: view.virtual_size.height > 999)
        size = view.size

        def narrower() -> None:
            app.chat.panel.show(True)

        def half() -> None:
            view.scroll_to(y=view.max_scroll_y // 2, animate=False)

        def home() -> None:
            view.scroll_home(animate=False)

        def grows() -> None:
            block = next(each for each in view.blocks if isinstance(each, AnswerBlock))
            block.reopen()
            block.write(text)
            block.write("\n\nMore of it.")
            view.changed(block)
            view.follow()

        def selected() -> Any:
            app.chat.selections = {view: Selection(None, Offset(9, 3000))}
            return app.chat.action_interrupt()

        await measured(f"{kind}: resize", narrower, lambda: view.size != size)
        await measured(f"{kind}: go to the middle", half, lambda: here() and view.scroll_y)
        await measured(f"{kind}: go to the start", home, lambda: view.scroll_y == 0)
        search = lambda: app.chat.action_find(word)  # noqa: E731
        await measured(f"{kind}: find", search, lambda: " of " in _count(app))
        await measured(f"{kind}: copy 3,000 lines", selected, lambda: len(app.clipboard) > 9999)
        await measured(f"{kind}: copy", app.chat.action_copy, lambda: app.clipboard == text)
        await measured(f"{kind}: it grows", grows, lambda: "More of it." in here())
        fork = app.chat.action_fork
        await measured(f"{kind}: fork", fork, lambda: app.chat.queue.conversation.id != kept.id)
        await asyncio.sleep(0.2)


async def long_conversation(file: Path, turns: int) -> None:
    with History(file) as history, history._database.transaction():
        kept = history.new(model="tiny", system=None)
        for number in range(turns):
            kept.add("assistant" if number % 2 else "user", f"Turn {number} has words.")
    async with started(file) as (app, _):
        name, chat = f"{turns:,} turns", app.chat
        await measured(f"{name}: open", opening(app, kept), lambda: screen.answers(app))
        search = lambda: chat.action_find("words")  # noqa: E731
        await measured(f"{name}: find", search, lambda: f"of {turns}" in _count(app))
        again = chat.action_retry
        await measured(f"{name}: retry", again, lambda: "Hello" in screen.shown(app))
        fork = chat.action_fork
        await measured(f"{name}: fork", fork, lambda: chat.queue.conversation.id != kept.id)
        await asyncio.sleep(0.2)


async def many_conversations(file: Path, conversations: int) -> None:
    draw = random.Random(1)
    words = [f"word{number}" for number in range(3000)]
    with History(file) as history, history._database.transaction() as connection:
        for number in range(conversations):
            facts = {"id": f"{number:032x}", "title": f"Talk {number}", "model": "tiny"}
            insert(
                connection, "conversation", **facts, options="{}", created=number, updated=number
            )
            for role in ("user", "assistant"):
                said = " ".join(draw.choices(words, k=60))
                place = {"conversation": facts["id"], "parent": None, "created": number}
                insert(
                    connection, "turn", **place, role=role, content=said, state="done", info="{}"
                )
    async with started(file) as (app, pilot):
        app.chat.action_conversations()
        while not isinstance(app.screen, ConversationsScreen):
            await asyncio.sleep(0.01)
        shown, name = app.screen, f"{conversations:,} conversations"
        while not shown.items:
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * _QUIET_S)

        def search() -> None:
            shown.line.value = "word1"

        found = lambda: "word1" in getattr(shown.chosen, "snippet", "")  # noqa: E731
        await measured(f"{name}: search", search, found)
        pinned = lambda: getattr(shown.chosen, "pinned", False)  # noqa: E731
        await measured(f"{name}: pin", shown.action_pin, pinned)
        shown.dismiss(None)
        await pilot.pause()


def on_page(file: Path, kind: str, text: str) -> None:
    """What the server does for the page: its work in a thread, without the browser's."""
    with History(file) as history:
        kept = history.new(model="tiny", system=None)
        kept.add("user", "Hi")
        kept.add("assistant", text)
        answers: Any = SimpleNamespace(history=history, history_of=lambda id: history, running={})
        request: Any = SimpleNamespace(path_params={"id": kept.id}, query_params={})

        async def look() -> None:
            for what in ("open", "look again"):
                work = asyncio.to_thread(page.items, answers, request, {})
                await measured(f"{kind}: {what} (page)", lambda work=work: work, lambda: True)

        asyncio.run(look())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3000)
    parser.add_argument("--conversations", type=int, default=20_000)
    given = parser.parse_args()
    print("| what | seconds | longest hold, seconds |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, (text, word) in _answers(int(given.megabytes * 1e6)).items():
            asyncio.run(answer(folder / "answers.db", kind, text, word))
            on_page(folder / "answers.db", kind, text)
        asyncio.run(long_conversation(folder / "turns.db", given.turns))
        asyncio.run(many_conversations(folder / "list.db", given.conversations))


if __name__ == "__main__":
    main()
