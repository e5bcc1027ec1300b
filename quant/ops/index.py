"""Attention to chosen tokens: an indexer scores blocks of a few tokens, and rows see the best ones.

An index key of a block is the mean of its tokens' keys, normed and rotated at the block's first
token. A block's score for a row is the sum over the row's index queries of what is above 0 of their
products with it. A row sees the tokens of the blocks with the best scores, as many as a budget has
room for, and those behind its last whole block (Qwen3.8-Flash-Next's QSA). So the cache grows, but
not what is read of keys and values.

What the indexer remembers is one more layer of the cache of keys and values: a token's key is its
own index key as projected, its value that of the block which it ends, and zeros where it ends none.
Both follow from the tokens before, as keys and values do. Knows no caches.

Shapes: R rows, D hidden size, H index heads, E their size.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.attention import AttentionSpec

__all__ = ["IndexSpec", "IndexWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec(AttentionSpec):
    """An indexer, as a layer of the cache. ``budget`` tokens are chosen, in blocks of ``block``."""

    block: int
    budget: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)  # super() does not know a class with slots
        if self.kv_heads != 1:
            raise ValueError(f"indexer_kv_heads must be 1, is {self.kv_heads}")
        if self.block < 1 or self.budget < self.block or self.budget % self.block:
            raise ValueError(
                f"indexer_budget must be a multiple of indexer_compress_ratio ({self.block}), is "
                f"{self.budget}"
            )

    @property
    def most_blocks(self) -> int:
        """That are chosen."""
        return self.budget // self.block

    @property
    def most_tokens(self) -> int:
        """That a row sees: those of the blocks, and of one that is not whole."""
        return self.budget + self.block - 1

    @property
    def projected_rows(self) -> int:
        """Rows of ``IndexWeights.qk``."""
        return (self.heads + 1) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexWeights:
    """One indexer; ``qk`` stacks the rows of its queries and of its key."""

    qk: Weight  # (projected_rows, D)
    q_norm: Vector  # (E,)
    k_norm: Vector  # (E,), of a block's mean
