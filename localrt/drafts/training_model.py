"""A draft head in torch, for its training: several levels of guesses at once.

Weights have the names and shapes that the head's file gives them. What it computes is what
``speculative/draft_head.py`` computes; a level's attention is that of a tree's row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.speculative.draft_head_file import HeadConfig

__all__ = ["HeadModel"]

# What begins at zero, so that a new head passes the target's features on.
_ZERO = ("gate_feature", "gate_token", "o_proj", "down_proj")

_Levels = list[tuple[Tensor, Tensor]]  # keys and values (B, G, T, E) of each level so far


class HeadModel:
    """The head. ``weights`` have the names and shapes of ``HeadConfig.shapes``."""

    def __init__(self, config: HeadConfig, device: torch.device | str = "cpu") -> None:
        self._config = config
        self.weights = {
            name: _initial(name, shape).to(device).requires_grad_()
            for name, shape in config.shapes().items()
        }

    def __call__(self, features: Tensor, embedded: Tensor, levels: int) -> list[Tensor]:
        """Predicted features (B, T, D) of each level.

        Row i takes in ``features`` (B, T, D) of token i and ``embedded`` (B, T, D) of token i + 1;
        from the second level on, what the level before gave at row i - 1.
        """
        frequencies = torch.tensor(self._config.inv_freq, device=features.device)
        angles = torch.arange(features.shape[1], device=features.device)[:, None] * frequencies
        turn = angles.cos(), angles.sin()
        h2 = F.silu(self._linear(self._norm(embedded, "fusion.token_norm"), "fusion.token"))
        gate = self._linear(h2, "fusion.gate_token")
        held: list[_Levels] = [[] for _ in range(self._config.blocks)]
        outs: list[Tensor] = []
        for _ in range(levels):
            h1 = self._linear(self._norm(features, "fusion.feature_norm"), "fusion.feature")
            z = torch.sigmoid(self._linear(h1, "fusion.gate_feature") + gate)
            x = z * h1 + (1 - z) * h2
            for block, of_block in enumerate(held):
                x = self._block(x, f"model.layers.{block}.", turn, of_block)
            outs.append(x)
            features = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return outs

    def _block(self, x: Tensor, name: str, turn: tuple[Tensor, Tensor], levels: _Levels) -> Tensor:
        """One block; keys and values of this level join ``levels``."""
        c = self._config
        batch, length, _ = x.shape
        y = self._norm(x, f"{name}input_layernorm")

        def heads(part: str, count: int) -> Tensor:
            rows = self._linear(y, f"{name}self_attn.{part}_proj")
            return rows.view(batch, length, count, c.head_dim).transpose(1, 2)

        q = _rotate(heads("q", c.heads), *turn)
        k, v = _rotate(heads("k", c.kv_heads), *turn), heads("v", c.kv_heads)
        levels.append((k, v))
        if len(levels) == 1:
            mixed = F.scaled_dot_product_attention(
                q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
            )
        else:
            mixed = _unrolled(q, levels)
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)
        x = x + self._linear(joined, f"{name}self_attn.o_proj")
        y = self._norm(x, f"{name}post_attention_layernorm")
        inner = F.silu(self._linear(y, f"{name}mlp.gate_proj"))
        inner = inner * self._linear(y, f"{name}mlp.up_proj")
        return x + self._linear(inner, f"{name}mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x.float(), x.shape[-1:], weight, self._config.norm_eps)


def _initial(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    if name == "fusion.feature.weight":
        return torch.eye(*shape)
    if name.split(".")[-2] in _ZERO:
        return torch.zeros(shape)
    return torch.empty(shape).uniform_(-1, 1) / math.sqrt(shape[1])


def _unrolled(q: Tensor, levels: _Levels) -> Tensor:
    """Attention of level n = len(levels), q (B, H, T, E).

    Row i sees the first level up to row i - n + 1, row i - n + 2 of the second, ... and itself.
    """
    n, group = len(levels), q.shape[1] // levels[0][0].shape[1]
    length = q.shape[2]
    scale = 1 / math.sqrt(q.shape[-1])
    wide = [tuple(t.repeat_interleave(group, 1) for t in level) for level in levels]
    k, v = wide[0]
    scores = (q.to(v.dtype) @ k.to(v.dtype).transpose(2, 3)).float() * scale  # (B, H, T, T)
    at = torch.arange(length, device=q.device)
    scores = scores.masked_fill(at[None, :] > at[:, None] - n + 1, -torch.inf)
    lines, values = [], []
    for level in range(1, n):
        back = n - 1 - level
        k_line, v_line = (F.pad(t, (0, 0, back, 0))[:, :, :length] for t in wide[level])
        line = (q * k_line).float().sum(-1, keepdim=True) * scale  # (B, H, T, 1)
        lines.append(line.masked_fill(at[:, None] < back, -torch.inf))
        values.append(v_line)
    weights = torch.cat([scores, *lines], dim=-1).softmax(-1).to(v.dtype)
    out = weights[..., :length] @ v
    for index, v_line in enumerate(values):
        out = out + weights[..., length + index, None] * v_line
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
