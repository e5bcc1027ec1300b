"""Packed copies belong to their model; quantized folders are models; both can be deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from localrt.common.errors import ModelNotFoundError, OptionError
from localrt.common.settings import Settings
from localrt.hub import list_models, remove_model, resolve
from localrt.hub.cache import note_use
from localrt.hub.listing import plan_removal


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


def test_copies_of_files_that_are_called_the_same_are_told_apart(
    settings: Settings, tmp_path: Path
) -> None:
    files = [tmp_path / maker / "model.gguf" for maker in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(b"GGUF")
        note_use(str(file), settings)
    folder = add_store(settings, "model-abc", files[1])
    assert [model.packed for model in list_models(settings)] == [(), (folder,)]


def test_links_to_one_file_are_one_model(settings: Settings, tmp_path: Path) -> None:
    file, hard, soft = (tmp_path / name for name in ("model.gguf", "hard.gguf", "soft.gguf"))
    file.write_bytes(b"GGUF")
    os.link(file, hard)
    try:
        soft.symlink_to(file)
    except OSError:  # Windows without the right to make symbolic links
        os.link(file, soft)
    for path in (file, hard, soft):
        note_use(str(path), settings)
    folder = add_store(settings, "model-abc", soft)
    (model,) = list_models(settings)
    assert model.path in (file, hard, soft)
    assert model.packed == (folder,)
    for path in (file, hard, soft):
        assert plan_removal(str(path), settings, packed_only=True).packed == (folder,)


def test_a_copy_without_its_model_can_be_deleted(settings: Settings) -> None:
    folder = add_store(settings, "gone-abc", "gone.gguf")
    (model,) = list_models(settings)
    assert model.path == folder
    assert remove_model(model.name, settings) == model.bytes


def test_a_quantized_model_has_its_folders_name(settings: Settings) -> None:
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


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("name", ["m.gguf", "./m.gguf"])
def test_a_copy_of_a_model_run_by_a_relative_path(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, noted: bool
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"a model")
    monkeypatch.chdir(tmp_path)
    if noted:  # as every run does
        note_use(resolve(name, settings=settings).listed_name, settings)
    folder = add_store(settings, "m-abc", file)
    (model,) = list_models(settings)
    assert (model.path, model.where, model.packed) == (file, "your file", (folder,))
    with pytest.raises(
        OptionError, match=r"delete it yourself; localrt's packed copy of it, 1.2 kB"
    ):
        remove_model(name, settings)
    assert remove_model(name, settings, packed_only=True) > 1000
    assert not folder.exists()
    assert file.exists()
    with pytest.raises(ModelNotFoundError, match=f"{name} has no packed copy"):
        remove_model(name, settings, packed_only=True)
