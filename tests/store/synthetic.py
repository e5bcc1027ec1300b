"""A checkpoint whose weights are made up when they are read: any size, no files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localrt.models.checkpoints import TensorInfo
from localrt.quant.formats import F32, FORMATS, PackedTensor
from tests.ops.packed import random_tensor

_ROWS = 16  # that are made up together


class SyntheticCheckpoint:
    """A random Llama. ``formats`` are those of matrices by the end of their names; else q8_0."""

    kind = "safetensors"
    stamp = ""
    architecture = "LlamaForCausalLM"
    generation_config: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = {}

    def __init__(
        self,
        path: Path,
        *,
        vocab: int = 300,
        hidden: int = 64,
        inner: int = 96,
        layers: int = 2,
        tied: bool = False,
        formats: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self.path = path
        self.blocks_read: list[int] = []
        self._seed = seed
        self.config: Mapping[str, Any] = {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": tied,
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(layers):
            prefix = f"model.layers.{layer}."
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (hidden // 2, hidden),
                "self_attn.v_proj": (hidden // 2, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items():
                shapes[f"{prefix}{name}.weight"] = shape
        shapes["model.norm.weight"] = (hidden,)
        if not tied:
            shapes["lm_head.weight"] = (vocab, hidden)
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape in shapes.items():
            ends = (f for end, f in (formats or {}).items() if name.endswith(f"{end}.weight"))
            format_ = F32 if len(shape) == 1 else FORMATS[next(ends, "q8_0")]
            rows = shape[0] if len(shape) == 2 else 1
            nbytes = rows * format_.row_bytes(shape[-1])
            self.tensors[name] = TensorInfo(name, shape, format_, nbytes)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        info = self.tensors[name]
        if len(info.shape) == 1:
            values = np.linspace(0.5, 1.5, info.shape[0], dtype=np.float32)
            return PackedTensor(name, F32, info.shape, values.view(np.uint8).reshape(1, -1))
        stop = info.shape[0] if stop is None else stop
        row_bytes = info.format.row_bytes(info.shape[1])
        data = np.empty((stop - start, row_bytes), np.uint8)
        for first in range(start // _ROWS * _ROWS, stop, _ROWS):
            seed = zlib.crc32(f"{name} {first} {self._seed}".encode())
            low, high = max(start, first), min(stop, first + _ROWS)
            rows = random_tensor(info.format.name, _ROWS, info.shape[1], seed).data
            data[low - start : high - start] = rows[low - first : high - first]
        return PackedTensor(name, info.format, (stop - start, info.shape[1]), data)

    def blocks(self, name: str, max_bytes: int = 64 << 10) -> Iterator[PackedTensor]:
        info = self.tensors[name]
        rows = info.shape[0] if len(info.shape) == 2 else 1
        step = max(1, max_bytes // (info.nbytes // rows))
        for start in range(0, rows, step):
            block = self.read(name, start, min(start + step, rows))
            self.blocks_read.append(block.nbytes)
            yield block

    def close(self) -> None:
        pass
