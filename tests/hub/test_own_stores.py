"""Packed copies belong to their model; quantized folders are models; both can be deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrt.errors import OptionError
from localrt.hub import list_models, remove_model, resolve
from localrt.hub.removing import plan_removal
from localrt.hub.uses import note_use
from localrt.settings import Settings


@pytest.fixture(autouse=True)
def no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("listing", "removing"):
        monkeypatch.setattr(f"localrt.hub.{module}.demo_in_package", lambda: None)


def add_store(settings: Settings, name: str, source: str, *, quantized: bool = False) -> Path:
    folder = settings.data_dir / "stores" / name
    folder.mkdir(parents=True)
    quantization = {"method": "rtn"} if quantized else None
    manifest = {"format": "q8_0", "source": {"name": source}, "quantization": quantization}
    (folder / "manifest.json").write_text(json.dumps(manifest))
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
    with pytest.raises(OptionError, match=r"is yours: delete it yourself; .*my-Q4_0-abc"):
        remove_model(str(file), settings)
    assert file.exists()
    assert remove_model("my-Q4_0-abc", settings) > 1000
    assert not folder.exists()
    file.unlink()
    assert list_models(settings) == []
