"""A model's files are parsed by a confined process before this one parses them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localrt.cli import main
from localrt.common.errors import CheckpointError
from localrt.common.settings import Settings
from localrt.hub import resolve_adapter
from localrt.models import first_opening
from localrt.models.first_opening import check_first
from tests.models.make_gguf import write_tiny_gguf

ROOT = Path(__file__).parents[2]
PRINTS = "print('with a limit', flush=True); "


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands of the processes that were started; one of ``answers`` instead of ours."""
    started: list[list[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], *pipes: object, **options: object) -> object:
        if any("first_opening" in each for each in command):
            started.append(command)
        return popen(command, *pipes, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(first_opening, "has_helpers", lambda: True)
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    return started


def runs_instead(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``code`` run in the place of the process's ``main``."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv.pop(1); {code}"
    own = first_opening.helper_command
    monkeypatch.setattr(
        first_opening,
        "helper_command",
        lambda *arguments: [sys.executable, "-c", code, *own(*arguments)[-len(arguments) :]],
    )


def test_files_are_parsed_once(tiny_folder: Path, tmp_path: Path, starts: list[list[str]]) -> None:
    """A folder and a GGUF file, and again after a change of one alone."""
    gguf = write_tiny_gguf(tiny_folder, tmp_path / "tiny.gguf", "llama")
    cache = tmp_path / "cache"
    lines = [check_first(path, cache) for path in (tiny_folder, gguf)]
    assert lines[0].endswith("tensors, config, tokenizer")
    assert lines[1].endswith("tensors, config")  # it has none
    for line in lines:
        assert line.startswith("at first opening, on 20")
    assert [check_first(path, cache) for path in (tiny_folder, gguf)] == lines
    assert len(starts) == 2
    gguf.write_bytes(gguf.read_bytes() + b"0")
    for path in (tiny_folder, gguf):
        check_first(path, cache)
    assert len(starts) == 3


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.abort()", "Abort" if os.name != "nt" else ""),
        ("raise IndexError('7 of 3')", "IndexError: 7 of 3"),
    ],
    ids=["abort", "error"],
)
def test_what_ends_that_process_is_refused(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line that says why, and nothing is recorded."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    runs_instead(f"import os; {PRINTS}exec({code!r})", monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        check_first(path, tmp_path / "cache")
    assert f"{path} is refused" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit no memory")
def test_too_much_memory_is_refused(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a command too; the limit is lower here than the largest config."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = folder / "config.json"
    config.write_bytes(config.read_bytes() + b" " * (20 << 20))
    runs_instead(
        "from localrt.models import first_opening as own; own._NBYTES = 10 << 20; own.main()",
        monkeypatch,
    )
    assert main(["show", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is refused" in line
    assert "MemoryError" in line


def test_no_process_can_be_started(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_opening, "helper_command", lambda *_: [str(tmp_path / "nothing")])
    assert check_first(tiny_folder, tmp_path).startswith("no: the process")
    monkeypatch.setattr(first_opening, "has_helpers", lambda: False)
    assert check_first(tiny_folder, tmp_path).startswith("no: this program")


def test_malformed_files_are_told_by_their_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], starts: list[list[str]]
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(3))
    for _ in range(2):
        assert main(["show", str(path)]) == 1
        assert "refused" not in capsys.readouterr().err
    assert len(starts) == 1


def test_an_adapter(tmp_path: Path, starts: list[list[str]]) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for _ in range(2):
        assert resolve_adapter(str(folder), settings=Settings.from_environment()) == folder
    assert len(starts) == 1
