"""Copied text reaches the clipboard by the tool that is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from textual.app import App

from localrt.tui.terminal import copied_by_tool
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel

TEXT = "日本語 e\u0301 " * 30_000
WAYLAND = {"WAYLAND_DISPLAY": "x"}
X11 = {"DISPLAY": "x"}
SSH = {"SSH_CONNECTION": "x"}
TMUX = {"TMUX": "x"}
# What a tool does with the text that it has read.
ENDS = {
    "works": "sleep 60 &",  # as xclip, whose child keeps the text, and the output open
    "fails": "exit 1",
    "hangs": "exec sleep 60",
}


@pytest.mark.skipif(os.name == "nt", reason="the tools here are scripts of sh")
@pytest.mark.parametrize(
    ("tools", "variables", "taken"),
    [
        ("tmux wl-copy", TMUX | WAYLAND, "tmux"),
        ("tmux", TMUX | SSH, "tmux"),
        ("wl-copy xclip", WAYLAND | X11, "wl-copy"),
        ("xclip xsel", X11, "xclip"),
        ("xsel", X11, "xsel"),
        ("pbcopy", {}, "pbcopy"),
        ("clip.exe", {}, "clip.exe"),
        ("xclip pbcopy", X11 | SSH, None),
        ("xclip wl-copy", {}, None),
        ("", X11 | TMUX, None),
        ("xclip:fails", X11, None),
        ("xclip:hangs", X11, None),
        ("xclip:fails xsel", X11, "xsel"),
        ("tmux:fails xclip", TMUX | X11, "xclip"),
        ("tmux:fails xclip", TMUX | SSH | X11, None),
    ],
)
def test_tools(
    tools: str,
    variables: dict[str, str],
    taken: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These alone are there; each writes what it gets to a file beside it."""
    ends = {name: end or "works" for name, _, end in (t.partition(":") for t in tools.split())}
    for tool, end in ends.items():
        line = ENDS[end].replace("sleep", shutil.which("sleep") or "")
        script = tmp_path / tool
        script.write_text(f"#!/bin/sh\n{shutil.which('cat')} > {tmp_path}/{tool}.got\n{line}\n")
        script.chmod(0o755)
    if "hangs" in ends.values():
        monkeypatch.setattr("localrt.tui.terminal._SECONDS", 0.1)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in (TMUX | WAYLAND | X11 | SSH).keys() - variables.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert copied_by_tool(TEXT) is (taken is not None)
    got = [path.stem for path in tmp_path.glob("*.got") if ends[path.stem] == "works"]
    assert got == ([taken] if taken else [])
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


@pytest.mark.parametrize(
    ("copied", "said"), [(True, "Copied"), (False, "Perhaps copied (if not, use /export):")]
)
async def test_said(
    copied: bool, said: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it is copied once a tool has done it; the terminal's own sequence may do nothing."""
    model.answer = ["```\n\n```\n\n```python\none line\n```"]
    async with running(model) as (app, pilot):
        await asked(pilot, "Hi")
        monkeypatch.setattr("localrt.tui.app.copied_by_tool", lambda text: copied)
        sent = list[str]()
        monkeypatch.setattr(App, "copy_to_clipboard", lambda app, text: sent.append(text))
        await pilot.press("alt+y")
        hint = f"{said} code block: python, 1 line"
        await until(pilot, lambda: screen.hint(app).strip() == hint)
        assert app.clipboard == "one line\n"
        assert sent == ([] if copied else ["one line\n"])


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
