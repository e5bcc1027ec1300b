"""Commands that find a running server: ``ps``, ``run``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest

import localrt as library
from localrt.client.servers import LocalServer, announced, local_servers
from localrt.common.processes import own_name
from localrt.common.settings import Settings
from localrt.server.options import ServeOptions
from localrt.server.pool import ModelPool
from tests.cli.test_cli import FAST, home, localrt
from tests.conftest import needs_links
from tests.server.conftest import serving

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
        for flags in (("--no-server", "--max-tokens", "3"), ("--ctx", "64", *FAST)):
            assert localrt("run", tiny_folder, "hi", *flags, env=home).stderr == b""
        assert len([line for line in running.log if line.path.endswith("completions")]) == 1


@needs_links
def test_servers_that_do_not_have_the_model_are_left_alone(
    tiny_folder: Path, home: dict[str, str], tmp_path: Path
) -> None:
    """One is gone, and another program has its number; the other one was started elsewhere."""
    pool = ModelPool(lambda *_: library.load(tiny_folder), lambda: [], ServeOptions())
    link = tmp_path / "link"
    link.symlink_to(tiny_folder)
    with mock.patch.dict(os.environ, home, clear=True), serving(pool) as other:
        settings = Settings.from_environment()
        for number, url in ((1, "http://127.0.0.1:1/v1"), (os.getppid(), f"{other.url}/v1")):
            file = settings.data_dir / "servers" / f"{number}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"url": url, "pid": number, "models": None}))
        found = localrt("run", tiny_folder, "hi", "--max-tokens", "3", env=home)
        assert (found.returncode, found.stderr) == (0, b"")
        with library.load(tiny_folder, draft="off") as model, serving(model, name="tiny") as one:
            server = LocalServer(f"{one.url}/v1", os.getpid(), None, {"tiny": str(link)})
            with announced(server, settings):
                found = localrt("run", tiny_folder, "hi", "--max-tokens", "3", env=home)
                assert b"using tiny of the server" in found.stderr


@pytest.mark.parametrize("kind", ["own", "unnamed", "another"])
def test_a_server_whose_id_another_process_has(kind: str, home: dict[str, str]) -> None:
    """Left by a crash, before the machine was started again."""
    named = {"own": own_name(), "another": f"{os.getpid()}@0.00"}.get(kind)
    there = kind != "another"
    with mock.patch.dict(os.environ, home, clear=True):
        settings = Settings.from_environment()
        file = settings.data_dir / "servers" / "1.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        left = {"url": "http://127.0.0.1:1/v1", "pid": os.getpid(), "process": named}
        file.write_text(json.dumps(left))
        assert bool(local_servers(settings)) is there
        assert file.exists() is there
