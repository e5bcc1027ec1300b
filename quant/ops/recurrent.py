"""Recurrent layers as the steps see them: their shape, behaviour and weights.

A recurrent layer sums up a sequence in a state of fixed size, (heads, key size, value size). For
each token, with its key k, query q, value v and a decay a from 0 to 1,

    state <- a * state + k d'        output = q' state

where d is v for ``ssm`` (Mamba-2, Dao and Gu 2024: k, q, v are B, C, dt x) and the correction b (v
- a k' state) for ``delta`` (Gated DeltaNet, Yang et al. 2025; with a decay for each key channel,
KDA, Kimi 2025). Before it, a causal convolution over the last few rows mixes neighbours, channel by
channel; a ``conv`` layer (LFM2) is that convolution alone, between gates. So is an ``ngram``
layer's memory (hashed n-grams, ``layers/ngrams.py``), plus the tokens' ids.

Tokens are processed one after another, in a fixed order of sums: a row's bits depend only on
earlier rows, not on how a prompt is cut, on threads, on trees or on other sequences. This costs no
more arithmetic than chunks, which save only loads and stores, and those stay in a core's L1 cache,
where sixteen columns of a head's state fit (``quant/cpu/csrc/recurrent.h``). On a GPU three kernels
do the same between our products: one prepares all rows at once, one takes them one after another
with eight columns of a head's state in the registers of each warp, one norms and gates what they
have read (``quant/cuda/src/recurrent.cuh``). A tree's row whose parent is not the row before starts
again from the state before the tree.

Shapes: R rows, D hidden size, H heads, G key heads, K key size, V value size, T taps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from localrt.quant.ops.arrays import Vector, Weight

RecurrentKind = Literal["delta", "ssm", "conv", "ngram"]

_MOST_SIZE, _MOST_TAPS = 256, 8  # limits of the compiled kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """Shape and behaviour of one recurrent layer.

    ``heads`` share ``key_heads`` keys and queries: neighbouring heads, or with ``tiled`` every
    ``key_heads``-th. ``channel_decay``: a decay for every key channel (KDA); with a ``decay_floor``
    below 0, its logarithm is the floor times a sigmoid, instead of a rate times a softplus. The
    result is normed over ``norm_size`` numbers (0: it is not) and gated by ``gate`` of the gates,
    before the norm with ``gate_first``; ``norm_eps`` is that norm's epsilon if not ``eps``. Written
    values are multiplied by ``strength``. With a ``low_rank``, gates and decays are projected in
    two steps, through so many numbers each. For ``ssm``, time steps stay within ``time_steps``. For
    ``conv`` and ``ngram``, heads and sizes are 1, and ``width`` is the number of channels. A
    convolution's taps are ``dilation`` rows apart.
    """

    kind: RecurrentKind
    heads: int = 1
    key_heads: int = 1
    key_size: int = 1
    value_size: int = 1
    taps: int
    eps: float
    width: int = 0
    tiled: bool = False
    channel_decay: bool = False
    # Saved caches of others stay valid: see ``Rope``
    decay_floor: float = field(default=0.0, repr=False)
    conv_bias: bool = False
    norm_size: int = 0
    gate: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = False
    time_steps: tuple[float, float] = (0.0, float("inf"))
    norm_eps: float | None = None
    strength: float = 1.0
    low_rank: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of key_heads ({self.key_heads})"
            )
        for name, most in (
            ("key_size", _MOST_SIZE),
            ("value_size", _MOST_SIZE),
            ("taps", _MOST_TAPS),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from 1 to {most}, is {getattr(self, name)}")
        if self.dilation < 1:
            raise ValueError(f"dilation must be at least 1, is {self.dilation}")
        if not self.stateful and self.width < 1:
            raise ValueError(f"width must be at least 1, is {self.width}")
        if self.decay_floor > 0 or (self.decay_floor and not self.channel_decay):
            raise ValueError("a floor of decays is below 0, and of decays of every key channel")
        if self.low_rank and self.kind != "delta":
            raise ValueError(f"low_rank is of delta layers, not of {self.kind}")

    @property
    def needs(self) -> Literal["StreamOps"] | None:
        """See ``AttentionSpec``."""
        return "StreamOps" if self.kind == "ngram" else None

    @property
    def stateful(self) -> bool:
        """Whether the layer has a state besides a convolution."""
        return self.kind not in ("conv", "ngram")

    @property
    def back(self) -> int:
        """Earlier rows that a row's convolution reads."""
        return (self.taps - 1) * self.dilation

    @property
    def inner(self) -> int:
        """Numbers of a row that the output projection reads: H V."""
        return self.width or self.heads * self.value_size

    @property
    def keys(self) -> int:
        """Numbers of all keys of a row: G K."""
        return self.key_heads * self.key_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return self.width or 2 * self.keys + self.inner

    @property
    def factors(self) -> int:
        """Numbers of a row besides its channels: decays and write strengths; for ``ngram`` the
        token's id.
        """
        if not self.stateful:
            return 1 if self.kind == "ngram" else 0
        return self.heads * (self.key_size if self.channel_decay else 1) + self.heads

    @property
    def mix_rows(self) -> int:
        """Numbers of a row after the first projection."""
        if self.low_rank:
            return self.channels + self.heads + 2 * self.low_rank
        return self.projected_rows

    @property
    def projected_rows(self) -> int:
        """Numbers of a row after all projections."""
        if not self.stateful:
            return 3 * self.width
        steps = self.factors if self.kind == "delta" else self.heads
        return self.channels + self.inner + steps

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state; columns go by sixteen."""
        if not self.stateful:
            return 0
        return self.heads * self.key_size * (-(-self.value_size // 16) * 16)

    @property
    def row_size(self) -> int:
        """Numbers of a row that are kept until it is added to the state."""
        return self.channels + self.factors

    @property
    def pass_nbytes(self) -> int:
        """Float32 bytes of a row of a pass: as projected, as prepared, and its result."""
        first, prepared = self.mix_rows if self.low_rank else 0, self.row_size + self.key_heads
        return 4 * (first + self.projected_rows + prepared + 2 * self.inner)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a row, without its projections."""
        state = 4 * self.heads * self.key_size * self.value_size if self.stateful else 0
        return state + self.taps * self.channels


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class RecurrentWeights:
    """One unit of a recurrent layer.

    ``mix`` stacks the projections of the hidden state in this order. ``delta``: queries, keys,
    values, gates (H V), strengths b (H), decays (H); ``ssm``: gates (H V), values, keys B, queries
    C, time steps (H); ``conv``: input gate (D), output gate, values. With a low rank L, gates and
    decays are L numbers each in ``mix``, which ``gate_up`` and ``decay_up`` expand.
    """

    norm: Vector | None  # (D,), None where rows are taken as they are
    mix: Weight
    taps: Vector  # (T, channels): the oldest row's first
    out: Weight  # (D, H V)
    taps_bias: Vector | None = None  # (channels,)
    decay: Vector | None = None  # (H,): negative rates
    decay_bias: Vector | None = None  # (H,)
    skip: Vector | None = None  # (H,): for ``ssm``, how much of a value bypasses the state
    out_norm: Vector | None = None  # (V,) for each head; (H V,) if the norm spans several heads
    mix_bias: Vector | None = None
    mix_scale: Vector | None = None  # of the projected row, bias included
    out_bias: Vector | None = None
    post_norm: Vector | None = None
    gate_up: Weight | None = None  # (H V, L)
    decay_up: Weight | None = None  # (factors - H, L)
