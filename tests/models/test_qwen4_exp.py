"""Qwen3.8-Flash-Next: chosen tokens and hashed n-grams keep every promise about bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from localrt.common.errors import LocalrtError
from localrt.models.decoder import Decoder
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.protocol import Batch
from tests.conftest import needs_kernels
from tests.models.tiny import check_tree, load_ours, relative_error, save_tiny, tokens

NAME, COUNT = "qwen4-exp", 60  # far more tokens than the tiny budget chooses
TABLE = "model.layers.2.ple.ple_embedding.ngram_embedding."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exp")
    save_tiny(NAME, path)
    return path


def read_all(model: Decoder, ids: list[int]) -> np.ndarray:
    return model.forward(Batch.extend([(model.cache(256), ids)]))


@pytest.fixture(scope="module", params=["bf16", "int8", "int4"])
def native(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    return load_ours(folder, NativeOps(threads=2, kv_format=request.param))


@pytest.fixture(scope="module")
def whole(native: Decoder) -> np.ndarray:
    return read_all(native, tokens(COUNT))


@needs_kernels
def test_kernels(folder: Path) -> None:
    ids = tokens(COUNT)
    want = read_all(load_ours(folder), ids)
    assert relative_error(read_all(load_ours(folder, NativeOps(threads=2)), ids), want) < 0.02


@needs_kernels
def test_bits_depend_on_no_cut(native: Decoder, whole: np.ndarray) -> None:
    ids, cache, parts = tokens(COUNT), native.cache(256), []
    for count in (1, 3, 7, 2, 5, 1, 1, 20, 1, 19):
        part, ids = ids[:count], ids[count:]
        parts.append(native.forward(Batch.extend([(cache, part)])))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@needs_kernels
def test_bits_depend_on_no_company(native: Decoder, whole: np.ndarray) -> None:
    ids, other = tokens(COUNT), tokens(33, seed=5)
    both = Batch.extend([(native.cache(256), other), (native.cache(256), ids)])
    np.testing.assert_array_equal(native.forward(both)[len(other) :], whole)


@needs_kernels
def test_tree(native: Decoder, whole: np.ndarray) -> None:
    check_tree(native, whole)


@needs_kernels
def test_trim(native: Decoder, whole: np.ndarray) -> None:
    ids, cache = tokens(COUNT), native.cache(256)
    for part in (ids[:33], ids[33:]):
        native.forward(Batch.extend([(cache, part)]))
    held = cache.trim(35)
    assert 0 < held <= 35
    again = native.forward(Batch.extend([(cache, ids[held:])]))
    np.testing.assert_array_equal(again, whole[held:])


def rewritten(folder: Path, to: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """The model with other tensors; None leaves one out."""
    tensors = load_file(folder / "model.safetensors") | change
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        to / "model.safetensors",
    )
    (to / "config.json").write_text((folder / "config.json").read_text("utf-8"))
    return to


def parts_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith(TABLE)}


@pytest.mark.parametrize("ops", ["torch", pytest.param("native", marks=needs_kernels)])
def test_table_in_fp8(ops: str, folder: Path, tmp_path: Path) -> None:
    """A scale stands beside each part of the table, as in files whose weights are in FP8."""
    eights, same, scale = {}, {}, 0.25
    for name, part in parts_of(folder).items():
        eights[name] = (part / scale).to(torch.float8_e4m3fn)
        eights[f"{name}_scale"] = torch.tensor([scale])
        same[name] = eights[name].float() * scale
    logits = []
    for place, change in (("eights", eights), ("same", same)):
        (tmp_path / place).mkdir()
        path = rewritten(folder, tmp_path / place, change)
        model = load_ours(path, None if ops == "torch" else NativeOps(threads=2))
        logits.append(read_all(model, tokens(20)))
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


def refusal(folder: Path) -> str:
    with pytest.raises(LocalrtError) as refused:
        load_ours(folder)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_missing_part_of_table(folder: Path, tmp_path: Path) -> None:
    first = min(parts_of(folder))
    assert "3 of 4 parts are there" in refusal(rewritten(folder, tmp_path, {first: None}))


def test_parts_of_other_widths(folder: Path, tmp_path: Path) -> None:
    last = max(parts_of(folder))
    line = refusal(rewritten(folder, tmp_path, {last: torch.zeros(5, 7)}))
    assert f"{last} (5, 7)" in line
