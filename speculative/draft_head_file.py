"""A draft head's folder: a checkpoint of its blocks, and what they were trained on.

``config.json`` has a Llama's keys for the blocks and the target's vocabulary, the ids of the draft
vocabulary in rising order, and whose head it is. ``model.safetensors`` has matrices in float16,
vectors in float32. Parts of ``models/decoder.py`` are built from it. It knows no target's weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError
from localrt.files import write_bytes
from localrt.models.architectures import llama
from localrt.models.checkpoints.base import WeightBlock
from localrt.models.checkpoints.safetensors_folder import SafetensorsCheckpoint
from localrt.models.checkpoints.safetensors_header import read_json
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig
from localrt.models.weight_files import WEIGHTS_NAME
from localrt.models.weights import WeightLoader
from localrt.quant.formats import BF16, CODECS, Format, PackedTensor, pack, unpack
from localrt.quant.ops.choose import kernels_take_heads
from localrt.quant.ops.protocol import Ops

__all__ = [
    "MOST_BLOCKS",
    "HeadConfig",
    "head_loader",
    "is_head_folder",
    "read_head",
    "write_head",
]

MOST_BLOCKS = 5  # more gained nothing for Dovetail

_CONFIG = "config.json"
_ARCHITECTURE = "LocalrtDraftHead"
_INT8 = CODECS["int8-g32"].format
_FUSED = ("feature", "token", "gate_feature", "gate_token")


@dataclass(frozen=True, slots=True, eq=False)
class HeadConfig:
    """A head in the folder ``path``, there or to be, as its ``config.json`` has it.

    ``decoder`` are its blocks, with the target's hidden size and vocabulary; ``window`` is how far
    their attention sees, which is what they were trained on. ``draft_tokens`` (draft vocabulary,)
    can be guessed. ``target`` names the model that it was trained on.
    """

    path: Path
    decoder: DecoderConfig
    window: int
    draft_tokens: npt.NDArray[np.int64]
    target: str

    @classmethod
    def of(cls, path: Path, values: Mapping[str, Any]) -> HeadConfig:
        """What ``values`` say.

        Raises:
            LocalrtError: one of them is missing, or is not what it can be.
        """
        described: Any = SimpleNamespace(config=values, tensors={}, path=path)
        raw = RawConfig(described)
        try:
            decoder = llama.read_config(raw)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if decoder.layers > MOST_BLOCKS:
            raise CheckpointError(
                f"{path}: a head has at most {MOST_BLOCKS} blocks, not {decoder.layers}"
            )
        size = decoder.attending[0].head_dim
        if not kernels_take_heads(size):
            raise CheckpointError(f"{path}: head_dim must be a multiple of 16, to 512, is {size}")
        tokens = raw.sequence("draft_tokens") or []
        known = all(type(token) is int and 0 <= token < decoder.vocab_size for token in tokens)
        if len(tokens) < 2 or not known or any(a >= b for a, b in pairwise(tokens)):
            raise CheckpointError(f"{path} is damaged: its draft vocabulary")
        window, target = raw.integer("sliding_window"), raw.text("target", "")
        return cls(path, decoder, window, np.array(tokens, np.int64), target)

    @property
    def format(self) -> Format:
        """Of the matrices in memory: int8 where its groups fit."""
        columns = {shape[-1] for shape in self.shapes().values()}
        return BF16 if any(count % _INT8.block for count in columns) else _INT8

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, nearly."""
        weights = sum(math.prod(shape) for shape in self.shapes().values())
        return int(weights * self.format.bits_per_weight / 8)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, matrices as (out, in)."""
        spec = self.decoder.attending[0]
        hidden, inner = self.decoder.hidden_size, self.decoder.intermediate_size
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        block: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        return {
            "fusion.feature_norm.weight": (hidden,),
            "fusion.token_norm.weight": (hidden,),
            **{f"fusion.{name}.weight": (hidden, hidden) for name in _FUSED},
            **{
                f"model.layers.{number}.{name}.weight": shape
                for number in range(self.decoder.layers)
                for name, shape in block.items()
            },
        }


def is_head_folder(path: Path) -> bool:
    """Whether a draft head lies there, by its ``config.json``."""
    with suppress(OSError, UnicodeDecodeError):
        return _ARCHITECTURE in (path / _CONFIG).read_text(encoding="utf-8")
    return False


def read_head(path: Path) -> HeadConfig:
    """The head in the folder ``path``, without its weights.

    Raises:
        LocalrtError: there is none, or its config is damaged.
    """
    if not is_head_folder(path):
        raise CheckpointError(f"there is no draft head at {path}")
    return HeadConfig.of(path, read_json(path / _CONFIG))


@contextmanager
def head_loader(config: HeadConfig, ops: Ops) -> Iterator[WeightLoader]:
    """The head's weights for ``ops``, all of which must be asked for, while the block runs.

    Raises:
        CheckpointError: its file is damaged.
    """

    def repacked(block: WeightBlock) -> WeightBlock:
        assert isinstance(block, PackedTensor), "it is no store"
        return pack(unpack(block), config.format, name=block.name)

    with closing(SafetensorsCheckpoint(config.path)) as checkpoint:
        loader = WeightLoader(checkpoint, ops, repack=repacked)
        yield loader
        loader.finish()


def write_head(
    path: Path, values: Mapping[str, Any], weights: Mapping[str, npt.NDArray[np.float32]]
) -> int:
    """Write a head to the folder ``path``; returns its bytes.

    ``values`` are the config's, ``weights`` have the names of ``HeadConfig.shapes``.

    Raises:
        CheckpointError: NaN or infinity among the weights.
        StorageError: the disk is full or fails.
    """
    from safetensors.numpy import save

    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"{name} holds NaN or infinity")
    data = save({n: a.astype(np.float16) if a.ndim == 2 else a for n, a in weights.items()})
    text = json.dumps({"architectures": [_ARCHITECTURE], **values}).encode()
    write_bytes(path / WEIGHTS_NAME, data, folder=True)
    write_bytes(path / _CONFIG, text)
    return len(data) + len(text)
