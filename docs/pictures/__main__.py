"""Pictures of the app for the docs: a model under a memory limit that it exceeds, and a question.

    python -m docs.pictures [MODEL] [--ram 700MB] [--out docs]

``chat.svg`` is the screen when the answer has ended, ``recording.svg`` shows how it came there:
loading, streaming, the live panel. The app and the model are real; a recording is played faster
than it went, and its title says how much.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from textual.app import App
from textual.pilot import Pilot

import localrt
from docs.pictures.terminal_svg import Frame, svg
from localrt.common.settings import Settings
from localrt.hub import resolve
from localrt.tui import ChatApp
from localrt.tui.chat.bars import Footer, Phase
from localrt.tui.chat.blocks import AnswerBlock
from localrt.tui.chat.composer import Composer
from localrt.tui.chat.view import ConversationView

SIZE = (112, 38)
QUESTION = """\
Make it sort in descending order. Change nothing else:

def merge(left, right):
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]"""
OPTIONS = {"seed": 1, "temperature": 0.0, "max_tokens": 400}
_EVERY_S = 2.0  # seconds between two frames
_FASTER = 4
_BEFORE_PANEL = 40  # characters of the answer
_LAST_S = 6.0  # seconds that the last frame stays, as played


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="qwen2.5-coder:1.5b")
    parser.add_argument("--ram", default="700MB")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args(arguments)
    # Colours as on a modern terminal, wherever this runs.
    os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
    os.environ.pop("NO_COLOR", None)
    asyncio.run(
        _draw(resolve(args.model, settings=Settings.from_environment()).path, args.ram, args.out)
    )
    return 0


async def _draw(model: Path, ram: str, out: Path) -> None:
    load = {"ram": ram, "ctx": 4096}
    app = ChatApp(
        lambda progress: localrt.load(str(model), progress=progress, **load),
        model_name=str(model),
        system=None,
        options=OPTIONS,
    )
    frames: list[Frame] = []
    async with app.run_test(size=SIZE) as pilot:
        footer = app.query_one(Footer)
        composer = app.query_one(Composer)
        composer.cursor_blink = False

        async def until(condition: Callable[[], bool]) -> None:
            """Take frames until then."""
            while not condition():
                if footer.status.phase is Phase.FAILED:
                    sys.exit(f"the model did not load: {app.failure}")
                began = time.monotonic()
                await pilot.pause(_EVERY_S)
                frames.append(_frame(app, time.monotonic() - began))

        await until(lambda: footer.status.phase is Phase.READY)
        composer.insert(QUESTION)
        await _pause(pilot, frames, 6.0)
        await pilot.press("enter")
        blocks = app.query_one(ConversationView).blocks
        await until(
            lambda: isinstance(blocks[-1], AnswerBlock) and len(blocks[-1].source) > _BEFORE_PANEL
        )
        await pilot.press("f3")
        await until(lambda: footer.status.phase is Phase.READY)
        await pilot.pause(2.0)  # what would help is asked for when it is quiet
        await _pause(pilot, frames, _LAST_S * _FASTER)
        theme = app.ansi_theme
    still = f"localrt chat {model.name} --ram {ram}"
    played = [Frame(frame.lines, frame.seconds / _FASTER) for frame in frames]
    out.mkdir(parents=True, exist_ok=True)
    for name, shown, title in (
        ("chat.svg", played[-1:], still),
        ("recording.svg", played, f"{still}, played {_FASTER} times as fast"),
    ):
        (out / name).write_text(svg(shown, title, theme), encoding="utf-8")


async def _pause(pilot: Pilot[None], frames: list[Frame], seconds: float) -> None:
    """One frame that stays for so long, without waiting for it."""
    await pilot.pause()
    frames.append(_frame(pilot.app, seconds))


def _frame(app: App[None], seconds: float) -> Frame:
    return Frame(app.screen._compositor.render_strips(), seconds)


if __name__ == "__main__":
    sys.exit(main())
