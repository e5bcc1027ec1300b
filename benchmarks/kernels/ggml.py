"""One ggml matrix product on the CPU, through the library in llama-cpp-python.

For comparing single kernels in one process; independent of localrt's kernels.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_bool, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.ggml import GGML_FORMATS

TYPES = {
    format_.name: number for number, format_ in GGML_FORMATS.items() if number not in (1, 30, 39)
}
"""The ggml numbers of the measured types."""

_NAME_BYTES = 64  # a tensor's name; its ``extra`` pointer follows


class NotRepackedError(Exception):
    """ggml has no repacked layout for this type."""


class _InitParams(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Ggml:
    """The ggml functions that a product needs."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not among those that are declared")

    def __init__(self, folder: Path, threads: int) -> None:
        base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        signatures = {
            "ggml_init": (c_void_p, _InitParams),
            "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
            "ggml_get_name": (c_void_p, c_void_p),
            "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
            "ggml_new_graph": (c_void_p, c_void_p),
            "ggml_build_forward_expand": (None, c_void_p, c_void_p),
            "ggml_backend_alloc_ctx_tensors": (c_void_p, c_void_p, c_void_p),
            "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
            "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
            "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
            "ggml_backend_buffer_free": (None, c_void_p),
            "ggml_free": (None, c_void_p),
        }
        for name, (result, *arguments) in signatures.items():
            function = getattr(base, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        cpu.ggml_backend_cpu_init.restype = c_void_p
        cpu.ggml_backend_cpu_set_n_threads.argtypes = [c_void_p, c_int]
        repack = cpu._Z35ggml_backend_cpu_repack_buffer_typev
        repack.restype = c_void_p
        plain = base.ggml_backend_cpu_buffer_type
        plain.restype = c_void_p
        self.buffer_types = {"repacked": repack(), "plain": plain()}
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)


def find_ggml(threads: int) -> _Ggml | None:
    """The library, or None if llama-cpp-python is not installed."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    return _Ggml(Path(spec.origin).parent / "lib", threads)


class GgmlProduct:
    """``weights`` (n matrices as GGUF rows) times x: ``run(i)`` computes with the i-th.

    Raises:
        NotRepackedError: ``kind`` is repacked, and ggml does not repack this type.
    """

    def __init__(
        self,
        ggml: _Ggml,
        kind: str,
        format_name: str,
        shape: tuple[int, int],
        weights: list[npt.NDArray[np.uint8]],
        x: npt.NDArray[np.float32],
    ) -> None:
        self._ggml = ggml
        rows, cols = shape
        type_id = TYPES[format_name]
        self._weights = ggml.ggml_init(_InitParams(1 << 20, None, True))
        tensors = [ggml.ggml_new_tensor_2d(self._weights, type_id, cols, rows) for _ in weights]
        buffer_type = ggml.buffer_types[kind]
        self._buffers = [ggml.ggml_backend_alloc_ctx_tensors_from_buft(self._weights, buffer_type)]
        if not self._buffers[0]:
            raise RuntimeError(f"ggml cannot keep {format_name} {kind}")
        extra = c_void_p.from_address(ggml.ggml_get_name(tensors[0]) + _NAME_BYTES)
        if kind == "repacked" and not extra.value:
            ggml.ggml_backend_buffer_free(self._buffers[0])
            ggml.ggml_free(self._weights)
            raise NotRepackedError(format_name)
        for tensor, data in zip(tensors, weights, strict=True):
            ggml.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        self._context = ggml.ggml_init(_InitParams(64 << 20, None, True))
        inputs = ggml.ggml_new_tensor_2d(self._context, TYPES["f32"], cols, len(x))
        self._graphs = []
        for tensor in tensors:
            output = ggml.ggml_mul_mat(self._context, tensor, inputs)
            graph = ggml.ggml_new_graph(self._context)
            ggml.ggml_build_forward_expand(graph, output)
            self._graphs.append(graph)
        self._buffers.append(ggml.ggml_backend_alloc_ctx_tensors(self._context, ggml.backend))
        x = np.ascontiguousarray(x, np.float32)
        ggml.ggml_backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)

    def run(self, index: int) -> None:
        """Compute the product with matrix ``index``."""
        self._ggml.ggml_backend_graph_compute(self._ggml.backend, self._graphs[index])

    def close(self) -> None:
        """Free everything."""
        for buffer in self._buffers:
            self._ggml.ggml_backend_buffer_free(buffer)
        self._ggml.ggml_free(self._context)
        self._ggml.ggml_free(self._weights)
