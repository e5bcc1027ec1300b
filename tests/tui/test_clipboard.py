"""Copied text reaches the clipboard by the tool that is there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from localrt.tui.clipboard import copied_by_tool
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel

scripts = pytest.mark.skipif(os.name == "nt", reason="the tools here are scripts of sh")
TEXT = "日本語 e\u0301 " * 30_000
VARIABLES = ("TMUX", "WAYLAND_DISPLAY", "DISPLAY", "SSH_CONNECTION")


@scripts
@pytest.mark.parametrize(
    ("tools", "variables", "taken"),
    [
        (["tmux", "wl-copy"], {"TMUX": "x", "WAYLAND_DISPLAY": "x"}, "tmux"),
        (["tmux"], {"TMUX": "x", "SSH_CONNECTION": "x"}, "tmux"),
        (["wl-copy", "xclip"], {"WAYLAND_DISPLAY": "x", "DISPLAY": "x"}, "wl-copy"),
        (["xclip", "xsel"], {"DISPLAY": "x"}, "xclip"),
        (["xsel"], {"DISPLAY": "x"}, "xsel"),
        (["pbcopy"], {}, "pbcopy"),
        (["clip.exe"], {}, "clip.exe"),
        (["xclip", "pbcopy"], {"DISPLAY": "x", "SSH_CONNECTION": "x"}, None),
        (["xclip", "wl-copy"], {}, None),
        ([], {"DISPLAY": "x", "TMUX": "x"}, None),
    ],
)
def test_tools(
    tools: list[str],
    variables: dict[str, str],
    taken: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cat, sleep = shutil.which("cat"), shutil.which("sleep")
    for tool in tools:  # as xclip, each leaves a child with the output open
        script = tmp_path / tool
        script.write_text(f"#!/bin/sh\n{cat} > {tmp_path}/{tool}.got\n{sleep} 20 &\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
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


@pytest.mark.parametrize(("term", "doubted"), [("xterm", False), ("screen.xterm", True)])
async def test_said(
    term: str, doubted: bool, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    model.answer = ["```\n\n```\n\n```python\none line\n```"]
    async with running(model) as (app, pilot):
        await asked(pilot, "Hi")
        await pilot.press("alt+y")
        said = "/export writes a file" if doubted else "Copied code block: python, 1 line"
        await until(pilot, lambda: screen.hint(app).strip().endswith(said))
        assert app.clipboard == "one line\n"
