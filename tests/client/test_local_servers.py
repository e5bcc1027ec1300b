"""Servers of this user that other commands find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localrt.client.servers import LocalServer, announced, local_servers
from localrt.common.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return Settings.from_environment()


def test_announced_server(settings: Settings) -> None:
    server = LocalServer("http://127.0.0.1:1/v1", os.getpid(), "s3cret", {"tiny": "/a/tiny"})
    with announced(server, settings):
        assert local_servers(settings) == [server]
        (file,) = (settings.data_dir / "servers").iterdir()
        assert os.name == "nt" or file.stat().st_mode & 0o077 == 0
        assert "s3cret" not in repr(server)
    assert local_servers(settings) == []


def test_stale_files(settings: Settings) -> None:
    folder = settings.data_dir / "servers"
    folder.mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = folder / f"{gone.pid}.json"
    left.write_text(json.dumps({"url": "http://127.0.0.1:1/v1", "pid": gone.pid}))
    (folder / "1.json").write_text("{")
    (folder / "2.json").write_text('{"port": 1}')
    assert local_servers(settings) == []
    assert not left.exists()
