"""Vision encoders of real shapes on our kernels, for ``scripts/gpu_check``: outputs compared with
the CPU kernels', and the time for an 896 x 896 picture.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from benchmarks.common.random_store import RandomCheckpoint, tensor_info
from benchmarks.gpu.timing import RUNS, Check, Values
from localrt.models.encoders.block import Units
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
from localrt.models.vision.pixels import Patches
from localrt.models.vision.registry import read_encoder
from localrt.models.weights import WeightLoader
from localrt.quant.choose import vision_steps
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda import cublas
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.formats import BF16, F32
from localrt.quant.ops.protocol import Ops, opaque
from localrt.quant.ops.vision import VisionSteps

_BOUND = 0.05
_TEXT = {"hidden_size": 2560, "num_attention_heads": 8, "vocab_size": 512}
_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5-4b": {
        "model_type": "qwen3_5",
        "vision_config": {
            **{"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16},
            **{"out_hidden_size": 2560, "deepstack_visual_indexes": []},
        },
    },
    "gemma-4-e4b": {
        "model_type": "gemma4",
        "vision_config": {
            **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16},
            **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
        },
    },
    "smolvlm-500m": {
        "model_type": "smolvlm",
        "scale_factor": 4,
        "vision_config": {
            **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
            **{"num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        },
    },
}
# Patch grids of an 896 x 896 picture and of a tiny one; SmolVLM's are tiles.
_GRIDS: Mapping[str, tuple[Any, Any]] = {
    "qwen3.5-4b": ((56, 56), (4, 6)),
    "gemma-4-e4b": ((48, 48), (6, 3)),
    "smolvlm-500m": (((32, 32),) * 17, ((4, 4),) * 2),
}
_SMALL = {  # for the CPU interpreter; tiny pictures
    **{"depth": 2, "num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 96},
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    **{"head_dim": 24, "out_hidden_size": 64},
}
_Unit = TypeVar("_Unit")


class _RandomTensors(RandomCheckpoint):
    """Random tensors of any name, created on first use and kept."""

    def __init__(self) -> None:
        self.tensors = {}
        self.read = cache(super().read)  # type: ignore[method-assign]

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        self.tensors.setdefault(name, tensor_info(name, shape, F32 if len(shape) == 1 else BF16))


class _RandomLoader(WeightLoader):
    """A loader whose tensors have whatever shape is requested."""

    def __init__(self, tensors: _RandomTensors, ops: Ops) -> None:
        super().__init__(tensors, ops)
        self._tensors = tensors

    def check(self, shape: tuple[int, ...], *names: str) -> None:
        for name in names:
            self._tensors.add(name, (shape[0] // len(names), *shape[1:]))

    def scalar(self, name: str) -> float:
        return 8.0 if name.endswith("max") else -8.0


class _RandomUnits(Units):
    def __init__(self, tensors: _RandomTensors, steps: VisionSteps) -> None:
        self._tensors, self._steps = tensors, steps

    def read(self, make: Callable[[WeightLoader], _Unit]) -> _Unit:
        self._steps.begin_unit()
        return make(_RandomLoader(self._tensors, self._steps.ops))


def check_encoders(device: str) -> Iterator[Check]:
    """Rows, seconds and memory of each encoder, with and without cuBLAS."""
    for name in _ENCODERS:
        yield f"tower {name}", partial(_check_encoder, name, device)


def _check_encoder(name: str, device: str) -> Values:
    on_gpu = device_of(device).is_gpu
    config = {"text_config": _TEXT, **_ENCODERS[name]}
    if not on_gpu:
        config["text_config"] = {**_TEXT, "hidden_size": 64}
        config["vision_config"] = {**config["vision_config"], **_SMALL}
    encoder = read_encoder(config, {})
    prepared = _prepared(encoder, _GRIDS[name][not on_gpu])
    tensors = _RandomTensors()

    def encode(steps: VisionSteps) -> tuple[EncodedPicture, float]:
        start = time.perf_counter()
        with steps.ops.scope():
            seen = encoder.encode(prepared, _RandomUnits(tensors, steps), steps)
        return seen, time.perf_counter() - start

    there = vision_steps(opaque(CudaOps(device=device)))
    encode(there)  # creates the weights, compiles the kernels
    memory = device_of(device)
    memory.trim()
    runs = [encode(there) for _ in range(RUNS if on_gpu else 1)]
    taken = memory.scratch.nbytes + memory.persistent.nbytes
    with patch.object(cublas, "multiplies", lambda device: False):
        encode(there)
        own = [encode(there) for _ in range(RUNS if on_gpu else 1)]
    wanted, cpu_s = encode(vision_steps(opaque(NativeOps())))
    error = max(_error(found[-1][0].rows, wanted.rows) for found in (runs, own))
    same = all(np.array_equal(seen.rows, own[0][0].rows) for seen, _ in own)
    return {
        "ok": error < _BOUND and same,
        "bound": _BOUND,
        "relative_error": error,
        "same_bits_again": same,
        "s": statistics.median(s for _, s in runs),
        "s_without_cublas": statistics.median(s for _, s in own),
        "cpu_s": cpu_s,
        "gpu_mb": taken / 1e6,
        "patches": len(prepared.patches),
    }


def _prepared(encoder: VisionEncoder, grid: Any) -> PreparedPicture:
    tiles = grid if isinstance(grid[0], tuple) else (grid,)
    count = sum(rows * columns for rows, columns in tiles)
    pixels = np.random.default_rng(1).integers(0, 256, (count, 3 * 16 * 16), np.uint8)
    chunk_patches = tiles[0][0] * tiles[0][1] if len(tiles) > 1 else 0
    scale, shift = np.full((1, 1), 2 / 255, np.float32), np.full((1, 1), -1, np.float32)
    return PreparedPicture(
        patches=Patches(pixels, scale, shift), grid=grid, pieces=(1,), chunk_patches=chunk_patches
    )


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
