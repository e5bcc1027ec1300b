"""What is on this machine, packed copies and quantized folders too, and removing it, without taking
what others still use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

from localrt.cli import main
from localrt.common.errors import ModelNotFoundError, OptionError
from localrt.common.settings import Settings
from localrt.hub import list_models, remove_model, resolve
from localrt.hub.cache import forget_use, last_used, note_use
from localrt.hub.listing import plan_removal
from tests.hub.conftest import QUANTS, SEEING, TINY, WEIGHTS
from tests.hub.server import OLD_COMMIT, FakeHub


def names(settings: Settings) -> list[str]:
    return [model.name for model in list_models(settings)]


def blob_bytes(settings: Settings) -> int:
    return sum(path.stat().st_size for path in settings.hub_cache.glob("*/blobs/*"))


def test_every_listed_name_resolves_without_the_network(hub: FakeHub, settings: Settings) -> None:
    for name in ("org/tiny", "org/tiny@v1", "org/quants:Q8_0", "org/quants:F16"):
        resolve(name, settings=settings)
    hub.requests.clear()

    models = list_models(settings)

    assert [model.name for model in models] == [
        "org/quants:F16",
        "org/quants:Q8_0",
        "org/tiny",
        "org/tiny@v1",
    ]
    for model in models:
        found = resolve(model.name, settings=settings, download=False)
        assert found.path == model.path
    assert hub.requests == []
    split, quantized, tiny, _ = models
    assert (quantized.kind, quantized.quantization) == ("gguf", "Q8_0")
    assert quantized.bytes == len(QUANTS["tiny-Q8_0.gguf"])
    parts = [name for name in QUANTS if "-of-" in name]
    assert split.bytes == sum(len(QUANTS[name]) for name in parts)
    assert (tiny.kind, tiny.quantization) == ("safetensors", None)
    assert tiny.bytes > len(WEIGHTS)


SIX = tuple(f"model-{part:06d}-of-000002.safetensors" for part in (1, 2))
WITH_MTP = (*SIX, "mtp.safetensors")


@pytest.mark.parametrize(
    ("files", "listed", "taken"),
    [
        pytest.param(SIX, SIX, SIX, id="six-digits"),
        pytest.param(WITH_MTP, WITH_MTP, WITH_MTP, id="mtp"),
        pytest.param(
            [*SIX, "model.safetensors", "consolidated.safetensors"], SIX, SIX, id="stray-whole"
        ),
        pytest.param(
            ["model.safetensors", "fp16.safetensors"],
            SIX,
            ["model.safetensors"],
            id="whole-beside-absent-shards",
        ),
    ],
)
def test_layouts_are_downloaded_and_listed(
    hub: FakeHub,
    settings: Settings,
    files: Sequence[str],
    listed: Sequence[str],
    taken: Sequence[str],
) -> None:
    index = json.dumps({"weight_map": {name: name for name in listed}}).encode()
    contents = {name: WEIGHTS[number:] for number, name in enumerate(files)}
    hub.add("org/odd", {"config.json": b"{}", "model.safetensors.index.json": index, **contents})
    found = resolve("org/odd", settings=settings)
    assert {path.name for path in found.path.glob("*.safetensors")} == set(taken)
    assert names(settings) == ["org/odd"]
    resolve("org/odd", settings=settings, download=False)
    (found.path / taken[0]).unlink()
    assert names(settings) == []


def test_unfinished_and_foreign_folders_are_not_models(settings: Settings) -> None:
    resolve("org/tiny", settings=settings)
    (settings.hub_cache / "datasets--org--data" / "snapshots").mkdir(parents=True)
    (settings.hub_cache / "models--org--empty" / "blobs").mkdir(parents=True)
    (settings.hub_cache / "version.txt").write_text("1")
    (shard, *_) = settings.hub_cache.glob("*/snapshots/*/model-00001*")
    shard.unlink()
    assert names(settings) == []
    part = settings.hub_cache / "models--org--empty" / "blobs" / ("e" * 64 + ".incomplete")
    part.write_bytes(b"x" * 1000)
    assert remove_model("org/empty", settings) == 1000


def test_remove(settings: Settings) -> None:
    """A repository, a quantization, a file by its path."""
    for name in ("org/tiny", "org/quants", "org/quants:Q8_0", "org/quants:F16"):
        file = resolve(name, settings=settings).path
    before = blob_bytes(settings)
    freed = remove_model("org/tiny", settings)
    assert freed == before - blob_bytes(settings) > len(WEIGHTS)
    assert not list(settings.hub_cache.glob("**/*tiny"))

    parts = [len(QUANTS[name]) for name in QUANTS if "-of-" in name]
    assert file.name.endswith("-00001-of-00002.gguf")
    assert remove_model("org/quants:f16", settings) == sum(parts)
    assert names(settings) == ["org/quants:Q4_K_M", "org/quants:Q8_0"]
    file = resolve("org/quants:Q8_0", settings=settings).path
    assert remove_model(str(file), settings) == len(QUANTS["tiny-Q8_0.gguf"])
    assert remove_model("org/quants:Q4_K_M", settings) == len(QUANTS["tiny-Q4_K_M.gguf"])
    assert not list(settings.hub_cache.glob("models--*"))


def test_a_vision_encoder_goes_with_the_last_model(settings: Settings) -> None:
    resolve("org/seeing:Q4_K_M", settings=settings)
    resolve("org/seeing:Q8_0", settings=settings)
    model, encoder = (len(SEEING[name]) for name in ("seer-Q8_0.gguf", "mmproj-seer-bf16.gguf"))
    listed = {each.name: each for each in list_models(settings)}
    assert listed["org/seeing:Q8_0"].bytes == model + encoder
    assert str(listed["org/seeing:Q8_0"].projector).endswith("mmproj-seer-bf16.gguf")
    assert plan_removal("org/seeing", settings).bytes == blob_bytes(settings)

    assert plan_removal("org/seeing:Q8_0", settings).bytes == model
    assert remove_model("org/seeing:Q8_0", settings) == model
    rest = blob_bytes(settings)
    assert plan_removal("org/seeing:Q4_K_M", settings).bytes == rest
    assert remove_model("org/seeing:Q4_K_M", settings) == rest
    assert not list(settings.hub_cache.glob("models--*"))


def test_remove_one_revision_keeps_what_the_other_shares(settings: Settings) -> None:
    resolve("org/tiny", settings=settings)
    resolve("org/tiny@v1", settings=settings)
    assert names(settings) == ["org/tiny", "org/tiny@v1"]

    assert remove_model(f"org/tiny@{OLD_COMMIT[:12]}", settings) == len(b'{"old": true}')
    assert not scan_cache_dir(settings.hub_cache).warnings  # other tools find no fault with it

    found = resolve("org/tiny", settings=settings, download=False)
    assert (found.path / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS
    assert (found.path / "config.json").read_bytes() == TINY["config.json"]


@pytest.mark.parametrize("name", ["org/absent", "org/tiny:Q2_K", "org/tiny@v7"])
def test_remove_what_is_not_there(name: str, settings: Settings) -> None:
    resolve("org/tiny", settings=settings)
    with pytest.raises(ModelNotFoundError, match="is not on this machine"):
        remove_model(name, settings)
    with pytest.raises(ModelNotFoundError, match=r"did you mean org/tiny\?"):
        remove_model("org/tinny", settings)
    assert names(settings) == ["org/tiny"]


def test_uses_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for what lies in the temporary folder, until they are forgotten."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_environment()
    assert last_used(settings) == {}
    for name in ("tmp/model.gguf", "tmp/a/b", "old.gguf"):
        note_use(str(tmp_path / name), settings)
    note_use("org/name:Q4_K_M", settings)
    assert {*last_used(settings)} == {"org/name:Q4_K_M", str(tmp_path / "old.gguf")}
    forget_use("org/name:Q4_K_M", settings)
    assert main(["list", "--forget", "old.gguf"]) == 0
    assert last_used(settings) == {}
    assert main(["list", "--forget", "old.gguf"]) == 1
    assert "old.gguf is no path that was used" in capsys.readouterr().err
    (tmp_path / "blocked").write_text("")
    note_use("x", Settings.from_environment({"XDG_DATA_HOME": str(tmp_path / "blocked")}))


@pytest.fixture(autouse=True)
def no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.hub.listing.demo_in_package", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", "/elsewhere")  # the tests' own files are kept


def add_store(
    settings: Settings,
    name: str,
    source: str | Path,
    *,
    quantized: bool = False,
    manifest: str = "manifest.json",
) -> Path:
    """``source`` is a file's name, or its path, which newer stores say too."""
    folder = settings.data_dir / "stores" / name
    folder.mkdir(parents=True)
    packed = {"name": Path(source).name, "path": str(source) if Path(source).parts[1:] else None}
    quantization = {"method": "rtn"} if quantized else None
    values = {"format": "q8_0", "source": packed, "quantization": quantization}
    (folder / manifest).write_text(json.dumps(values))
    (folder / "layer.safetensors").write_bytes(b"x" * 1000)
    return folder


