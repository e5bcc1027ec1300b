"""What is said of a model before it is loaded: from its files' headers, measuring nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import localrt
from localrt.common.errors import OptionError
from localrt.common.settings import Settings
from localrt.planning.recommend import Preview, preview, preview_size


def test_in_memory_or_streamed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is measured for a preview")

    monkeypatch.setattr("localrt.planning.measure.machine_profile", never)
    found = preview(tiny_folder, device="cpu")
    assert found.fits
    assert found.read_bytes == 0
    assert found.tok_s is not None
    assert str(found).startswith("fits in RAM, about")


def test_files_alone(tiny_folder: Path) -> None:
    """For an engine that says nothing of its memory."""
    found = preview(tiny_folder, engine="llamacpp")
    assert found.fits
    files = [each for each in tiny_folder.iterdir() if each.is_file()]
    assert found.weight_bytes == sum(each.stat().st_size for each in files)


def test_config_alone(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--big" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    settings = Settings.from_environment({"HF_HUB_CACHE": str(cache)})
    small = preview("org/big", ram="2GB", device="cpu", settings=settings)
    assert not small.fits
    assert small.read_bytes > 1_000_000_000
    assert "streams" in str(small)
    assert "per token" in str(small)
    nothing = preview("org/big", ram="60MB", device="cpu", settings=settings)
    assert nothing.problem
    assert str(nothing).startswith("does not fit")


def test_not_here(tmp_path: Path) -> None:
    settings = Settings.from_environment({"HF_HUB_CACHE": str(tmp_path)})
    with pytest.raises(localrt.ModelNotFoundError):
        preview("org/nothing", settings=settings)


def test_preview_size() -> None:
    assert preview_size(1000).fits
    assert not preview_size(10**9, ram="900MB").fits
    text = str(preview_size(10**9, ram="900MB"))
    assert text.startswith("streams 310 MB per token")


@pytest.mark.parametrize("nbytes", ["1GB", -5, 1.5, True])
def test_bad_size(nbytes: object) -> None:
    with pytest.raises(OptionError, match="nbytes must be a number of bytes"):
        preview_size(nbytes)  # type: ignore[arg-type]


def test_words() -> None:
    gpu = Preview(fits=True, place="GPU", weight_bytes=1, tok_s=83.4)
    assert str(gpu) == "fits on the GPU, about 83 tok/s"
    copied = Preview(fits=False, weight_bytes=1, copied_bytes=4_100_000_000, tok_s=6.04)
    assert str(copied) == "copies 4.1 GB per token to the GPU, about 6 tok/s"
    assumed = Preview(fits=True, weight_bytes=1, tok_s=6.0, assumed=True)
    assert str(assumed).endswith("on a typical machine")
