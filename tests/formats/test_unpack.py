import warnings

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from localrt.quant.formats import (
    GGML_FORMATS,
    GGML_UNREAD,
    Q4_0,
    Format,
    PackedTensor,
    unpack,
)


def random_tensor(format_: Format, shape: tuple[int, ...]) -> PackedTensor:
    rows = shape[0] if len(shape) > 1 else 1
    row_bytes = format_.row_bytes(shape[-1]) * int(np.prod(shape[1:-1]))
    data = np.random.default_rng(7).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    return PackedTensor("t", format_, shape, data)


def by_gguf(tensor: PackedTensor, number: int) -> np.ndarray:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        rows = dequantize(tensor.data, gguf.GGMLQuantizationType(number))
    return rows.reshape(tensor.shape)


@pytest.mark.parametrize(("number", "format_"), GGML_FORMATS.items(), ids=lambda v: str(v))
def test_unpack_as_gguf(number, format_):
    # 67 rows: more than one piece, and not a multiple of anything
    tensor = random_tensor(format_, (67, 2048))
    ours, theirs = unpack(tensor), by_gguf(tensor, number)
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_every_type_of_gguf_can_be_placed():
    for kind in gguf.GGMLQuantizationType:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        known = GGML_FORMATS.get(kind) or GGML_UNREAD[kind]
        assert known == Format(kind.name.lower(), block, size)


@pytest.mark.parametrize("shape", [(64,), (3, 32), (2, 5, 64)])
def test_shape_is_kept(shape):
    assert unpack(random_tensor(Q4_0, shape)).shape == shape


def test_no_rows_unpack_to_no_rows():
    empty = PackedTensor("t", Q4_0, (0, 64), np.empty((0, 36), np.uint8))
    assert unpack(empty).shape == (0, 64)


def test_wrong_amount_of_data_is_refused():
    with pytest.raises(ValueError, match="t: 18 bytes do not hold"):
        unpack(PackedTensor("t", Q4_0, (2, 32), np.zeros((1, 18), np.uint8)))


def test_unknown_format_is_refused():
    with pytest.raises(ValueError, match="no way to unpack format nf3"):
        unpack(PackedTensor("t", Format("nf3", 64, 26), (64,), np.zeros((1, 26), np.uint8)))
