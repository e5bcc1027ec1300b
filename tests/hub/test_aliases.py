"""Names of one's own for models: kept in config.toml, and good wherever a model is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrt.cli import main
from localrt.common.errors import ModelNotFoundError, OptionError, StorageError
from localrt.common.settings import Settings
from localrt.hub import list_models, resolve
from localrt.hub.names import expand_alias, read_aliases, remove_alias, write_alias
from tests.hub.server import FakeHub


@pytest.fixture
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(settings.config_dir.parent))
    monkeypatch.setenv("XDG_DATA_HOME", str(settings.data_dir.parent))
    monkeypatch.setenv("HF_HUB_CACHE", str(settings.hub_cache))


def test_a_name_stands_for_a_model(settings: Settings, tmp_path: Path, hub: FakeHub) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    write_alias("mine", str(file), settings)
    write_alias("quants", "org/quants:Q8_0", settings)
    write_alias("best", "quants", settings)
    assert resolve("mine", settings=settings).path == file
    assert resolve("best", settings=settings).name == "org/quants:Q8_0"


def test_a_path_is_right_from_every_folder(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, typed in (("file", "mine.gguf"), ("folder", "./elsewhere"), ("other", "org/name")):
        write_alias(name, typed, settings)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve("file", settings=settings).path == tmp_path / "mine.gguf"
    assert resolve("folder", settings=settings).path == tmp_path / "elsewhere"
    assert expand_alias("other", settings) == "org/name"


def test_names_may_go_before_the_known_ones(settings: Settings) -> None:
    write_alias("llama3.2", "org/quants:Q8_0", settings)
    assert resolve("llama3.2", settings=settings).name == "org/quants:Q8_0"


def test_the_file_stays_as_people_wrote_it(settings: Settings) -> None:
    settings.config_dir.mkdir(parents=True)
    file = settings.config_dir / "config.toml"
    file.write_text('theme = "dark"  # mine\n\n[models]\nold = "org/old"\n')
    write_alias("new", "org/new", settings)
    assert file.read_text("utf-8").startswith('theme = "dark"  # mine\n')
    assert read_aliases(settings) == {"old": "org/old", "new": "org/new"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[models]\na = "b"\nb = "a"\n', OptionError),
        ("[models]\na = 3\n", OptionError),
        ("models = 3\n", OptionError),
        ("[models\n", StorageError),
    ],
)
def test_a_bad_file_is_said_in_one_line(
    text: str, error: type[Exception], settings: Settings
) -> None:
    settings.config_dir.mkdir(parents=True)
    (settings.config_dir / "config.toml").write_text(text)
    with pytest.raises(error, match=r"config\.toml"):
        expand_alias("a", settings)
    assert expand_alias("org/name", settings) == "org/name"  # which has no need of it


@pytest.mark.parametrize("name", ["smollm2", "a/b", "", "-x", "two words"])
def test_what_cannot_be_a_name(name: str, settings: Settings) -> None:
    with pytest.raises(OptionError):
        write_alias(name, "org/name", settings)


def test_no_name_stands_for_itself(settings: Settings) -> None:
    write_alias("a", "b", settings)
    write_alias("b", "c", settings)
    for name, model in (("x", "x"), ("c", "a")):
        with pytest.raises(OptionError, match=f"{name} would stand for itself: {name} -> "):
            write_alias(name, model, settings)
    assert read_aliases(settings) == {"a": "b", "b": "c"}


@pytest.mark.usefixtures("environment")
def test_the_command(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alias"]) == 0
    assert "localrt alias NAME MODEL" in capsys.readouterr().out
    assert main(["alias", "fast", "llama3.2:1b"]) == 0
    assert capsys.readouterr().out == "fast is llama3.2:1b (not on this machine yet)\n"
    assert main(["alias", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": {"fast": "llama3.2:1b"}}
    assert main(["alias", "Qwen3:8B", "org/mine"]) == 0
    assert "it hides unsloth/Qwen3-8B-GGUF of the hub, until" in capsys.readouterr().out
    assert main(["alias", "Qwen3:8B", "--remove"]) == 0
    assert main(["alias", "fast", "--remove"]) == 0
    assert "forgotten" in capsys.readouterr().out
    assert read_aliases(settings) == {}
    assert main(["alias", "fast", "--remove"]) == 1
    assert "localrt alias" in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
def test_models_are_listed_with_them(
    settings: Settings, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve("org/quants:Q8_0", settings=settings)
    write_alias("work", "org/quants", settings)
    write_alias("best", "work", settings)
    write_alias("gone", "org/gone", settings)
    assert [model.aliases for model in list_models(settings)][-1] == ("best", "work")
    write_alias("*", "best", settings)  # the model that a server uses for other names
    assert [model.aliases for model in list_models(settings)][-1] == ("*", "best", "work")
    remove_alias("*", settings)
    assert main(["list", "work"]) == 0
    assert "org/quants:Q8_0 (best, work)" in capsys.readouterr().out
    resolve("org/quants:Q4_K_M", settings=settings)  # now it may be either
    assert {model.aliases for model in list_models(settings)} == {()}
    (settings.config_dir / "config.toml").write_text("[models\n")
    assert len(list_models(settings)) > 1


def test_near_misses_are_suggested(settings: Settings) -> None:
    write_alias("my-chat", "org/quants", settings)
    for typed, meant in (("my-cht", "my-chat"), ("lama3.2", "llama3.2"), ("smolm2", "smollm2")):
        with pytest.raises(ModelNotFoundError, match=f"did you mean .*{meant}"):
            resolve(typed, settings=settings)
