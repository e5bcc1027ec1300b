"""Models that transformers does not have, made of its parts and of plain torch, as oracles."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class NanbeigeConfig(hf.LlamaConfig):
    """A Llama's, and how often its layers run."""

    model_type = "nanbeige"
    num_loops: int = 1
    skip_loop_final_norm: bool = False


class _Looped(hf.LlamaModel):
    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        rows, norm = self.embed_tokens(input_ids), self.norm
        for left in reversed(range(self.config.num_loops)):
            self.norm = nn.Identity() if left and self.config.skip_loop_final_norm else norm
            rows = super().forward(inputs_embeds=rows, use_cache=False).last_hidden_state
        return BaseModelOutputWithPast(last_hidden_state=rows)


class NanbeigeForCausalLM(hf.LlamaForCausalLM):
    """A Llama whose layers run several times."""

    config_class = NanbeigeConfig

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config)
        self.model = _Looped(config)
        self.post_init()  # ties the head


class Spark2_5Config(hf.PreTrainedConfig):  # noqa: N801 - as published
    """Spark-X2.5's, with the defaults of its publisher's class."""

    model_type = "spark2_5"
    vocab_size: int = 133120
    hidden_size: int = 2048
    intermediate_size: int = 6656
    num_hidden_layers: int = 28
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    sliding_window: int = 512
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    hidden_act: str = "gelu"
    headwise_attn_output_gate: bool = True
    gate_attn_act_mode: str = "sigmoid"
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.layer_types = self.layer_types or [
            "sliding_attention" if (layer + 1) % 4 else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]
        self.rope_parameters = self.rope_parameters or {
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
        }
        ignored = {"sliding_attention", "full_attention"}
        super().__post_init__(**kwargs, ignore_keys_at_rope_validation=ignored)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> Any:
        return kwargs


class _Attention(nn.Module):
    def __init__(self, config: Spark2_5Config, kind: str) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size, hidden = config.head_dim, config.hidden_size
        self.window = config.sliding_window if kind == "sliding_attention" else 1 << 20
        rope = config.rope_parameters[kind]
        self.base = rope["rope_theta"]
        self.turned = int(self.size * rope["partial_rotary_factor"])
        rows = (self.heads + 2 * self.groups) * self.size
        self.q_k_v_proj = nn.Linear(hidden, rows, bias=False)
        self.g_proj = nn.Linear(hidden, self.heads, bias=False)
        self.out_proj = nn.Linear(self.heads * self.size, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[1]
        parts = self.q_k_v_proj(x).view(1, count, -1, self.size).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)
        at = torch.arange(count)
        angles = at[:, None] * self.base ** (-torch.arange(0, self.turned, 2) / self.turned)

        def turn(heads: torch.Tensor) -> torch.Tensor:
            first, second, rest = heads.split(
                [self.turned // 2, self.turned // 2, self.size - self.turned], dim=-1
            )
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

        each = self.heads // self.groups
        k, v = (own.repeat_interleave(each, dim=1) for own in (turn(k), v))
        ago = at[:, None] - at
        scores = turn(q) @ k.transpose(2, 3) / self.size**0.5
        scores = scores.masked_fill((ago < 0) | (ago >= self.window), float("-inf"))
        found = scores.softmax(-1) @ v * self.g_proj(x).sigmoid().transpose(1, 2)[..., None]
        return self.out_proj(found.transpose(1, 2).reshape(1, count, -1))


class _Mlp(nn.Module):
    def __init__(self, config: Spark2_5Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Spark2_5Config, kind: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn, self.mlp = _Attention(config, kind), _Mlp(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Spark(nn.Module):
    def __init__(self, config: Spark2_5Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, kind) for kind in config.layer_types)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Spark2_5ForCausalLM(hf.PreTrainedModel):  # noqa: N801 - as published
    """Spark-X2.5 as llama.cpp computes it: with the GELU that is computed by tanh."""

    config_class = Spark2_5Config
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embedding.weight"}
    base_model_prefix = "model"

    def __init__(self, config: Spark2_5Config) -> None:
        super().__init__(config)
        self.model = _Spark(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.model.embedding(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x)))


for _config, _model in (
    (NanbeigeConfig, NanbeigeForCausalLM),
    (Spark2_5Config, Spark2_5ForCausalLM),
):
    hf.AutoConfig.register(_config.model_type, _config)
    hf.AutoModelForCausalLM.register(_config, _model)
