"""``localrt pull``, ``list`` and ``rm`` as a person or a program calls them."""

from __future__ import annotations

import argparse
import io
import json
from types import ModuleType, SimpleNamespace

import pytest

from localrt.cli import list as list_command
from localrt.cli import pull as pull_command
from localrt.cli import rm as rm_command
from localrt.cli import show as show_command
from localrt.cli.help import ProgressLine, describe
from localrt.common.errors import ModelNotFoundError, OfflineError
from localrt.common.progress import Progress
from localrt.common.settings import Settings
from localrt.hub.resolving import offer_of
from localrt.library import find_draft, list_variants, pull
from tests.hub.conftest import QUANTS, TINY, gguf
from tests.hub.server import COMMIT, FakeHub


@pytest.fixture(autouse=True)
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", settings.hub_endpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(settings.hub_cache))
    monkeypatch.setenv("LOCALRT_CACHE", str(settings.cache_dir))
    monkeypatch.setenv("XDG_DATA_HOME", str(settings.data_dir.parent))
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


def test_offline_a_short_name_is_said_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALRT_OFFLINE", "1")
    says = r"llama3\.2 \(unsloth/Llama-3\.2-3B-Instruct-GGUF\) is not on this machine and offline"
    with pytest.raises(OfflineError, match=rf"{says} .*LOCALRT_OFFLINE") as caught:
        call(pull_command, "llama3.2")
    assert "`localrt pull" not in str(caught.value)


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


def test_pull_chooses_one_of_two_files_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(pull_command, "org/seeing") == 0
    assert capsys.readouterr().err.startswith("localrt: org/seeing:Q4_K_M, 6 kB: the largest of")


def test_of_several_files_the_one_to_take_says_why(hub: FakeHub) -> None:
    offered = {each.name: each.why for each in list_variants("org/quants")}
    assert offered["org/quants:Q4_K_M"].startswith("the largest of up to 8 bits")
    assert sum(bool(why) for why in offered.values()) == 1
    assert not any(each.path.endswith(".gguf") for each in hub.requests)  # nothing is downloaded
    assert [each.why for each in list_variants("org/tiny")] == [""]


