"""``localrt pull``, ``list``, ``rm`` and ``alias`` as a person or a program calls them; names of
one's own for models.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from types import ModuleType

import pytest

from localrt.cli import list as list_command
from localrt.cli import main
from localrt.cli import pull as pull_command
from localrt.cli import rm as rm_command
from localrt.cli import show as show_command
from localrt.common.errors import ModelNotFoundError, OptionError, StorageError
from localrt.common.settings import Settings
from localrt.hub import list_models, resolve
from localrt.hub.names import expand_alias, read_aliases, remove_alias, write_alias
from localrt.library import find_draft, pull
from tests.hub.conftest import QUANTS, gguf
from tests.hub.server import FakeHub


@pytest.fixture(autouse=True)
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", settings.hub_endpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(settings.hub_cache))
    monkeypatch.setenv("LOCALRT_CACHE", str(settings.cache_dir))
    monkeypatch.setenv("XDG_DATA_HOME", str(settings.data_dir.parent))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(settings.config_dir.parent))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "LOCALRT_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("localrt.hub.listing.demo_in_package", lambda: None)


def call(command: ModuleType, *argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    status: int = command.run(parser.parse_args(argv))
    return status


def test_of_a_repository_that_is_not_here_show_recommends_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(show_command, "org/quants") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["where"] == "not on this machine: `localrt pull org/quants` downloads it"
    assert lines["files"] == "Q8_0 4 kB, Q4_K_M 6 kB, F16 11 kB"
    assert lines["recommended"].startswith("org/quants:Q4_K_M: the largest of up to 8 bits")
    assert call(show_command, "org/quants", "--json") == 0
    assert json.loads(capsys.readouterr().out)["here"] is False

    monkeypatch.setenv("LOCALRT_OFFLINE", "1")
    with pytest.raises(
        ModelNotFoundError, match="org/quants is not on this machine and offline mode is on"
    ):
        call(show_command, "org/quants")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_pull_says_what_was_chosen_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(pull_command, "org/quants") == 0
    out, err = capsys.readouterr()
    assert out.startswith("org/quants:Q4_K_M is here: ")
    assert out.rstrip().endswith("tiny-Q4_K_M.gguf")
    chosen, downloaded = err.splitlines()
    assert chosen.startswith("localrt: org/quants:Q4_K_M, 6 kB: the largest of up to 8 bits")
    assert downloaded.startswith("downloaded 6 kB in ")

    assert call(pull_command, "org/quants") == 0
    out, err = capsys.readouterr()
    assert "is up to date" in out
    assert err == ""


def test_pull_of_a_model_that_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(pull_command, "org/seeing:Q8_0", "--no-vision") == 0
    assert "pictures" not in capsys.readouterr().out
    assert call(pull_command, "org/seeing:Q8_0") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "mmproj-seer-bf16.gguf, 9 kB, lets it see pictures"


def published(name: str, **more: object) -> dict[str, object]:
    return {"id": name, "tags": ["safetensors"], **more}


def test_pull_offers_the_head_of_the_repository(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {f"MTP/mtp-tiny-{label}.gguf": gguf(f"m{label}") for label in ("F16", "Q4_K_M", "Q8_0")}
    hub.add("org/mtp", {**QUANTS, **heads})
    offers = "a head that drafts for it can be had with `localrt pull org/mtp:MTP/mtp-tiny-"
    for label in ("Q4_K_M", "Q8_0"):
        assert call(pull_command, f"org/mtp:{label}") == 0
        _, offer = capsys.readouterr().out.splitlines()
        assert offer == f"{offers}{label}.gguf`"
    assert hub.searches == []
    assert call(pull_command, "org/mtp:MTP/mtp-tiny-F16.gguf") == 0  # nothing drafts for a head
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert call(pull_command, "org/mtp:Q8_0", "--draft", "--json") == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert draft == {"name": "org/mtp:MTP/mtp-tiny-Q8_0.gguf", "here": True}
    assert hub.file_requests("mtp-tiny-Q8_0.gguf")


def test_pull_offers_a_published_head(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/Some-1B-GGUF", {"Some-1B-Q4_K_M.gguf": gguf("Q4_K_M")})
    hub.published = [
        published("org/Some-1B-eagle3-closed", gated="manual"),
        published("org/Some-11B-eagle3"),
        published("me/some_1b_EAGLE3"),
        published("org/Some-1B-EAGLE3"),
    ]
    assert call(pull_command, "org/Some-1B-GGUF") == 0
    _, offer = capsys.readouterr().out.splitlines()
    assert offer.endswith("with `localrt pull me/some_1b_EAGLE3`")
    assert len(hub.searches) == 1
    hub.published = [published("org/other")]
    assert call(pull_command, "org/Some-1B-GGUF", "--json") == 0
    assert json.loads(capsys.readouterr().out)["draft"] is None
    with pytest.raises(ModelNotFoundError, match="no head was found that drafts for it"):
        call(pull_command, "org/Some-1B-GGUF", "--draft")


def test_a_hub_that_does_not_search_is_no_error(hub: FakeHub) -> None:
    call(pull_command, "org/quants:Q8_0")
    hub.html = True
    assert find_draft(pull("org/quants:Q8_0", refresh=False)) is None


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(list_command) == 0
    assert "localrt pull smollm2" in capsys.readouterr().out
    assert call(list_command, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"models": []}
    call(pull_command, "org/quants:Q8_0")
    call(pull_command, "org/tiny")
    capsys.readouterr()
    assert call(list_command) == 0
    header, quantized, tiny = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "FORMAT", "WHERE"]
    assert quantized.split() == ["org/quants:Q8_0", "4", "kB", "Q8_0", "hub", "cache"]
    assert tiny.split() == ["org/tiny", "1.4", "MB", "safetensors", "hub", "cache"]
    assert call(list_command, "--json") == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["name"] for model in models] == ["org/quants:Q8_0", "org/tiny"]
    assert models[0]["bytes"] == len(QUANTS["tiny-Q8_0.gguf"])


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("", 1)])
def test_rm_asks_on_a_terminal(
    answer: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(pull_command, "org/tiny")
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert call(rm_command, "org/tiny") == status
    asked = capsys.readouterr().err
    assert "org/tiny  1.4 MB (in the hub cache, which other tools share)" in asked
    assert "Delete? [y/N]" in asked
    call(list_command, "--json")
    assert bool(json.loads(capsys.readouterr().out)["models"]) is (status == 1)


def test_rm_without_a_terminal_needs_yes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(pull_command, "org/quants:Q8_0")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert call(rm_command, "org/quants:Q8_0") == 2
    told = capsys.readouterr()
    assert "--yes" in told.err
    assert call(rm_command, "org/quants:Q8_0", "--yes", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["freed_bytes"] == len(QUANTS["tiny-Q8_0.gguf"])
    with pytest.raises(ModelNotFoundError, match="org/absent is not on this machine"):
        call(rm_command, "org/absent")  # there is nothing to ask about


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


@pytest.mark.parametrize("name", ["smollm2", "a/b", "-x"])
def test_what_cannot_be_a_name(name: str, settings: Settings) -> None:
    with pytest.raises(OptionError):
        write_alias(name, "org/name", settings)


def test_no_name_stands_for_itself(settings: Settings) -> None:
    write_alias("a", "b", settings)
    write_alias("b", "c", settings)
    with pytest.raises(OptionError, match="c would stand for itself: c -> "):
        write_alias("c", "a", settings)
    assert read_aliases(settings) == {"a": "b", "b": "c"}


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
    write_alias("my-chat", "org/quants", settings)
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*my-chat"):
        resolve("my-cht", settings=settings)
    assert main(["alias", "fast", "--remove"]) == 1
    assert "localrt alias" in capsys.readouterr().err


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
