"""Commands that find a running server: ``ps``, ``run``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import localrt as library
from localrt.remote.local_servers import LocalServer, announced
from localrt.settings import Settings
from tests.cli.test_cli import FAST, home, localrt
from tests.serve.conftest import serving

__all__ = ["home"]  # a fixture


def test_a_running_server_is_used_and_shown(tiny_folder: Path, home: dict[str, str]) -> None:
    assert b"No server is running" in localrt("ps", env=home).stdout
    with (
        mock.patch.dict(os.environ, home, clear=True),
        library.load(tiny_folder, draft="off") as model,
        serving(model, name="tiny", api_key="s3cret") as running,
        announced(
            LocalServer(f"{running.url}/v1", os.getpid(), "s3cret", {"tiny": str(tiny_folder)}),
            Settings.from_environment(),
        ),
    ):
        shown = localrt("ps", "--json", env=home)
        (one,) = json.loads(shown.stdout)["models"]
        assert (one["name"], one["state"], one["unload_s"]) == ("tiny", "loaded", None)
        assert b"tiny" in localrt("ps", env=home).stdout
        plain = localrt("run", tiny_folder, "hi", "--max-tokens", "3", env=home)
        assert plain.returncode == 0
        assert b"using tiny of the server at http://127.0.0.1" in plain.stderr
        assert len([line for line in running.log if line.path.endswith("completions")]) == 1
        for flags in (("--no-server", "--max-tokens", "3"), FAST):
            assert localrt("run", tiny_folder, "hi", *flags, env=home).stderr == b""
        assert len([line for line in running.log if line.path.endswith("completions")]) == 1


def test_flags_of_one_model_need_one(home: dict[str, str]) -> None:
    result = localrt("serve", "--name", "x", "--port", "0", env=home)
    assert result.returncode == 2
    assert b"--name is for one model: give MODEL" in result.stderr
    result = localrt("serve", "--keep-alive", "soon", "--port", "0", env=home)
    assert result.returncode == 2
    assert b"write it like 30s, 5m or 2h" in result.stderr
