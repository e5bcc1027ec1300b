"""Reading a store: what is damaged, cut short, malformed or too new is said in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.checkpoints.store.manifest import Quantization
from localrt.models.weight_files import MANIFEST_NAME, PARTIAL_NAME
from localrt.offload.store import pack_store
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.methods import restore
from tests.store.synthetic import SyntheticCheckpoint


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = SyntheticCheckpoint(Path("model"), vocab=9000)
    return pack_store(source, tmp_path_factory.mktemp("packed") / "store", tiler=tile_tensor)


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "store")


def read_everything(path: Path, **options: Any) -> None:
    with closing(StoreCheckpoint(path, **options)) as checkpoint:
        for name in checkpoint.tensors:
            list(checkpoint.blocks(name))


def edit_manifest(store: Path, **fields: Any) -> None:
    path = store / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **fields}))


def test_flipped_bit(packed: Path, store: Path) -> None:
    with closing(StoreCheckpoint(packed)) as checkpoint:
        units = checkpoint.manifest.units
    for unit in units:
        path = store / unit.file
        sound = path.read_bytes()
        for at in (unit.offset, unit.offset + unit.nbytes // 2, unit.offset + unit.nbytes - 1):
            data = bytearray(sound)
            data[at] ^= 16
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match=rf"unit {unit.name} in .* is damaged"):
                read_everything(store)
            read_everything(store, verify=False)
        path.write_bytes(sound)
    read_everything(store)


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
def test_flipped_text(packed: Path, store: Path, name: str) -> None:
    """A manifest with a flipped bit is refused, or says the same."""
    if name != "manifest.json":
        (store / name).write_bytes(b'{"model": 1}')
        sums = {name: hashlib.sha256(b'{"model": 1}').hexdigest()}
        edit_manifest(store, texts=sums, crc32=None)
    with closing(StoreCheckpoint(packed)) as checkpoint:
        wanted = checkpoint.manifest
    read_everything(store)
    whole = (store / name).read_bytes()
    for bit in range(0, 8 * len(whole), 8 * len(whole) // 90 | 1):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (store / name).write_bytes(damaged)
        with suppress(LocalrtError), closing(StoreCheckpoint(store)) as checkpoint:
            assert name == "manifest.json"
            assert checkpoint.manifest == wanted


def test_mix_of_formats(tmp_path: Path) -> None:
    """Version 0.1.0 quantized to an average of bits: each matrix in a format of its own."""
    formats = ("q2_k", "q3_k", "iq4_nl", "int6-g32")
    names = ("layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "layers.1.mlp.up_proj", "o_proj")
    chosen = dict(zip(names, formats, strict=True))
    source = SyntheticCheckpoint(tmp_path, hidden=256, inner=256, formats=chosen)
    assert {info.format.name for info in source.tensors.values()} > set(formats)
    folder = pack_store(source, tmp_path / "store", tiler=tile_tensor)
    quantized = {"format": "3.5 bits", "head_format": None, "method": "gptq"}
    edit_manifest(folder, quantization={**quantized, "loss": 0.1}, crc32=None)
    with closing(open_checkpoint(folder)) as store:
        assert isinstance(store, StoreCheckpoint)
        assert store.manifest.quantization == Quantization(**quantized)
        for name, info in source.tensors.items():
            assert store.tensors[name].format == info.format
            ours, theirs = (
                np.concatenate([restore(b) for b in each.blocks(name)]) for each in (source, store)
            )
            np.testing.assert_array_equal(ours, theirs)
    edit_manifest(folder, quantization=[["loss", 1]], crc32=None)
    with pytest.raises(CheckpointError, match="is malformed"):
        open_checkpoint(folder)


def test_leftover_of_writing(store: Path) -> None:
    """A finished store opens; one without its final name does not."""
    shutil.copy(store / MANIFEST_NAME, store / PARTIAL_NAME)
    open_checkpoint(store).close()
    unfinished = store.rename(store.with_name("store.partial"))
    with pytest.raises(CheckpointError, match="not finished"):
        open_checkpoint(unfinished)


def test_truncated_or_missing_files(store: Path) -> None:
    path = store / "layer-0001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"layer-0001\.safetensors is truncated"):
        open_checkpoint(store)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"layer-0001\.safetensors does not exist"):
        open_checkpoint(store)


def first_unit(units: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    units[0] |= fields
    return units


def first_tensor(units: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """``fields`` of a matrix if they say how it is rotated, else of any."""
    tensors = [tensor for unit in units for tensor in unit["tensors"]]
    next(t for t in tensors if len(t["shape"]) == 2 or "hadamard" not in fields).update(fields)
    return units


OUTSIDE = "lies in no file of this folder"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda _: {"localrt_store": 2}, UnsupportedModelError, "of version 2.*update localrt"),
        (lambda _: {"layout": "tiles-32"}, UnsupportedModelError, "tiles-32"),
        *(
            (lambda u, n=name: {"units": first_unit(u, file=n)}, CheckpointError, OUTSIDE)
            for name in ("../up.safetensors", "/etc/passwd", "manifest.json", "a\0.safetensors")
        ),
        (lambda u: {"units": first_unit(u, file="\ud800.safetensors")}, CheckpointError, OUTSIDE),
        (lambda u: {"units": first_tensor(u, scale=10**400)}, CheckpointError, "is malformed"),
        (lambda u: {"units": first_tensor(u, hadamard=8)}, CheckpointError, "is not"),
        (
            lambda u: {"units": first_tensor(u, format="int8-g16k")},
            UnsupportedModelError,
            "'int8-g16k', which .*: pack the model again",
        ),
    ],
)
def test_manifests_that_are_refused(
    store: Path, edit: Callable[[Any], dict[str, Any]], error: type[Exception], message: str
) -> None:
    """Newer ones, files outside the folder, values that nothing can use, a format that left."""
    units = json.loads((store / "manifest.json").read_text("utf-8"))["units"]
    edit_manifest(store, **edit(units))
    with pytest.raises(error, match=message):
        open_checkpoint(store)
