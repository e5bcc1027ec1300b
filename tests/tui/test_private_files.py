"""What the app writes while it is used, nobody else may read, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import localrt
from localrt import History, Settings
from localrt.cli import main
from localrt.common.progress import ProgressCallback
from localrt.quant.cpu.abi import find_library
from localrt.tui import ChatApp
from localrt.tui.chat.composer import edited
from localrt.tui.preferences import Preset
from tests.tui import screen
from tests.tui.conftest import SIZE, asked, until
from tests.tui.screen import idle

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX's"),
    pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built"),
]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Data, cache and config folders that are not there yet, under a umask that hides nothing."""
    monkeypatch.delenv("LOCALRT_CACHE", raising=False)
    monkeypatch.setenv("LOCALRT_KV_DISK", "1GB")
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    before = os.umask(0)
    yield Settings.from_environment()
    os.umask(before)


def shared(settings: Settings) -> list[str]:
    """What others may read or enter of the three folders."""
    tops = (settings.data_dir, settings.cache_dir, settings.config_dir)
    return [
        f"{path}: {stat.S_IMODE(path.stat().st_mode):o}"
        for top in tops
        for path in (top, *top.rglob("*"))
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]


async def test_app(tiny_folder: Path, folders: Settings, tmp_path: Path) -> None:
    def load(progress: ProgressCallback) -> localrt.Model:
        return localrt.load(tiny_folder, ctx=512)

    app = ChatApp(
        load,
        model_name="tiny",
        system="Be brief.",
        options={"max_tokens": 4},
        history=History,
        config=folders.config_dir,
    )
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await asked(pilot, "a secret " * 20)
        await screen.say(pilot, f"/export {tmp_path / 'chat.md'}")
        await until(pilot, lambda: (tmp_path / "chat.md").exists())
        app.preferences.change({"system": "a secret"})
        app.state.presets.save(Preset("mine", "a secret"))
        await pilot.press("ctrl+n")  # parks the conversation
        await asked(pilot, "another secret")
        assert shared(folders) == []  # while it runs: SQLite's own files too
    written = {
        path.name
        for top in (folders.data_dir, folders.cache_dir, folders.config_dir)
        for path in top.rglob("*")
    }
    assert {"history.db", "tokens.json", "blocks.bin", "config.toml", "presets.toml"} <= written
    assert shared(folders) == []
    assert stat.S_IMODE((tmp_path / "chat.md").stat().st_mode) == 0o600


def test_editor(folders: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\nls -ld "$1" "$(dirname "$1")" | cut -c1-10 > "$1.rights"\n')
    script.write_text(script.read_text("utf-8") + 'cat "$1.rights" >> "$1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(script))
    assert edited("a secret\n").split() == ["a", "secret", "drwx------", "-rw-------"]


def test_run(tiny_folder: Path, folders: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", str(tiny_folder), "a secret", "--max-tokens", "2", "--ctx", "256"]) == 0
    assert (folders.data_dir / "last-run.json").exists()
    assert shared(folders) == []
