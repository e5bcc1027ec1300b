"""What a DGF draft head is: its sizes, the target that it was trained on, its draft vocabulary.

A small recurrent decoder on a frozen target (Dovetail, Zhang et al. 2024; with features fed back as
in EAGLE, Li et al. 2024). Its input at position t is the target's hidden state there and the
embedding of token t + 1, its output stands for the hidden state at t + 1, from which the target's
own final norm and head guess token t + 2. It knows numbers only, no files and no arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from localrt.quant.ops.choose import kernels_take_heads

__all__ = ["MOST_BLOCKS", "DgfConfig", "DgfTarget"]

MOST_BLOCKS = 5  # more gained nothing for Dovetail


@dataclass(frozen=True, slots=True, kw_only=True)
class DgfTarget:
    """The model that a head was trained on. ``vocab_sha256`` is of all tokens' texts, in order."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    vocab_sha256: str

    def difference(self, other: DgfTarget) -> str:
        """In what ``other`` is another model, in words; empty where it is not."""
        for name, words in (
            ("architecture", "the architecture"),
            ("hidden_size", "a hidden size of"),
            ("layers", "a number of layers of"),
            ("vocab_size", "a vocabulary of"),
        ):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{words} {ours}, not {theirs}"
        if self.vocab_sha256 != other.vocab_sha256:
            return "other tokens"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DgfConfig:
    """Sizes of a head. ``window`` is how far its attention sees: what it was trained on.

    Raises:
        ValueError: a size out of bounds, with its name.
    """

    target: DgfTarget
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

    def to_dict(self) -> dict[str, Any]:
        """The same names and values as plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> DgfConfig:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: a name is missing, or has another type than it should.
        """
        target: DgfTarget = _build(DgfTarget, record.get("target"))
        config: DgfConfig = _build(cls, {**record, "target": target})
        return config


_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "DgfTarget": DgfTarget,
}


def _build(cls: type[Any], record: object) -> Any:
    if not isinstance(record, Mapping):
        raise ValueError(f"it has no {cls.__name__}")
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name not in record:
            raise ValueError(f"{field.name} is missing")
        value = record[field.name]
        if isinstance(value, bool) or not isinstance(value, _TYPES[str(field.type)]):
            raise ValueError(f"{field.name} is {value!r}")
        values[field.name] = value
    return cls(**values)