def test_a_packed_copy_is_part_of_its_model_and_goes_with_it(settings: Settings) -> None:
    file = resolve("org/quants:Q8_0", settings=settings).path
    folder = add_store(settings, "tiny-Q8_0-abc", file.name)
    (model,) = list_models(settings)
    assert (model.name, model.packed) == ("org/quants:Q8_0", (folder,))
    assert model.packed_bytes > 1000
    assert plan_removal("org/quants:Q8_0", settings).packed == (folder,)
    assert remove_model("org/quants:Q8_0", settings) == model.bytes + model.packed_bytes
    assert not folder.exists()
    assert list_models(settings) == []


def test_a_copy_can_be_deleted_without_its_model(settings: Settings) -> None:
    file = resolve("org/quants:Q8_0", settings=settings).path
    with pytest.raises(ModelNotFoundError, match=r"org/quants:Q8_0 has no packed copy"):
        remove_model("org/quants:Q8_0", settings, packed_only=True)
    whole = add_store(settings, "tiny-Q8_0-abc", file.name)
    begun = add_store(settings, "tiny-Q8_0-abd.partial", file, manifest="manifest.partial.json")
    (model,) = list_models(settings)
    assert model.packed == (whole, begun)
    assert remove_model("org/quants:Q8_0", settings, packed_only=True) == model.packed_bytes
    assert file.exists()
    assert list_models(settings)[0].packed == ()


