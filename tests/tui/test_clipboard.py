"""Copied text reaches the clipboard by the tool that is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from localrt.tui.clipboard import copied_by_tool
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel

scripts = pytest.mark.skipif(os.name == "nt", reason="the tools here are scripts of sh")
TEXT = "日本語 e\u0301 " * 30_000
VARIABLES = ("TMUX", "WAYLAND_DISPLAY", "DISPLAY", "SSH_CONNECTION")
X11 = {"DISPLAY": "x"}
SSH = {"SSH_CONNECTION": "x"}
TMUX = {"TMUX": "x"}
# What a tool does with the text that it has read.
ENDS = {
    "works": "sleep 60 &",  # as xclip, whose child keeps the text, and the output open
    "fails": "exit 1",
    "hangs": "exec sleep 60",
}


def environment(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tools: dict[str, str],
    variables: dict[str, str],
) -> None:
    """These tools alone, each with how it ends; it writes what it got to a file beside it."""
    for tool, end in tools.items():
        end = ENDS[end].replace("sleep", shutil.which("sleep") or "")
        script = folder / tool
        script.write_text(f"#!/bin/sh\n{shutil.which('cat')} > {folder}/{tool}.got\n{end}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@scripts
@pytest.mark.parametrize(
    ("tools", "variables", "taken"),
    [
        (["tmux", "wl-copy"], {"TMUX": "x", "WAYLAND_DISPLAY": "x"}, "tmux"),
        (["tmux"], TMUX | SSH, "tmux"),
        (["wl-copy", "xclip"], {"WAYLAND_DISPLAY": "x", "DISPLAY": "x"}, "wl-copy"),
        (["xclip", "xsel"], X11, "xclip"),
        (["xsel"], X11, "xsel"),
        (["pbcopy"], {}, "pbcopy"),
        (["clip.exe"], {}, "clip.exe"),
        (["xclip", "pbcopy"], X11 | SSH, None),
        (["xclip", "wl-copy"], {}, None),
        ([], X11 | TMUX, None),
    ],
)
def test_tools(
    tools: list[str],
    variables: dict[str, str],
    taken: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment(tmp_path, monkeypatch, dict.fromkeys(tools, "works"), variables)
    assert copied_by_tool(TEXT) is (taken is not None)
    assert [path.stem for path in tmp_path.glob("*.got")] == ([taken] if taken else [])
    if taken:
        encoding = "utf-16" if taken == "clip.exe" else "utf-8"
        assert (tmp_path / f"{taken}.got").read_bytes().decode(encoding) == TEXT


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmux = ["tmux", "-S", str(tmp_path / "socket")]
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", "sleep 60"], check=True)
    try:
        monkeypatch.setenv("TMUX", f"{tmp_path / 'socket'},1,0")
        assert copied_by_tool(TEXT)
        assert subprocess.check_output([*tmux, "show-buffer"]).decode() == TEXT
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


# -- what is said ----------------------------------------------------------------------------------

MAYBE = "Perhaps copied (if not, use /export): code block: python, 1 line"
DONE = "Copied code block: python, 1 line"


@scripts
@pytest.mark.parametrize(
    ("tools", "variables", "said"),
    [
        ({}, {}, MAYBE),
        ({}, X11, MAYBE),
        ({}, SSH, MAYBE),
        ({}, TMUX, MAYBE),
        ({}, {"TERM": "screen.xterm"}, MAYBE),
        ({"xclip": "works"}, X11, DONE),
        ({"xclip": "works"}, X11 | SSH, MAYBE),
        ({"xclip": "fails"}, X11, MAYBE),
        ({"xclip": "hangs"}, X11, MAYBE),
        ({"xclip": "fails", "xsel": "works"}, X11, DONE),
        ({"tmux": "works"}, TMUX | SSH, DONE),
        ({"tmux": "fails"}, TMUX | SSH, MAYBE),
        ({"tmux": "fails", "xclip": "works"}, TMUX | SSH | X11, MAYBE),
        ({"tmux": "fails", "xclip": "works"}, TMUX | X11, DONE),
        ({"clip.exe": "works"}, {}, DONE),
    ],
)
async def test_said(
    tools: dict[str, str],
    variables: dict[str, str],
    said: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That it is copied once a tool has done it; the terminal's own sequence may do nothing."""
    model.answer = ["```\n\n```\n\n```python\none line\n```"]
    if "hangs" in tools.values():
        monkeypatch.setattr("localrt.tui.clipboard._SECONDS", 0.1)
    async with running(model) as (app, pilot):
        await asked(pilot, "Hi")
        environment(tmp_path, monkeypatch, tools, variables)
        monkeypatch.setattr("localrt.tui.app.copied_by_tool", copied_by_tool)
        sent = list[str]()
        assert app._driver is not None
        monkeypatch.setattr(app._driver, "write", sent.append)
        await pilot.press("alt+y")
        await until(pilot, lambda: screen.hint(app).strip() == said)
        assert app.clipboard == "one line\n"
        assert any("52;c;b25lIGxpbmUK" in text for text in sent) is (said is MAYBE)


async def test_copies_in_order(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a tool, and nothing is said before it has ended; the last copy stays."""
    gate, copied = threading.Event(), list[str]()

    def tool(text: str) -> bool:
        assert text != "ls\n" or gate.wait(60)
        copied.append(text)
        return text != "ls\n"

    monkeypatch.setattr("localrt.tui.app.copied_by_tool", tool)
    model.answer = ["```\na = 1\n```\n\n```\nls\n```"]
    async with running(model) as (app, pilot):
        await asked(pilot, "Hi")
        await pilot.press("alt+y", "alt+y", "a", "shift+home", "ctrl+c")
        assert screen.composer(app).text == "a"
        assert (copied, screen.hint(app).strip()) == ([], "")
        gate.set()
        await until(pilot, lambda: screen.hint(app).strip() == "Copied what was selected")
        assert copied == ["ls\n", "a = 1\n", "a"]
        assert app.clipboard == "a"
