"""Environments of their own for peers, made of a wheel that is written here."""

import subprocess
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.peers import airllm_env as peers
from benchmarks.peers.airllm_env import make_peer, peer_python
from localrt.common.errors import LocalrtError

pytestmark = pytest.mark.skipif(find_spec("pip") is None, reason="needs pip")


def wheel(folder: Path) -> None:
    """A package ``peerpkg`` and, in a version of its own, ``numpy``."""
    folder.mkdir()
    for name in ("peerpkg", "numpy"):
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}/__init__.py", "own = True\n")
            file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0")
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            file.writestr(f"{info}/WHEEL", tag)
            file.writestr(f"{info}/RECORD", "")


def test_make_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path / "wheels")
    monkeypatch.setattr(peers, "PEERS", {"peer": ("peerpkg==1.0", "numpy==1.0")})
    assert peer_python("peer", tmp_path) is None
    python = make_peer("peer", tmp_path, source=str(tmp_path / "wheels"))
    assert peer_python("peer", tmp_path) == python
    code = "import peerpkg, numpy, psutil; print(peerpkg.own, numpy.own, psutil.__file__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True True ")
    import psutil

    assert psutil.__file__ in done.stdout


def test_make_peer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(peers, "PEERS", {"peer": ("peerpkg==1.0",)})
    with pytest.raises(LocalrtError, match=r"peer cannot be installed: .*peerpkg"):
        make_peer("peer", tmp_path, source=str(tmp_path / "wheels"))
    assert peer_python("peer", tmp_path) is None
    with pytest.raises(LocalrtError, match="unknown peer 'other'"):
        make_peer("other", tmp_path)
