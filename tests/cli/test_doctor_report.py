"""The file for an issue: it says what helps, and nothing private."""

from __future__ import annotations

import getpass
import platform
import shutil
import tempfile
from pathlib import Path

import pytest

from localrt.cli import main
from localrt.common.settings import Settings
from localrt.hub.cache import note_use
from localrt.tui.terminal import write_report

SECRET = "hunter2"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with what is private in every place that localrt knows of."""
    folder = tmp_path / SECRET
    for name in ("LOCALRT_CACHE", "HF_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(folder / name))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(folder))
    for name in ("HF_TOKEN", "LOCALRT_API_KEY", "OPENAI_API_KEY", "HF_ENDPOINT"):
        monkeypatch.setenv(name, f"https://{SECRET}")
    monkeypatch.setattr(getpass, "getuser", lambda: f"{SECRET}-user")
    monkeypatch.setattr(platform, "node", lambda: f"{SECRET}-host.example")
    monkeypatch.setattr(platform, "release", lambda: f"6.1-{SECRET}-host")
    settings = Settings.from_environment()
    settings.config_dir.mkdir(parents=True)
    (settings.config_dir / "config.toml").write_text(
        f'system = "{SECRET}"\n[models]\n{SECRET} = "smollm2"\n'
        f'[mcp.servers.{SECRET}]\nurl = "https://{SECRET}"\nheaders = {{ key = "{SECRET}" }}\n'
    )
    for name in ("history.db", "draft.txt", "last-run.json"):
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        (settings.data_dir / name).write_text(SECRET)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/nowhere")  # or the model is not listed
    model = folder / "mine.gguf"
    model.write_bytes(b"GGUF")
    note_use(str(model), settings)
    plugin = folder / "plugin.py"
    plugin.write_text(f"def crash():\n    raise ValueError('{SECRET}')\n")
    code: dict[str, object] = {"Path": Path}
    exec(compile(plugin.read_text("utf-8"), plugin, "exec"), code)
    try:
        code["crash"]()  # type: ignore[operator]
    except ValueError as error:
        write_report(error, settings.data_dir)
    return folder


def test_nothing_private_is_in_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.txt"
    assert main(["doctor", "--quick", "--report", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{path} has ")
    assert told.count("\n") == 1
    text = path.read_text(encoding="utf-8")
    assert SECRET not in text
    assert str(Path.home()) not in text
    for harmless in ("kernels", "mine.gguf", "HF_TOKEN", "LOCALRT_CACHE", "ValueError", "in crash"):
        assert harmless in text


def test_it_replaces_only_a_report(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.txt"
    path.write_bytes(b"\xff")
    assert main(["doctor", "--quick", "--report", str(path)]) == 2
    assert path.read_bytes() == b"\xff"
    assert "is there already: give --report another name" in capsys.readouterr().err
    path.unlink()
    for _ in range(2):
        assert main(["doctor", "--quick", "--report", str(path)]) == 0
    shutil.rmtree(home)
    path.unlink()
    path.mkdir()
    assert main(["doctor", "--quick", "--report", str(path)]) == 1
