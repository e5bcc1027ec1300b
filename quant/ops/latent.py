"""What multi-head latent attention is to the compute room: DeepSeek-V2's, in its absorbed form.

A token is cached as one row: a rotary key that all heads share, and a latent of low rank from which
each head's key and value follow by a matrix. The key's matrix is applied to the query instead, the
value's to what attention gives, so that attention itself is over one key/value head whose values
are the latents (DeepSeek-V2, 2024, section 2.1). Knows neither files nor caches.

Shapes: R rows, D hidden size, H heads, P rotary size, L latent size, N a query's part without
rotation, V a head's value, Q the queries' rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localrt.quant.ops.protocol import AttentionSpec

__all__ = ["LATENT_SCRATCH_NBYTES", "NO_LATENTS", "LatentSpec", "LatentWeights"]

LATENT_SCRATCH_NBYTES = 64 << 20
"""What the compiled kernels take at most for queries against latents: they go a few at a time."""

NO_LATENTS = (
    "latent attention (DeepSeek) on a GPU needs Triton, and a GPU that it runs on: install "
    "'localrt[gpu]', use device 'cpu', or format 'bf16' for a GPU that holds the model unpacked"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """A layer of latent attention. ``kv_heads`` is 1, ``head_dim`` is that of a cached row: P + L.

    A cached row, and a query against it, is the rotary part first, then the latent. ``interleaved``
    says that the projections give rotary pairs side by side (x0, y0, x1, y1, ...); rotated, they
    are kept as halves. ``latent_eps`` is that of the norms of the latents.
    """

    latent: int
    nope: int
    value: int
    query_rank: int | None = None
    interleaved: bool = True
    latent_eps: float = 1e-6

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)  # super() does not know a class with slots
        if self.rope is None or self.kv_heads != 1:
            raise ValueError("latent attention has rotary keys, and one of them for all heads")
        if self.head_dim != self.rope_dim + self.latent:
            raise ValueError(
                f"a latent row is {self.rope_dim} rotary and {self.latent} other numbers, "
                f"head_dim is {self.head_dim}"
            )
        if self.window is not None or self.softcap is not None or self.sinks:
            raise ValueError("latent attention has neither a window nor a softcap nor sinks")

    @property
    def value_dim(self) -> int:
        """Values are the latents in the keys: none are cached."""
        return 0

    @property
    def rope_dim(self) -> int:
        """P."""
        assert self.rope is not None, "checked"
        return 2 * len(self.rope.inv_freq)

    @property
    def query_rows(self) -> int:
        """Rows of the queries' (last) projection: H (N + P)."""
        return self.heads * (self.nope + self.rope_dim)

    @property
    def row_nbytes(self) -> int:
        """Float32 bytes of a row's queries and of its heads' values: both are held at once."""
        return 4 * (self.query_rows + self.heads * self.value)

    @property
    def down_rows(self) -> int:
        """Rows of what the hidden state is projected to: queries or their Q latents, then L + P."""
        return (self.query_rank or self.query_rows) + self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """One unit of latent attention.

    ``down`` stacks the rows of the queries' (first) projection and of the latents with the rotary
    keys: (Q or H (N + P), then L + P; D). ``key_up`` holds each head's matrix transposed, so that
    it turns a query into one against latents; ``value_up`` turns latents into values.
    """

    norm: Any  # Vector (D,)
    down: Any  # Weight
    latent_norm: Any  # Vector (L,)
    key_up: Any  # Weight (H L, N)
    value_up: Any  # Weight (H V, L)
    out: Any  # Weight (D, H V)
    query_norm: Any = None  # Vector (Q,)
    query_up: Any = None  # Weight (H (N + P), Q)