def test_a_quantized_model_has_its_folders_name(settings: Settings) -> None:
    orphan = add_store(settings, "gone-abc", "gone.gguf")  # a copy without its model
    (model,) = list_models(settings)
    assert model.path == orphan
    assert remove_model(model.name, settings) == model.bytes
    folder = add_store(settings, "mine-int4", "org/mine", quantized=True)
    (model,) = list_models(settings)
    assert (model.name, model.kind, model.quantization) == ("mine-int4", "store", "q8_0")
    assert resolve("mine-int4", settings=settings).path == folder
    assert remove_model("mine-int4", settings) == model.bytes


def test_files_that_were_run_are_listed_and_never_deleted(
    settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "my-Q4_0.gguf"
    file.write_bytes(b"GGUF")
    found = resolve(str(file), settings=settings)
    note_use(found.listed_name, settings)
    folder = add_store(settings, "my-Q4_0-abc", file.name)
    (model,) = list_models(settings)
    assert (model.path, model.place, model.quantization) == (file, "yours", "Q4_0")
    with pytest.raises(OptionError, match=r"you: delete it yourself; .* `localrt rm --packed "):
        remove_model(str(file), settings)
    with pytest.raises(ModelNotFoundError, match=rf"did you mean .*{file.name}"):
        resolve(file.name, settings=settings)
    assert file.exists()
    assert remove_model(str(file), settings, packed_only=True) > 1000
    assert not folder.exists()
    file.unlink()
    assert list_models(settings) == []
