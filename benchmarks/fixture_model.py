"""The fixture's mixture of experts in plain torch, for training: Qwen3-MoE's arithmetic and names.

Small and readable before fast: experts are looped over, each with the tokens that chose it. What it
learns is exported under Hugging Face's names, so that transformers and localrt both open it. It
knows neither text nor files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FixtureConfig", "FixtureModel", "Output"]


@dataclass(frozen=True, slots=True)
class FixtureConfig:
    """The shape; the names are those of ``Qwen3MoeForCausalLM``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 192
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def published(self) -> dict[str, Any]:
        """The ``config.json``."""
        return {
            **asdict(self),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": self.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 0,
        }


@dataclass(frozen=True, slots=True)
class Output:
    """``logits`` (B, T, V); ``balance`` is 1 where every expert gets the same share of tokens."""

    logits: Tensor
    balance: Tensor


class FixtureModel(nn.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, config: FixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_stream = name.endswith(("o_proj.weight", "down"))
                depth = (2 * config.num_hidden_layers) ** -0.5 if into_stream else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)

    def forward(self, tokens: Tensor) -> Output:
        """``tokens`` (B, T)."""
        x = self.embed_tokens(tokens)
        cos, sin = self._rotary(tokens.shape[1], x.device)
        balance = x.new_zeros(())
        for block in self.layers:
            x, share = block(x, cos, sin)
            balance = balance + share / len(self.layers)
        return Output(F.linear(self.norm(x), self.embed_tokens.weight), balance)

    def published(self) -> dict[str, Tensor]:
        """Hugging Face's names and tensors."""
        found: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            if not name.endswith(("gate_proj", "up_proj", ".down")):
                found[f"model.{name}"] = value
                continue
            stem, _, kind = name.rpartition(".")
            suffix = "down_proj" if kind == "down" else kind
            for number, expert in enumerate(value):
                found[f"model.{stem}.experts.{number}.{suffix}.weight"] = expert
        return found

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        exponent = torch.arange(half, device=device) / half
        angles = torch.arange(length, device=device)[:, None] / self.config.rope_theta**exponent
        return angles.cos(), angles.sin()  # (T, half)


class _Block(nn.Module):
    def __init__(self, config: FixtureConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _Mixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + y, balance


class _Attention(nn.Module):
    def __init__(self, config: FixtureConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self._size = size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=False)
        self.q_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self._size).transpose(1, 2)  # (B, heads, T, E)

        q = _rotate(self.q_norm(heads(self.q_proj(x))), cos, sin)
        k = _rotate(self.k_norm(heads(self.k_proj(x))), cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, heads(self.v_proj(x)), is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class _Mixture(nn.Module):
    def __init__(self, config: FixtureConfig) -> None:
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self._used = config.num_experts_per_tok
        self.gate = nn.Linear(hidden, count, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])  # (N, D)
        count = self.gate.out_features
        scores = self.gate(rows).float().softmax(-1)  # (N, E)
        weights, chosen = scores.topk(self._used)  # (N, K)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.reshape(-1).argsort()  # slots, expert by expert
        loads = torch.bincount(chosen.reshape(-1), minlength=count)
        taken = rows[order // self._used].split(loads.tolist())
        done = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in zip(
                taken, self.gate_proj, self.up_proj, self.down, strict=True
            )
        ]
        slots = torch.cat(done) * weights.reshape(-1)[order, None].to(x.dtype)
        out = torch.zeros_like(rows).index_add(0, order // self._used, slots.to(rows.dtype))
        # Switch Transformer's: the share of tokens times the share of probability, E times.
        balance = count * (loads / loads.sum() * scores.mean(0)).sum()
        return out.view_as(x), balance


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half; x (B, heads, T, E)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
