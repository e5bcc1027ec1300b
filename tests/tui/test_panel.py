"""The live panel: what it says, when it looks, and that it fits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult

from localrt.service.status import LaneUse, MemoryUse
from localrt.tui.chat.panel import LivePanel
from localrt.tui.chat.panel_lines import (
    PanelData,
    lane_text,
    memory_text,
    side_lines,
    sparkline,
    strip_lines,
)
from tests.tui.conftest import until
from tests.tui.fakes import FakeModel
from tests.tui.panel_fakes import BEFORE, STREAMED, VIEW, WatchedModel


class Bare(App[None]):
    CSS_PATH = Path(__file__).parents[2] / "tui" / "app.tcss"

    def __init__(self) -> None:
        super().__init__()
        self.panel = LivePanel(hide="F3")

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_resize(self, event: Any) -> None:
        self.panel.fit(event.size)


def text(data: PanelData, width: int = 38, height: int = 30) -> str:
    return "\n".join(line.plain for line in side_lines(data, width, height))


def test_side_panel() -> None:
    shown = text(VIEW)
    for part in (
        "41.2 tok/s",
        "62 % of 66.0 possible without drafts",
        "138/145 MB",
        "3.2/189 MB",
        "1.8 GB/s",
        "44 MB per pass",
        "Guessed 41 %",
        "1.8 tokens per pass",
        "waited 14 ms, 70 %",
        "95 %",
        "The disk sets the pace, busy 97 % of",
        "110 MB more RAM",
        "3.8x",
        "F3 hides",
    ):
        assert part in shown, part


def test_reading_prompt() -> None:
    reading = replace(VIEW, reading=True, percent=52)
    assert "Reading prompt 52 %" in text(reading)
    assert strip_lines(reading, 60)[0].plain.startswith("Reading prompt 52 %")
    assert "tok/s" not in text(reading).partition("At most")[0]


def test_ceiling_exceeded() -> None:
    beaten = replace(STREAMED, ceiling_tok_s=20.0)
    assert "1.8x the 22.9 possible without drafts" in text(replace(VIEW, status=beaten))
    assert STREAMED.metrics is not None
    metrics = replace(STREAMED.metrics, accepted_per_pass=1.0, accepted_by_source={})
    unguessed = replace(beaten, metrics=metrics)
    assert "100 % of the 41.2 possible here" in text(replace(VIEW, status=unguessed))


def test_new_answer() -> None:
    between = replace(VIEW, status=replace(STREAMED, generating=False), reading=True)
    shown = text(between)
    assert shown.startswith("Live")
    assert "Guessed" not in shown


def test_resident_model() -> None:
    resident = replace(STREAMED, streamed=False, last_pass=None, passes=None, ssd_read_bytes=None)
    resident = replace(resident, token_bytes=97_000_000)
    before = replace(resident, clock_s=9.0, tokens=0)
    shown = text(PanelData(status=resident, flow=resident.since(before)))
    assert "Last pass" not in shown
    assert "SSD" not in shown
    assert "sets the pace, 97 MB per pass, 2.2 GB/s" in shown.replace("\n", " ")


def test_before_first_answer() -> None:
    idle = replace(BEFORE, generating=False, metrics=None, last_pass=None)
    assert "No tokens yet" in text(PanelData(status=idle))
    assert "At most 66.0 tok/s" in text(PanelData(status=idle))
    assert "loading" in text(PanelData())
    assert "loading" in strip_lines(PanelData(), 60)[0].plain


@given(st.integers(20, 60), st.integers(3, 40))
def test_side_fits(width: int, height: int) -> None:
    lines = side_lines(VIEW, width, height)
    assert len(lines) <= height
    assert all(line.cell_length <= width for line in lines)


@given(st.integers(40, 100))
def test_strip_fits(width: int) -> None:
    lines = strip_lines(VIEW, width)
    assert len(lines) <= 6
    assert all(line.cell_length <= width for line in lines)


def test_strip() -> None:
    shown = "\n".join(line.plain for line in strip_lines(VIEW, 60))
    for part in ("41.2 tok/s", "138/145 MB", "waited 70 %", "1.8 GB/s", "The disk sets the pace"):
        assert part in shown, part
    assert "110 MB more RAM: 3.8x" in shown


def test_small_drawings() -> None:
    assert sparkline([0, 1, 2, 4], 3) == "▃▅█"
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([1], 0) == ""
    assert lane_text(LaneUse("cpu", ((0.0, 0.5),)), 1.0, 4) == "██  "
    assert lane_text(LaneUse("cpu", ()), 0.0, 3) == "   "
    assert memory_text(MemoryUse(170_000_000, 18_000_000_000)) == "0.2/18 GB"
    assert memory_text(MemoryUse(5)) == "5 B"


async def test_advice() -> None:
    app, model = Bare(), WatchedModel()
    async with app.run_test(size=(100, 30)) as pilot:
        panel = app.panel
        panel.take(model)  # type: ignore[arg-type]
        panel.begin()
        panel.show(True)
        await asyncio.sleep(0.3)
        assert model.advised == 0
        model.now = STREAMED
        panel.end()
        await until(pilot, lambda: panel.data.outlook is not None)
        panel.begin()
        panel.end()
        await pilot.pause(0.1)
        assert model.advised == 1
        assert "110 MB more RAM" in str(panel.render())


async def test_rates() -> None:
    app, model = Bare(), WatchedModel()
    async with app.run_test(size=(100, 30)) as pilot:
        panel = app.panel
        panel.take(model)  # type: ignore[arg-type]
        panel.show(True)
        await pilot.pause()
        panel.begin()
        panel._look()
        assert "tok/s  " not in str(panel.render())
        model.now = STREAMED
        panel._look()
        assert panel.data.flow is not None
        assert panel.data.flow.tok_s == 40
        assert list(panel.data.rates) == [40]
        assert "1.8 GB/s" in str(panel.render())


async def test_no_status() -> None:
    app = Bare()
    async with app.run_test(size=(100, 30)) as pilot:
        app.panel.show(True)
        app.panel.take(FakeModel())  # type: ignore[arg-type]
        app.panel.begin()
        app.panel.end()
        await pilot.pause()
        assert "loading" in str(app.panel.render())