def test_pull_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(pull_command, "org/quants:Q8_0", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["name"] == "org/quants:Q8_0"
    assert result["revision"] == COMMIT
    assert result["source"] == "hub"
    assert result["downloaded_bytes"] == len(QUANTS["tiny-Q8_0.gguf"])


def test_pull_of_a_model_that_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(pull_command, "org/seeing:Q8_0", "--no-vision") == 0
    assert "pictures" not in capsys.readouterr().out
    assert call(pull_command, "org/seeing:Q8_0") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "mmproj-seer-bf16.gguf, 9 kB, lets it see pictures"
    assert call(pull_command, "org/seeing:Q8_0", "--json") == 0
    (encoder,) = json.loads(capsys.readouterr().out)["vision"]
    assert encoder.endswith("mmproj-seer-bf16.gguf")
    assert call(list_command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["projector"] == encoder


def published(name: str, **more: object) -> dict[str, object]:
    return {"id": name, "tags": ["safetensors"], **more}


def test_pull_offers_the_head_of_the_repository(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {f"MTP/mtp-tiny-{label}.gguf": gguf(f"m{label}") for label in ("F16", "Q4_K_M", "Q8_0")}
    hub.add("org/mtp", {**QUANTS, **heads})
    offers = "a head that drafts for it can be had with `localrt pull org/mtp:MTP/mtp-tiny-"
    for label in ("Q4_K_M", "F16", "Q8_0"):
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

    for repo in ("org/mtp:Q4_K_M", "org/mtp:MTP/mtp-tiny-Q4_K_M.gguf", "org/mtp"):
        assert call(pull_command, repo, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["name"] == "org/mtp:Q4_K_M"
    sizes = offer_of("org/mtp", Settings.from_environment()).sizes
    assert sizes.keys() == {"Q4_K_M", "Q8_0", "F16"}

    hub.add("org/new", {**QUANTS, **heads})
    assert call(show_command, "org/new") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["files"] == "Q8_0 4 kB, Q4_K_M 6 kB, F16 11 kB"
    assert "`localrt pull org/new:MTP/mtp-tiny-" in lines["draft"]


def test_pull_offers_a_published_head(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/Some-1B-GGUF", {"Some-1B-Q4_K_M.gguf": gguf("Q4_K_M")})
    hub.published = [
        published("org/Some-1B-eagle3-closed", gated="manual"),
        published("org/Some-11B-eagle3"),
        published("org/some-1b-eagle30"),
        published("org/pictures-some-1b-eagle3", tags=["diffusers"]),
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


def test_pull_of_an_assistant(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/gemma-4-E2B-it-GGUF", {"gemma-4-E2B-it-Q4_K_M.gguf": gguf("Q4_K_M")})
    hub.add("org/gemma-4-E2B-it-assistant", TINY)
    hub.published = [published("org/gemma-4-E2B-it-assistant")]
    assert call(pull_command, "org/gemma-4-E2B-it-GGUF", "--draft") == 0
    _, head = capsys.readouterr().out.splitlines()
    assert head.startswith("org/gemma-4-E2B-it-assistant drafts for it: ")


@pytest.mark.parametrize("answer", ["html", "offline"])
def test_a_hub_that_does_not_search_is_no_error(
    answer: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(pull_command, "org/quants:Q8_0")
    found = pull("org/quants:Q8_0", refresh=False)
    hub.html = answer == "html"
    hub.requests.clear()
    if answer == "offline":
        monkeypatch.setenv("LOCALRT_OFFLINE", "1")
    assert find_draft(found) is None
    assert len(hub.requests) == (answer == "html")


def test_pull_needs_a_model() -> None:
    with pytest.raises(SystemExit) as caught:
        call(pull_command)
    assert caught.value.code == 2


def test_a_terminal_sees_one_line_that_is_cleared_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=iter((100.0, 104.0)).__next__)
    monkeypatch.setattr("localrt.cli.help.time", clock)
    stream = Terminal()
    line = ProgressLine(stream)
    line(Progress("download", 20, 100, "bytes", "a.gguf"))
    line(Progress("download", 100, 100, "bytes", "a.gguf"))
    line.close()
    text = stream.getvalue()
    assert "100 %" in text
    assert "20 B/s" in text  # of this run: the first bytes were there before
    assert "\n" not in text
    assert text.endswith("\x1b[K")


def test_the_rate_counts_this_run_only() -> None:
    step = Progress("download", 60_000_000, 98_000_000, "bytes", "sub/model.gguf")
    text = describe(step, first=40_000_000, elapsed_s=2.0)
    assert text == "downloading model.gguf  61 %  60 MB of 98 MB  10 MB/s  4 s left"


def test_a_download_of_unknown_size() -> None:
    text = describe(Progress("download", 5_000_000, None, "bytes", "w"), 0, 1.0)
    assert text == "downloading w  5 MB  5 MB/s"


def test_list_of_nothing_says_how_to_get_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(list_command) == 0
    assert "localrt pull smollm2" in capsys.readouterr().out
    assert call(list_command, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"models": []}


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_rm_with_yes(capsys: pytest.CaptureFixture[str]) -> None:
    call(pull_command, "org/quants:Q8_0")
    capsys.readouterr()
    assert call(rm_command, "org/quants:Q8_0", "--yes", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["freed_bytes"] == len(QUANTS["tiny-Q8_0.gguf"])
    assert call(list_command, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"models": []}


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_rm_asks_on_a_terminal(
    answer: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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
    call(pull_command, "org/tiny")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert call(rm_command, "org/tiny") == 2
    assert "--yes" in capsys.readouterr().err
    with pytest.raises(ModelNotFoundError, match="org/absent is not on this machine"):
        call(rm_command, "org/absent")  # there is nothing to ask about
