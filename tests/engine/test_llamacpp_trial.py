"""A build of llama.cpp that dies on this machine is found out once, in another process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from localrt.common.errors import MissingExtraError
from localrt.common.settings import Settings
from localrt.engine.llamacpp import trial
from localrt.engine.llamacpp.trial import check_build
from localrt.loading.context import LoadContext
from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions
from tests.models.make_gguf import tiny_gguf

posix = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
DIES = "import os, signal; os.kill(os.getpid(), signal.{})"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Sets what the trial runs; the list that it returns grows by a line with each run of it."""
    runs: list[str] = []

    def set_child(code: str) -> list[str]:
        def command() -> list[str]:
            runs.append(code)
            return [sys.executable, "-c", code]

        monkeypatch.setattr(trial, "trial_command", command)
        return runs

    monkeypatch.setattr(trial, "_build", lambda: ["one build"])
    return set_child


@posix
def test_build_dies(
    child: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = child(DIES.format("SIGILL"))
    for _ in range(2):
        with pytest.raises(MissingExtraError, match=r"an illegal instruction.*GGML_NATIVE") as told:
            check_build(tmp_path / "cache")
        assert "\n" not in str(told.value)
    assert len(runs) == 1
    # Another build, or the same on another machine, is tried again.
    child("")
    monkeypatch.setattr(trial, "_build", lambda: ["another build"])
    check_build(tmp_path / "cache")
    check_build(tmp_path / "cache")
    assert len(runs) == 2
    child(DIES.format("SIGSEGV"))
    monkeypatch.setattr(trial, "identity", lambda: ["another processor"])
    with pytest.raises(MissingExtraError, match="dies of SIGSEGV"):
        check_build(tmp_path / "cache")


@posix
@pytest.mark.parametrize(
    ("code", "kept"),
    [(DIES.format("SIGKILL"), False), (DIES.format("SIGABRT"), False), ("raise OSError", True)],
)
def test_undecided(
    child: Callable[[str], list[str]], tmp_path: Path, code: str, kept: bool
) -> None:
    runs = child(code)
    check_build(tmp_path)
    check_build(tmp_path)
    assert len(runs) == (1 if kept else 2)


@posix
@pytest.mark.parametrize("text", ["", "[]", '{"identity": 3}', '{"dies_of": 3, "identity": []}'])
def test_damaged_verdict(child: Callable[[str], list[str]], tmp_path: Path, text: str) -> None:
    runs = child("")
    (tmp_path / "llamacpp.json").write_text(text)
    check_build(tmp_path)
    check_build(tmp_path)
    assert len(runs) == 1


@posix
def test_load(
    child: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(DIES.format("SIGILL"))
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    path = tiny_gguf(tmp_path, "llama")
    settings = Settings.from_environment()
    with pytest.raises(MissingExtraError, match="an illegal instruction"):
        load_model(path, LoadOptions(engine="llamacpp"), LoadContext(settings=settings))


@pytest.mark.llamacpp
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs the llamacpp extra")
def test_installed_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_build(tmp_path)
    assert '"dies_of": ""' in (tmp_path / "llamacpp.json").read_text("utf-8")
    assert capfd.readouterr() == ("", "")
    trial.main()  # it computes, rather than ends in an error
