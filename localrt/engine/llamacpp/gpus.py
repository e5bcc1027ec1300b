"""The GPUs that a build of llama.cpp computes on, and how many of a model's layers each takes.

A build has one backend: Vulkan, Metal, HIP, SYCL or CUDA. ggml names its GPUs, whoever made them,
and their free memory. What a layer takes is in the header of the GGUF file: no weights are read.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from localrt import system
from localrt.models.checkpoints.gguf.file import open_gguf_parts
from localrt.offload.memory import memory_state

CHUNK = 512
"""Tokens per pass: llama.cpp's own default for a physical batch."""

_GPU, _INTEGRATED = 1, 2  # of ggml_backend_dev_type
_SPARE = 256 << 20  # for a backend's own kernels and buffers
_LAYER = re.compile(r"blk\.(\d+)\.(ffn_\w+_(?:ch)?exps\b)?")


@dataclass(frozen=True, slots=True)
class LlamaGpu:
    """A GPU by ggml's ``name`` (``"Vulkan0"``) and its maker's ``title``; ``free`` is in bytes.

    It takes ``layers`` of a model's, of which the output head is the last.
    """

    handle: int
    name: str
    title: str
    free: int
    layers: int = 0

    @property
    def backend(self) -> str:
        """``"vulkan"``, ``"metal"``, ``"rocm"``, ``"sycl"`` or ``"cuda"``."""
        return re.sub(r"\d+$", "", self.name).lower().replace("mtl", "metal")


def find_devices(api: ModuleType) -> list[LlamaGpu]:
    """Return the GPUs of this build; integrated ones only where there is no other, as llama.cpp."""
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    try:
        get = _function(api, "get", pointer, size)
        names = [_function(api, each, text, pointer) for each in ("name", "description")]
        memory = _function(api, "memory", None, pointer, pointer, pointer)
        kind_of = _function(api, "type", ctypes.c_int, pointer)
        handles = [get(index) for index in range(_function(api, "count", size)())]
    except AttributeError:  # a build without these functions
        return []
    found: dict[int, list[LlamaGpu]] = {_GPU: [], _INTEGRATED: []}
    for handle in handles:
        if (kind := kind_of(handle)) not in found:
            continue
        free, total = size(), size()
        memory(handle, ctypes.byref(free), ctypes.byref(total))
        room = free.value - system.spilling_nbytes(total.value)
        if kind == _INTEGRATED or system.UNIFIED_MEMORY:
            room = min(free.value or sys.maxsize, memory_state().available)
        name, title = (each(handle).decode("utf-8", "replace") for each in names)
        found[kind].append(LlamaGpu(handle, name, title, room))
    return found[_GPU] or found[_INTEGRATED]


def _function(api: ModuleType, name: str, result: object, *arguments: object) -> Any:
    """Return ggml's function of devices, from the library that has it: Windows looks in one."""
    from llama_cpp._ctypes_extensions import load_shared_library

    for library in ("llama", "ggml", "ggml-base"):
        with suppress(AttributeError, OSError, RuntimeError):
            loaded = load_shared_library(library, Path(str(api.__file__)).parent / "lib")
            function = getattr(loaded, f"ggml_backend_dev_{name}")
            function.restype, function.argtypes = result, arguments
            return function
    raise AttributeError(name)


def with_layers(
    devices: Sequence[LlamaGpu], path: Path, *, ctx: int, most: int | None = None
) -> list[LlamaGpu]:
    """Return those of ``devices`` that take layers of the GGUF file at ``path``, in llama.cpp's
    order, with caches of ``ctx`` tokens.

    Each takes at most ``most`` bytes. What all of them cannot take is the CPU's: the first layers.
    """
    sizes, _, beside = layer_nbytes(path, ctx) if devices else ([], [], 0)
    placed: list[LlamaGpu] = []
    # The last has the head, so it is the one with the most room.
    for device in sorted(devices, key=lambda each: each.free, reverse=True):
        room = min(device.free, device.free if most is None else most) - beside - _SPARE
        count = 0
        while sizes and sizes[-1] <= room:
            room -= sizes.pop()
            count += 1
        if count:
            placed.insert(0, replace(device, layers=count))
    return placed


def with_fewer(devices: Sequence[LlamaGpu]) -> list[LlamaGpu]:
    """Return ``devices`` with three quarters of their layers, where memory ran out."""
    fewer = (replace(each, layers=3 * each.layers // 4) for each in devices)
    return [each for each in fewer if each.layers]


def layers_text(devices: Sequence[LlamaGpu]) -> str:
    """Return ``"24 layers on AMD Radeon RX 7600"``."""
    return " and ".join(f"{each.layers} layers on {each.title}" for each in devices) or "the CPU"


def place(api: ModuleType, params: Any, devices: Sequence[LlamaGpu]) -> None:
    """Have llama.cpp's model ``params`` put layers on ``devices`` as they say."""
    params.n_gpu_layers = sum(each.layers for each in devices)
    if devices:
        handles = (ctypes.c_void_p * (len(devices) + 1))(*(each.handle for each in devices))
        params.handles = handles  # kept as long as the structure, which has an address alone
        params.devices = ctypes.addressof(handles)
        shares = (each.layers for each in devices)
        params.tensor_split = (ctypes.c_float * api.llama_max_devices())(*shares)


def layer_nbytes(path: Path, ctx: int) -> tuple[list[int], list[int], int]:
    """Return the bytes of each layer's weights and cache, the head's last, of each layer's experts
    among them, and of a pass.

    A cache has 16 bits a number. A pass holds attention's scores, as not every GPU does without
    them. Of sizes that differ between layers, the largest counts.
    """
    parts = open_gguf_parts(path)
    metadata = parts[0].metadata
    prefix = metadata.text("general.architecture")

    def size(key: str, otherwise: int) -> int:
        value = metadata.get(f"{prefix}.{key}", otherwise)
        return max(value, default=0) if isinstance(value, list) else int(value)

    try:
        tensors = {name: each.info.nbytes for part in parts for name, each in part.tensors.items()}
        hidden, heads = size("embedding_length", 0), max(1, size("attention.head_count", 1))
        width = sum(size(f"attention.{each}_length", hidden // heads) for each in ("key", "value"))
        count, inner = size("block_count", 0), size("feed_forward_length", 4 * hidden)
        layers = [2 * ctx * size("attention.head_count_kv", heads) * width] * count + [0]
        experts = [0] * (count + 1)
    finally:
        for part in parts:
            part.close()
    for name, nbytes in tensors.items():
        found = _LAYER.match(name)
        # Where there is no output matrix, llama.cpp copies the embedding.
        if found or name != "token_embd.weight" or "output.weight" not in tensors:
            layer = min(int(found[1]), count) if found else count
            layers[layer] += nbytes
            experts[layer] += nbytes if found and found[2] else 0
    return layers, experts, 4 * CHUNK * (heads * ctx + 4 * hidden + 3 * inner)
