"""The environment is read once, with the hub's own rules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localrt.common.settings import Settings


def test_defaults_lie_in_the_home_folder() -> None:
    settings = Settings.from_environment({})
    home = Path.home()
    assert settings.hub_endpoint == "https://huggingface.co"
    assert settings.hub_cache == home / ".cache" / "huggingface" / "hub"
    assert not settings.offline
    folders = settings.cache_dir, settings.data_dir, settings.config_dir
    if os.name == "posix":
        names = (".cache/localrt", ".local/share/localrt", ".config/localrt")
        assert folders == tuple(home / name for name in names)
    else:
        local, roaming = (Path(os.environ[name]) for name in ("LOCALAPPDATA", "APPDATA"))
        own = (local / "localrt" / "cache", local / "localrt" / "data", roaming / "localrt")
        assert folders == own


def test_variables_move_the_folders(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    settings = Settings.from_environment(env)
    assert settings.hub_cache == tmp_path / "huggingface" / "hub"
    assert settings.cache_dir == tmp_path / "localrt"
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://hub.example/"}
    env |= {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": "~/conf"}
    settings = Settings.from_environment({**env, "LOCALRT_CACHE": str(tmp_path / "own")})
    assert settings.hub_cache == tmp_path / "hf" / "hub"
    assert settings.hub_endpoint == "http://hub.example"
    assert settings.cache_dir == tmp_path / "own"
    assert settings.data_dir == tmp_path / "data" / "localrt"
    assert settings.config_dir == Path.home() / "conf" / "localrt"
    env["HF_HUB_CACHE"] = str(tmp_path / "shared")
    assert Settings.from_environment(env).hub_cache == tmp_path / "shared"


@pytest.mark.parametrize(
    ("name", "value", "offline"),
    [
        ("HF_HUB_OFFLINE", "true", True),
        ("LOCALRT_OFFLINE", "1", True),
        ("LOCALRT_OFFLINE", "0", False),
    ],
)
def test_offline(name: str, value: str, offline: bool) -> None:
    assert Settings.from_environment({name: value}).offline is offline


def test_where_the_token_comes_from(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path)}
    assert Settings.from_environment(env).read_hub_token() is None
    (tmp_path / "token").write_text("hf_stored\n")
    assert Settings.from_environment(env).read_hub_token() == "hf_stored"
    env["HF_TOKEN"] = "hf_given"
    settings = Settings.from_environment(env)
    assert settings.read_hub_token() == "hf_given"
    assert "hf_given" not in repr(settings)
    env["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
    assert Settings.from_environment(env).read_hub_token() is None
