"""One contestant of ``python -m benchmarks.towers``: an encoder in a process of its own."""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from localrt.bench.process import serve


def _pixels(side: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def _peak() -> int:
    """The most bytes that the process has had in memory."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return 1024 * int(found[1])


class Localrt:
    """Our tower."""

    def __init__(self, mmproj: str, text: str) -> None:
        from localrt.models.checkpoints.gguf.vision import VisionGguf
        from localrt.models.vision.registry import read_tower
        from localrt.models.vision.sight import ReadUnits
        from localrt.quant.choose import vision_steps
        from localrt.quant.cpu.ops import NativeOps

        source = VisionGguf(Path(mmproj))
        ops = NativeOps(threads=len(os.sched_getaffinity(0)))
        self._tower = read_tower(source.config, source.processor)
        self._steps = vision_steps(ops)
        self._units = ReadUnits(source, self._steps)

    def encode(self, pixels: Any) -> int:
        from localrt.models.vision.picture import Picture

        prepared = self._tower.prepare(Picture(pixels))
        with self._units.beside(prepared):
            return len(self._tower.see(prepared, self._units, self._steps).rows)


class Libmtmd:
    """llama.cpp's."""

    def __init__(self, mmproj: str, text: str) -> None:
        from llama_cpp import llama_cpp, mtmd_cpp

        self._api = mtmd_cpp
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(text.encode(), parameters)
        settings = mtmd_cpp.mtmd_context_params_default()
        settings.use_gpu, settings.print_timings = False, False
        settings.n_threads = len(os.sched_getaffinity(0))
        self._context = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), model, settings)
        assert self._context is not None, "libmtmd opens the file"

    def encode(self, pixels: Any) -> int:
        api, (height, width, _) = self._api, pixels.shape
        data = (ctypes.c_uint8 * pixels.size).from_buffer_copy(np.ascontiguousarray(pixels))
        bitmap = api.mtmd_bitmap_init(width, height, data)
        chunks = api.mtmd_input_chunks_init()
        marker = api.mtmd_default_marker()
        text = api.mtmd_input_text(marker, len(marker), False, True)
        bitmaps = (api.mtmd_bitmap_p_ctypes * 1)(bitmap)
        failed = api.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1)
        assert not failed, f"mtmd_tokenize: {failed}"
        rows = 0
        for index in range(api.mtmd_input_chunks_size(chunks)):
            chunk = api.mtmd_input_chunks_get(chunks, index)
            if api.mtmd_input_chunk_get_type(chunk) != api.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                continue
            failed = api.mtmd_encode_chunk(self._context, chunk)
            assert not failed, f"mtmd_encode_chunk: {failed}"
            rows += api.mtmd_input_chunk_get_n_tokens(chunk)
        api.mtmd_input_chunks_free(chunks)
        api.mtmd_bitmap_free(bitmap)
        return int(rows)


class Contestant:
    """``load`` first, then ``encode``."""

    _encoder: Localrt | Libmtmd

    def load(self, engine: str, mmproj: str, text: str) -> None:
        """Open the tower."""
        self._encoder = (Localrt if engine == "localrt" else Libmtmd)(mmproj, text)

    def encode(self, side: int, seed: int) -> dict[str, Any]:
        """Prepare and encode a picture; seconds, rows, and the process's peak so far."""
        pixels = _pixels(side, seed)
        start = time.perf_counter()
        rows = self._encoder.encode(pixels)
        return {"s": time.perf_counter() - start, "rows": rows, "peak_bytes": _peak()}


def main() -> None:
    """Answer the parent's requests."""
    serve(Contestant())
