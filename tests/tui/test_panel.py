"""The live panel: what it says, when it looks; preferences and settings in the app."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Static

from localrt.engine.types import Metrics
from localrt.service.status import LaneUse, MemoryUse
from localrt.tui import ChatApp
from localrt.tui.chat.panel import (
    LivePanel,
    PanelData,
    lane_text,
    memory_text,
    side_lines,
    sparkline,
    strip_lines,
)
from localrt.tui.screens.dialogs import HelpScreen
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import (
    BEFORE,
    STREAMED,
    VIEW,
    FakeModel,
    WatchedModel,
)
from tests.tui.screen import idle

METRICS = replace(STREAMED.metrics or Metrics(), accepted_per_pass=1.0, accepted_by_source={})
PLAIN = replace(STREAMED, metrics=METRICS)  # no draft tokens change the rate
SLOW = {"ceiling_tok_s": 20.0}
RESIDENT = replace(STREAMED, streamed=False, last_pass=None, passes=None, ssd_read_bytes=None)
RESIDENT = replace(RESIDENT, token_bytes=97_000_000)
FLOW = RESIDENT.since(replace(RESIDENT, clock_s=9.0, tokens=0))
FIRST = PanelData(status=replace(BEFORE, generating=False, metrics=None, last_pass=None))
BETWEEN = replace(VIEW, status=replace(STREAMED, generating=False), reading=True)


@pytest.mark.parametrize(
    ("data", "said", "unsaid"),
    [
        (replace(VIEW, reading=True, percent=52), "Reading prompt 52 %", "41.2 tok/s"),
        (replace(VIEW, status=replace(STREAMED, **SLOW)), "1.8x the 22.9 possible without", ""),
        (replace(VIEW, status=replace(PLAIN, **SLOW)), "100 % of the 41.2 possible here", ""),
        (replace(VIEW, status=replace(PLAIN, predicted_tok_s=39.4)), "39.4 were forecast", ""),
        (replace(VIEW, status=replace(STREAMED, predicted_tok_s=39.4)), "", "forecast"),
        (
            replace(VIEW, status=replace(PLAIN, predicted_tok_s=39.4, streamed=False)),
            "",
            "forecast",
        ),
        (BETWEEN, "Live", "Guessed"),
        (
            PanelData(status=RESIDENT, flow=FLOW),
            "sets the pace, 97 MB per pass, 2.2 GB/s",
            "Last pass",
        ),
        (PanelData(status=RESIDENT, flow=FLOW), "", "SSD"),
        (FIRST, "No tokens yet", ""),
        (FIRST, "At most 66.0 tok/s", ""),
        (PanelData(), "loading", ""),
    ],
)
def test_side_panel(data: PanelData, said: str, unsaid: str) -> None:
    shown = " ".join(line.plain for line in side_lines(data, 38, 30))
    assert said in shown
    assert not unsaid or unsaid not in shown


def test_strip_without_a_rate() -> None:
    assert strip_lines(PanelData(), 60)[0].plain.startswith("The model is loading")
    reading = replace(VIEW, reading=True, percent=52)
    assert strip_lines(reading, 60)[0].plain.startswith("Reading prompt 52 %")


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


def test_small_drawings() -> None:
    assert sparkline([0, 1, 2, 4], 3) == "▃▅█"
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([1], 0) == ""
    assert lane_text(LaneUse("cpu", ((0.0, 0.5),)), 1.0, 4) == "██  "
    assert lane_text(LaneUse("cpu", ()), 0.0, 3) == "   "
    assert memory_text(MemoryUse(170_000_000, 18_000_000_000)) == "0.2/18 GB"
    assert memory_text(MemoryUse(5)) == "5 B"


async def test_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.tui.chat.panel._QUIET_S", 0.05)
    model = WatchedModel()
    model.hold()
    async with running(model, size=(100, 30)) as (app, pilot):
        await screen.say(pilot, "Hi")
        await pilot.press("f3")
        await asyncio.sleep(0.2)
        assert model.advised == 0, "never beside an answer"
        model.now = STREAMED
        model.release()
        await until(pilot, lambda: "110 MB more RAM" in str(panel(app).render()))
        await asked(pilot, "Hi")
        await asyncio.sleep(0.2)
        assert model.advised == 1


def panel(app: ChatApp) -> LivePanel:
    return app.query_one(LivePanel)


def config(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder


async def test_panel_remembered(tmp_path: Path) -> None:
    for expected in (False, True):
        async with running(WatchedModel(), size=(100, 30), config=tmp_path) as (app, pilot):
            await until(pilot, lambda app=app: idle(app))
            assert panel(app).is_open is expected
            await pilot.press("f3")
            await until(pilot, lambda app=app, was=expected: panel(app).is_open is not was)
    assert "panel" not in (tmp_path / "config.toml").read_text("utf-8")


async def test_panel_during_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.tui.chat.panel._SECONDS", 0.15)
    monkeypatch.setattr("localrt.tui.chat.panel._QUIET_S", 0.05)
    model = WatchedModel()
    async with running(model, size=(100, 30)) as (app, pilot):
        model.hold()
        await screen.say(pilot, "Hi")
        await asyncio.sleep(0.3)
        assert model.looks == []  # hidden: nobody looks
        model.allow(100)
        await until(pilot, lambda: idle(app))
        model.hold()
        await pilot.press("ctrl+l")
        await screen.say(pilot, "Hi")
        await asyncio.sleep(0.3)
        model.now = STREAMED
        model.allow(100)
        await until(pilot, lambda: idle(app) and "1.8 GB/s" in str(panel(app).render()))
        await until(pilot, lambda: "110 MB more RAM" in str(panel(app).render()))
        count = len(model.looks)
        await asyncio.sleep(0.2)
        assert 0 < len(model.looks) <= count + 1  # idle
        assert screen.conversation(app).region.width < 100
        await pilot.press("f3")
        await until(pilot, lambda: screen.conversation(app).region.width == 100)
        assert model.looks[-1] is False  # lanes are not recorded for nobody


async def test_preferences(tmp_path: Path) -> None:
    folder = config(
        tmp_path,
        'theme = "localrt-light"\nsystem = "Be brief."\n[generation]\ntemperature = 0.3\n'
        '[keys]\npanel = "f9"\n',
    )
    model = FakeModel()
    async with running(model, size=(100, 30), config=folder) as (app, pilot):
        assert app.theme == "localrt-light"
        assert model.last_chat.system == "Be brief."
        assert model.last_chat.options == {"temperature": 0.3}
        await pilot.press("f3")
        await pilot.pause()
        assert not panel(app).is_open
        await pilot.press("f9")
        await until(pilot, lambda: panel(app).is_open)
        assert "F9 hides" in str(panel(app).render())
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        page = "".join(str(each.render()) for each in app.screen.query(Static))
        assert "F9" in page


async def test_bad_preferences(tmp_path: Path) -> None:
    text = 'theme = "mauve"\n[keys]\nnwe = "ctrl+l"\nnew = "q"\n'
    async with running(FakeModel(), size=(100, 30), config=config(tmp_path, text)) as (
        app,
        pilot,
    ):
        told = screen.notices(app, "error")
        assert len(told) == 3
        assert "No theme 'mauve'" in told[0]
        assert "did you mean new?" in told[1]
        assert "is for typing" in told[2]
        await asked(pilot, "Hi")
    assert (tmp_path / "config.toml").read_text("utf-8") == text


async def test_bad_config_file(tmp_path: Path) -> None:
    async with running(FakeModel(), size=(100, 30), config=config(tmp_path, "theme = ")) as (
        app,
        pilot,
    ):
        assert "is not TOML" in screen.notices(app, "error")[0]
        await pilot.press("f3")
        await until(pilot, lambda: panel(app).is_open and len(screen.notices(app, "error")) > 1)
        assert "Not saved" in screen.notices(app, "error")[1]
    assert (tmp_path / "config.toml").read_text("utf-8") == "theme = "


async def test_adapter(tmp_path: Path) -> None:
    model = FakeModel()
    model.adapters = ("style", "facts")
    async with running(model, size=(100, 30), config=tmp_path) as (app, pilot):
        await screen.say(pilot, "/adapter")
        assert screen.notices(app)[-1].split() == ["style", "facts"]
        await screen.say(pilot, "/adapter facts")
        assert "+facts" in screen.notices(app)[-1]
        assert model.last_chat.options["adapter"] == "facts"
        await screen.say(pilot, "/adapter")
        assert "> facts" in screen.notices(app)[-1]
        await screen.say(pilot, "/adapter none")
        assert "+" not in screen.notices(app)[-1]


async def test_settings_and_presets(tmp_path: Path) -> None:
    (tmp_path / "presets.toml").write_text('[Review]\nsystem = "You review."\nseed = 3\n')
    config(tmp_path, 'system = "Be brief."\n[generation]\ntemperature = 0.3\nmin_p = 0.1\n')
    model = FakeModel()
    given: dict[str, Any] = {"system": "Be long.", "options": {"temperature": 0.9}}
    async with running(model, size=(100, 30), config=tmp_path, **given) as (app, pilot):
        # The command line counts more than preferences.
        assert model.last_chat.system == "Be long."
        assert model.last_chat.options == {"temperature": 0.9, "min_p": 0.1}
        await screen.say(pilot, "/preset")
        assert "Review: seed 3, “You review.”" in screen.notices(app)[-1]
        await screen.say(pilot, "/preset review")
        assert model.last_chat.options == {"seed": 3}
        assert model.last_chat.system == "You review."
        await screen.say(pilot, "/preset nothing")
        assert "available: Review" in screen.notices(app, "error")[-1]


async def test_no_config_folder() -> None:
    async with running(FakeModel(), size=(100, 30)) as (app, pilot):
        await pilot.press("f3")
        app.remember(theme="nord")
        await until(pilot, lambda: panel(app).region.x > 0)
        assert screen.notices(app, "error") == []
        await pilot.resize_terminal(60, 24)
        await until(pilot, lambda: panel(app).region.x == 0)
        assert panel(app).region.height < 10
        assert screen.composer(app).region.width > 50
