"""Windows on narrow terminals: lines go on below where they began, and nothing is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static

from localrt import History
from localrt.tui import ChatApp
from localrt.tui.screens.dialogs import hanging
from tests.tui.conftest import asked, running, until
from tests.tui.test_models_screen import FakeLibrary
from tests.tui.test_models_switch import Shelf

LISTS = ("ctrl+o", "f4")  # of rows whose facts stand below a name
TITLE = "Hello, please tell me a long story about whales in the sea"


def rows(app: ChatApp) -> tuple[list[str], int]:
    """The lines of the window's list or page, and how many columns there are."""
    if found := app.screen.query(OptionList):
        widget = found.first()
        prompts = [widget.get_option_at_index(n).prompt for n in range(widget.option_count)]
        text = "\n".join(prompt.plain for prompt in prompts if isinstance(prompt, Content))
        return text.split("\n"), widget.scrollable_content_region.width
    scroll = app.screen.query_one(VerticalScroll)
    page = scroll.query_one(Static).visual
    assert isinstance(page, Content)
    return page.plain.split("\n"), scroll.scrollable_content_region.width


@pytest.mark.parametrize("key", ["ctrl+o", "f4", "f5", "f1"])
async def test_windows(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLibrary(monkeypatch)
    shelf = Shelf()
    async with running(
        shelf.first, size=(100, 24), load_by_name=shelf, history=lambda: History(tmp_path / "h.db")
    ) as (app, pilot):
        await asked(pilot, TITLE)
        await pilot.press(key)
        words: set[str] = set()
        for width in (100, 80, 40):
            await pilot.resize_terminal(width, 24)
            await until(pilot, lambda width=width: fits(app, width, indented=key in LISTS))
            lines, _ = rows(app)
            now = {word for line in lines for word in line.split()}
            assert words <= now, "nothing is cut off"  # F4 adds what it has planned
            words = now


def fits(app: ChatApp, width: int, *, indented: bool) -> bool:
    """Whether the window is as wide as this terminal lets it be, and its lines are no wider."""
    if len(app.screen_stack) < 2:
        return False
    lines, columns = rows(app)
    return (
        min(0.8 * width, 60) <= columns <= width - 4
        and all(cell_len(line) <= columns for line in lines)
        and not (indented and any(not line.startswith(("  ", "● ")) for line in lines))
    )


@given(st.text(st.sampled_from("ab 字\n"), max_size=60), st.integers(6, 20))
def test_hanging(text: str, width: int) -> None:
    lines = hanging(Content(text), width).plain
    assert all(cell_len(line.rstrip()) <= width for line in lines.split("\n"))
    assert "".join(lines.split()) == "".join(text.split())
