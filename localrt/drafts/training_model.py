"""A draft head as a torch module, for its training: several levels of guesses at once.

Weights have the names and shapes that the head's file gives them. What it computes is what
``speculative/draft_head.py`` computes; a level's attention is that of a tree's row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localrt.speculative.draft_head_file import HeadConfig

__all__ = ["HeadModel"]


class _Norm(nn.Module):
    """RMSNorm, computed in float32 whatever the input is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self._eps)


class _Fusion(nn.Module):
    """Dynamic gating fusion, with a norm on either input."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.feature_norm = _Norm(size, eps)
        self.token_norm = _Norm(size, eps)
        self.feature = nn.Linear(size, size, bias=False)
        self.token = nn.Linear(size, size, bias=False)
        self.gate_feature = nn.Linear(size, size, bias=False)
        self.gate_token = nn.Linear(size, size, bias=False)
        nn.init.eye_(self.feature.weight)
        nn.init.zeros_(self.gate_feature.weight)
        nn.init.zeros_(self.gate_token.weight)

    def tokens(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """What of the fusion depends on the tokens alone: h2 and its part of the gate."""
        h2 = F.silu(self.token(self.token_norm(embedded)))
        return h2, self.gate_token(h2)

    def forward(self, features: Tensor, h2: Tensor, gate: Tensor) -> Tensor:
        h1 = self.feature(self.feature_norm(features))
        z = torch.sigmoid(self.gate_feature(h1) + gate)
        fused: Tensor = z * h1 + (1 - z) * h2
        return fused


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._config = config
        size, of_head = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.heads * of_head, bias=False)
        self.k_proj = nn.Linear(size, config.kv_heads * of_head, bias=False)
        self.v_proj = nn.Linear(size, config.kv_heads * of_head, bias=False)
        self.o_proj = nn.Linear(config.heads * of_head, size, bias=False)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], levels: _Levels) -> Tensor:
        """``levels`` has keys and values (B, G, T, E) of the levels so far; this one's join."""
        c = self._config
        batch, length, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, length, count, c.head_dim).transpose(1, 2)

        q = _rotate(heads(self.q_proj(x), c.heads), *turn)
        k = _rotate(heads(self.k_proj(x), c.kv_heads), *turn)
        v = heads(self.v_proj(x), c.kv_heads)
        levels.append((k, v))
        if len(levels) == 1:
            out = F.scaled_dot_product_attention(
                q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
            )
        else:
            out = _unrolled(q, levels)
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return joined


_Levels = list[tuple[Tensor, Tensor]]


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


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Block(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], levels: _Levels) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, levels)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Blocks(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.blocks))


class HeadModel(nn.Module):
    """The head. ``state_dict`` has the names and shapes of ``HeadConfig.shapes``."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._config = config
        self.fusion = _Fusion(config)
        self.model = _Blocks(config)

    def forward(self, features: Tensor, embedded: Tensor, levels: int) -> list[Tensor]:
        """Predicted features (B, T, D) of each level.

        Row i takes in ``features`` (B, T, D) of token i and ``embedded`` (B, T, D) of token i + 1;
        from the second level on, what the level before gave at row i - 1.
        """
        length = features.shape[1]
        frequencies = torch.tensor(self._config.inv_freq, device=features.device)
        angles = torch.arange(length, device=features.device)[:, None] * frequencies
        turn = angles.cos(), angles.sin()
        h2, gate = self.fusion.tokens(embedded)
        held: list[_Levels] = [[] for _ in self.model.layers]
        outs: list[Tensor] = []
        for _ in range(levels):
            x = self.fusion(features, h2, gate)
            for block, of_block in zip(self.model.layers, held, strict=True):
                x = block(x, turn, of_block)
            outs.append(x)
            features = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return outs
