"""A draft head: its sizes, the target that it was trained on, and its file.

A head's folder holds ``draft_head.safetensors``: matrices in float16, vectors in float32, the draft
vocabulary as int32 token ids in rising order, and the sizes in its metadata. Parts of
``models/decoder.py`` are built from it. It knows no target's weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError, StorageError
from localrt.files import write_bytes
from localrt.models.checkpoints.base import TensorInfo
from localrt.quant.formats import BF16, CODECS, F32, PackedTensor, pack
from localrt.quant.ops.choose import kernels_take_heads

__all__ = [
    "HEAD_FILE",
    "MOST_BLOCKS",
    "HeadConfig",
    "HeadTarget",
    "HeadWeights",
    "is_head_folder",
    "read_head",
    "write_head",
]

HEAD_FILE = "draft_head.safetensors"
MOST_BLOCKS = 5  # more gained nothing for Dovetail
_KEY, _VERSION = "localrt_draft_head", 1  # one key: the order of several is not fixed
_VOCABULARY = "draft_tokens"
_INT8 = CODECS["int8-g32"].format


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTarget:
    """The model that a head was trained on. ``vocab_sha256`` is of all tokens' texts, in order."""

    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    vocab_sha256: str

    def difference(self, other: HeadTarget) -> str:
        """In what ``other`` is another model, in words; empty where it is not."""
        for name, ours in asdict(self).items():
            theirs = getattr(other, name)
            if ours != theirs and name != "vocab_sha256":
                return f"{name.replace('_', ' ')} {ours}, not {theirs}"
        return "" if self == other else "other tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes of a head. ``window`` is how far its attention sees: what it was trained on.

    Raises:
        ValueError: a size out of bounds, with its name.
    """

    target: HeadTarget
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    window: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= MOST_BLOCKS:
            raise ValueError(f"blocks must be from 1 to {MOST_BLOCKS}, is {self.blocks}")
        for name in ("heads", "kv_heads", "head_dim", "intermediate_size", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if not kernels_take_heads(self.head_dim):
            raise ValueError(f"head_dim must be a multiple of 16, at most 512, is {self.head_dim}")
        if not 2 <= self.draft_vocab <= self.target.vocab_size:
            raise ValueError(
                f"draft_vocab must be from 2 to {self.target.vocab_size}, is {self.draft_vocab}"
            )
        if not (self.norm_eps > 0 and self.rope_theta > 1):
            raise ValueError("norm_eps must be above 0 and rope_theta above 1")

    @property
    def hidden_size(self) -> int:
        """The target's."""
        return self.target.hidden_size

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """The rotary frequencies, (head_dim / 2,)."""
        size = self.head_dim
        return tuple(self.rope_theta ** (-2 * i / size) for i in range(size // 2))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, matrices as (out, in)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fusion.feature_norm.weight": (hidden,),
            "fusion.token_norm.weight": (hidden,),
            "fusion.feature.weight": (hidden, hidden),
            "fusion.token.weight": (hidden, hidden),
            "fusion.gate_feature.weight": (hidden, hidden),
            "fusion.gate_token.weight": (hidden, hidden),
        }
        for block in range(self.blocks):
            of_block = {
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
            prefix = f"model.layers.{block}."
            shapes |= {f"{prefix}{name}.weight": shape for name, shape in of_block.items()}
        return shapes


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's weights, a ``TensorSource`` in memory. ``draft_tokens`` (draft vocabulary,) are ids.

    ``about`` is what was measured when it was trained, for people.
    """

    path: Path
    config: HeadConfig
    draft_tokens: npt.NDArray[np.int64]
    packed: Mapping[str, PackedTensor]
    about: Mapping[str, Any]
    architecture: str = "draft_head"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.packed.values())

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See ``TensorSource``."""
        return {n: TensorInfo(n, t.shape, t.format, t.nbytes) for n, t in self.packed.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """The whole tensor."""
        return self.packed[name]

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor]:
        """See ``TensorSource``: in one piece."""
        yield self.packed[name]


def is_head_folder(path: Path) -> bool:
    """Whether a draft head lies there, by its file's name."""
    return (path / HEAD_FILE).is_file()


def write_head(
    path: Path,
    config: HeadConfig,
    draft_tokens: npt.NDArray[np.int64],
    values: Mapping[str, npt.NDArray[np.float32]],
    *,
    about: Mapping[str, Any] | None = None,
) -> int:
    """Write a head to the folder ``path``; returns its bytes.

    ``values`` are float32 arrays by the names of ``HeadConfig.shapes``.

    Raises:
        CheckpointError: NaN or infinity among the values.
        StorageError: the disk is full or fails.
    """
    from safetensors.numpy import save

    arrays: dict[str, npt.NDArray[Any]] = {_VOCABULARY: draft_tokens.astype(np.int32)}
    for name, array in values.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"{name} holds NaN or infinity")
        arrays[name] = array.astype(np.float16 if array.ndim == 2 else np.float32)
    record = {"version": _VERSION, "head": asdict(config), "about": dict(about or {})}
    data = save(arrays, {_KEY: json.dumps(record)})
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    write_bytes(path / HEAD_FILE, data)
    return len(data)


def read_head(path: Path) -> HeadWeights:
    """The head in the folder ``path``, its matrices as int8 where groups fit, else bf16.

    Raises:
        CheckpointError: there is none, or its file is damaged or of another version.
    """
    from safetensors import SafetensorError, safe_open

    file = path / HEAD_FILE
    try:
        with safe_open(file, "np") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if _KEY not in metadata:
            raise CheckpointError(f"{file} is no draft head's")
        record = json.loads(metadata[_KEY])
        if record["version"] != _VERSION:
            raise CheckpointError(
                f"{file} is of version {record['version']}, and this localrt reads {_VERSION}: "
                "train the head again, or take a newer localrt"
            )
        head, about = record["head"], record["about"]
        config = HeadConfig(**{**head, "target": HeadTarget(**head["target"])})
        tokens = arrays[_VOCABULARY].astype(np.int64)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no draft head at {path}") from error
    except (OSError, ValueError, TypeError, LookupError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if (
        tokens.shape != (config.draft_vocab,)
        or not (np.diff(tokens) > 0).all()
        or not 0 <= tokens[0] <= tokens[-1] < config.target.vocab_size
    ):
        raise CheckpointError(f"{file} is damaged: its draft vocabulary")
    shapes = config.shapes()
    columns = {shape[1] for shape in shapes.values() if len(shape) == 2}
    matrix = _INT8 if all(count % _INT8.block == 0 for count in columns) else BF16
    packed = {}
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise CheckpointError(f"{file} is damaged: tensor {name}")
        format_ = matrix if len(shape) == 2 else F32
        packed[name] = pack(arrays[name].astype(np.float32), format_, name=name)
    return HeadWeights(path, config, tokens, packed, about)
