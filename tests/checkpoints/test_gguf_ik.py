"""Types of ik_llama.cpp in GGUF files.

``tests/data/ik_quants.npz`` has for each type four rows of 512 random weights: packed bytes, and
the float32 values that ik_llama.cpp's ``dequantize_row_*`` makes of them. ``iq6_k``'s values are by
the table of ik_llama.cpp's products: its ``dequantize_row_iq6_k`` has a polynomial near it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints import GgufCheckpoint
from localrt.models.checkpoints.gguf.file import GgufFile
from localrt.quant.formats import unpack
from tests.checkpoints.make_gguf import raw_gguf, tensor_entry, write_gguf
from tests.checkpoints.test_gguf_checkpoint import SIZES

VECTORS = np.load(Path(__file__).parents[1] / "data" / "ik_quants.npz")
TYPES = {  # their numbers in ik_llama.cpp's ggml.h, and the formats that hold them
    "iq2_k": (137, "q6_k"),
    "iq3_k": (138, "int8-g16k"),
    "iq4_k": (139, "int8-g16k"),
    "iq5_k": (140, "int8-g16k"),
    "iq6_k": (141, "int8-g16k"),
    "iq4_ks": (144, "int8-g32z"),
    "iq2_ks": (145, "q6_k"),
    "iq4_kss": (146, "int8-g32z"),
    "iq5_ks": (152, "int8-g32z"),
    "iq3_ks": (156, "int8-g16k"),
    "iq2_k_r4": (337, "q6_k"),
    "iq3_k_r4": (338, "int8-g16k"),
    "iq4_k_r4": (339, "int8-g16k"),
    "iq5_k_r4": (340, "int8-g16k"),
    "iq4_ks_r4": (344, "int8-g32z"),
    "iq5_ks_r4": (352, "int8-g32z"),
}


def opened(path: Path, name: str, kind: str, shape: tuple[int, ...], times: int) -> GgufCheckpoint:
    """A file whose tensor of ``shape`` has the vectors of ``kind`` as rows, ``times`` over.

    The ``gguf`` package does not know these types: the file is written with bytes as I8.
    """
    rows = np.concatenate([VECTORS[kind]] * times).view(np.int8)
    keys = {f"llama.{key}": value for key, value in SIZES.items()} | {"llama.expert_count": 2}
    (file,) = write_gguf(path / "model.gguf", "llama", keys, {name: (rows, "i8")})
    old = tensor_entry(name, rows.shape[::-1], 24, 0)
    new = tensor_entry(name, shape[::-1], TYPES[kind][0], 0)
    data = file.read_bytes()
    assert data.count(old) == 1
    at = data.index(old)
    start = len(data) - -(-rows.nbytes // 32) * 32  # of the tensor
    head = data[:at] + new + data[at + len(old) : at + len(old)]
    file.write_bytes(head + bytes(-len(head) % 32) + data[start:])
    return GgufCheckpoint(file)


@pytest.mark.parametrize("kind", TYPES)
def test_values(kind: str, tmp_path: Path) -> None:
    model = opened(tmp_path, "blk.0.ffn_up.weight", kind, (12, 512), 3)
    name = "model.layers.0.mlp.up_proj.weight"
    wanted = np.concatenate([VECTORS[f"{kind}_values"]] * 3)
    info = model.tensors[name]
    assert (info.shape, info.format.name) == ((12, 512), TYPES[kind][1])
    assert info.nbytes == 12 * info.format.row_bytes(512)
    found = unpack(model.read(name))
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    for start, stop in ((0, 1), (2, 9), (11, 12), (5, 5)):
        assert np.array_equal(unpack(model.read(name, start, stop)), wanted[start:stop])
    for size in (1, 5 * info.format.row_bytes(512), 1 << 20):
        pieces = [unpack(block) for block in model.blocks(name, size)]
        assert np.array_equal(np.concatenate(pieces), wanted)


@pytest.mark.parametrize("kind", ["iq4_ks", "iq3_k_r4", "iq5_ks_r4"])
def test_experts(kind: str, tmp_path: Path) -> None:
    model = opened(tmp_path, "blk.0.ffn_down_exps.weight", kind, (2, 8, 512), 4)
    found = [model.tensors[name].shape for name in model.tensors]
    assert found == [(8, 512)] * 2
    wanted = np.concatenate([VECTORS[f"{kind}_values"]] * 2)
    for name in model.tensors:
        assert np.array_equal(unpack(model.read(name, 3, 7)), wanted[3:7])


@pytest.mark.parametrize("kind", ["iq2_ks", "iq4_k_r4"])
def test_rows_in_pairs(kind: str, tmp_path: Path) -> None:
    """Llama's queries: rows are moved within heads of eight."""
    model = opened(tmp_path, "blk.0.attn_q.weight", kind, (32, 512), 8)
    wanted = np.concatenate([VECTORS[f"{kind}_values"]] * 8)
    order = np.arange(32).reshape(4, 4, 2).swapaxes(1, 2).reshape(-1)
    found = unpack(model.read("model.layers.0.self_attn.q_proj.weight"))
    assert np.array_equal(found, wanted[order])


def test_rows_that_are_no_fours(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw_gguf(tensors=[tensor_entry("a", (256, 6), 339, 0)], data=bytes(144 * 6)))
    with pytest.raises(CheckpointError, match=r"'a' has the shape \(6, 256\), but its rows are"):
        GgufFile(path)
