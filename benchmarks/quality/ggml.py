"""llama.cpp's own quantizer with an importance matrix: the peer of formats below four bits.

The matrix is collected as its ``imatrix`` tool does: the evaluation callback sees every product's
input, and the mean of a column's squares is its importance. Weights are quantized by
``ggml_quantize_chunk``; rows that are no whole blocks get IQ4_NL, as llama.cpp gives them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.quality.peers import Restored
from localrt.errors import MissingExtraError
from localrt.models.checkpoints.gguf.file import GgufFile
from localrt.models.checkpoints.gguf.names import hf_tensor_name

__all__ = ["GGML_PEERS", "importance_matrix", "quantized"]

Floats = npt.NDArray[np.float32]

GGML_PEERS = ("ggml-q3_k", "ggml-iq3_s", "ggml-q2_k", "ggml-iq2_s")
_FALLBACK = "iq4_nl"


class _Tensor(ctypes.Structure):
    """``struct ggml_tensor``, as far as its data's address."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def importance_matrix(path: Path, tokens: Sequence[int], window: int = 512) -> dict[str, Floats]:
    """Of every matrix of a layer of a GGUF file, by the tensor's name here: (columns,).

    Raises:
        MissingExtraError: llama-cpp-python is not installed.
    """
    lib = _llama()
    with closing(GgufFile(path)) as file:
        architecture = file.metadata.text("general.architecture") or ""
    sums: dict[str, Floats] = {}
    counts: dict[str, int] = {}

    def see(address: Any, ask: bool, _: Any) -> bool:
        tensor = ctypes.cast(address, ctypes.POINTER(_Tensor)).contents
        weight, inputs = tensor.src[0], tensor.src[1]
        if not weight or not inputs or not weight.contents.name.startswith(b"blk."):
            return not ask
        name = weight.contents.name.decode()
        if not name.endswith(".weight") or inputs.contents.type != 0 or tensor.op != _mul_mat():
            return not ask
        if not ask:
            columns = inputs.contents.ne[0]
            rows = inputs.contents.ne[1] * inputs.contents.ne[2] * inputs.contents.ne[3]
            buffer = (ctypes.c_float * (columns * rows)).from_address(inputs.contents.data)
            values = np.frombuffer(buffer, np.float32).reshape(rows, columns)
            sums[name] = sums.get(name, np.zeros(columns, np.float32)) + np.square(values).sum(0)
            counts[name] = counts.get(name, 0) + rows
        return True

    callback = lib.ggml_backend_sched_eval_callback(see)
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    options = lib.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = window
    options.cb_eval = callback
    context = lib.llama_init_from_model(model, options)
    try:
        for start in range(0, len(tokens) - window + 1, window):
            ids = (ctypes.c_int32 * window)(*tokens[start : start + window])
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            lib.llama_decode(context, lib.llama_batch_get_one(ids, window))
    finally:
        lib.llama_free(context)
        lib.llama_model_free(model)
    return {
        hf_tensor_name(architecture, name): total / np.float32(counts[name])
        for name, total in sums.items()
    }


def quantized(peer: str, values: Floats, importance: Floats) -> Restored:
    """A matrix (out, in) as ``peer`` leaves it."""
    kind = peer.removeprefix("ggml-")
    if values.shape[1] % 256:
        kind = _FALLBACK
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    rows, columns = values.shape
    out = np.empty((rows, columns // block * size), np.uint8)
    values, importance = np.ascontiguousarray(values), np.ascontiguousarray(importance)
    base = _base()
    base.ggml_quantize_init(int(type_))
    base.ggml_quantize_chunk(
        int(type_), values.ctypes.data, out.ctypes.data, 0, rows, columns, importance.ctypes.data
    )
    return Restored(gguf.quants.dequantize(out, type_), out.nbytes)


@cache
def _llama() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise MissingExtraError(f"llama-cpp-python cannot be imported: {error}") from error
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _base() -> Any:
    folder = Path(_llama().__file__).parent / "lib"
    lib = ctypes.CDLL(str(next(folder.glob("libggml-base.*"))))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    lib.ggml_op_name.restype = ctypes.c_char_p
    return lib


@cache
def _mul_mat() -> int:
    names = (_base().ggml_op_name(op) for op in range(200))
    return next(op for op, name in enumerate(names) if name == b"MUL_MAT")
