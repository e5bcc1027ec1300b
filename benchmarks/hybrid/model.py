"""Qwen3.5's dense text model and its MTP block in torch, as they are trained: weights by their
published names, matrices in bfloat16 or float32.

The body computes what that of transformers does, which takes twice as long to train. The gated
delta rule is computed in chunks (Yang et al. 2024): what a chunk's tokens write depends on those
before them through a triangular system.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR, FULL = "linear_attention", "full_attention"
EMBEDDING = "model.embed_tokens.weight"
_CHUNK = 32
_EVERY = 4  # layers, of which the last one attends
_EPS, _THETA, _ROTARY = 1e-6, 1e4, 0.25
_ROPE = {"partial_rotary_factor": _ROTARY, "rope_theta": _THETA, "rope_type": "default"}
_HIDDEN, _INNER = 96, 192
_HEADS, _SIZE = 2, 64  # of attention, with one head of keys and values
_VALUES, _WIDTH = 3, 32  # heads of the delta rule's values; all its heads' size, with one of keys
_ALL_VALUES, _MIXED = _VALUES * _WIDTH, (2 + _VALUES) * _WIDTH

_LAYER = {
    "input_layernorm.weight": (_HIDDEN,),
    "post_attention_layernorm.weight": (_HIDDEN,),
    "mlp.gate_proj.weight": (_INNER, _HIDDEN),
    "mlp.up_proj.weight": (_INNER, _HIDDEN),
    "mlp.down_proj.weight": (_HIDDEN, _INNER),
}
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    FULL: {
        **_LAYER,
        "self_attn.q_proj.weight": (2 * _HEADS * _SIZE, _HIDDEN),
        "self_attn.k_proj.weight": (_SIZE, _HIDDEN),
        "self_attn.v_proj.weight": (_SIZE, _HIDDEN),
        "self_attn.o_proj.weight": (_HIDDEN, _HEADS * _SIZE),
        "self_attn.q_norm.weight": (_SIZE,),
        "self_attn.k_norm.weight": (_SIZE,),
    },
    LINEAR: {
        **_LAYER,
        "linear_attn.in_proj_qkv.weight": (_MIXED, _HIDDEN),
        "linear_attn.in_proj_z.weight": (_ALL_VALUES, _HIDDEN),
        "linear_attn.in_proj_b.weight": (_VALUES, _HIDDEN),
        "linear_attn.in_proj_a.weight": (_VALUES, _HIDDEN),
        "linear_attn.conv1d.weight": (_MIXED, 1, 4),
        "linear_attn.norm.weight": (_WIDTH,),
        "linear_attn.out_proj.weight": (_HIDDEN, _ALL_VALUES),
        "linear_attn.A_log": (_VALUES,),
        "linear_attn.dt_bias": (_VALUES,),
    },
}

Weights = dict[str, Tensor]
"""A layer's, by their names within it; matrices in the type that products are computed in."""
Level = tuple[Tensor, Tensor]
"""Keys and values of the MTP block's rows, (B, 1, T, head_dim)."""


def config_of(*, vocab: int, layers: int = 40) -> dict[str, Any]:
    """The published config."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": _SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "layer_types": [LINEAR if (n + 1) % _EVERY else FULL for n in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": _WIDTH,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": _VALUES,
        "linear_value_head_dim": _WIDTH,
        "max_position_embeddings": 2048,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "rms_norm_eps": _EPS,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
        "vocab_size": vocab,
    }


def _first_weights(config: dict[str, Any], generator: torch.Generator) -> Weights:
    """What a training begins with: layers that pass on what they are given, large embeddings beside
    what layers add, and small logits.
    """
    shapes = {EMBEDDING: (config["vocab_size"], _HIDDEN)}
    shapes |= {"model.norm.weight": (_HIDDEN,), "mtp.norm.weight": (_HIDDEN,)}
    shapes |= {"mtp.fc.weight": (_HIDDEN, 2 * _HIDDEN)}
    shapes |= {f"mtp.pre_fc_norm_{part}.weight": (_HIDDEN,) for part in ("embedding", "hidden")}
    layers = [(f"model.layers.{n}.", kind) for n, kind in enumerate(config["layer_types"])]
    for prefix, kind in [*layers, ("mtp.layers.0.", FULL)]:
        shapes |= {prefix + name: shape for name, shape in _SHAPES[kind].items()}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, weight in weights.items():
        if name.endswith("A_log"):
            weight.uniform_(0.5, 16, generator=generator).log_()
        elif name.endswith("dt_bias"):  # steps from 0.001 to 0.1, as Mamba begins
            weight.uniform_(-6.9, -2.3, generator=generator).exp_().expm1_().log_()
        elif name.endswith("linear_attn.norm.weight"):
            weight.fill_(1)
        elif name.endswith("conv1d.weight"):
            weight.uniform_(-0.5, 0.5, generator=generator)
        elif name in ("model.norm.weight", "mtp.norm.weight"):
            weight.fill_(-0.9)
        elif name == EMBEDDING:
            weight.normal_(0, 0.3, generator=generator)
        elif weight.dim() > 1 and not name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        ):
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
    return weights


class HybridModel:
    """The model. Norms' ``weights`` count from zero, but for those behind the delta rule. With
    ``compiled`` the body's layers are compiled when they first run.
    """

    def __init__(
        self, config: dict[str, Any], *, seed: int, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        self.config, self.dtype = config, dtype
        self.weights = _first_weights(config, torch.Generator().manual_seed(seed))
        for weight in self.weights.values():
            weight.requires_grad_()
        self._inv_freq = _THETA ** -torch.arange(0, 1, 2 / (_ROTARY * _SIZE))
        self._layers = {LINEAR: self._linear_layer, FULL: self._full_layer}
        if compiled:
            self._layers = {k: torch.compile(f, dynamic=False) for k, f in self._layers.items()}

    def refresh(self) -> None:
        """Round the weights anew, after they have changed."""
        self._parts: dict[str, Weights] = {}
        for name, weight in self.weights.items():
            _, part, own = re.split(r"(^.*layers\.\d+\.|^)", name, maxsplit=1)
            used = weight.to(self.dtype) if weight.dim() > 1 else weight
            self._parts.setdefault(part, {})[own] = used

    def body(self, tokens: Tensor) -> Tensor:
        """The last layer's normed output (B, T, D) of ``tokens`` (B, T)."""
        x = self._embed(tokens)
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        for n, kind in enumerate(self.config["layer_types"]):
            x = self._layers[kind](x, seen, self._parts[f"model.layers.{n}."])
        return self._norm(x, self.weights["model.norm.weight"]).float()

    def unrolled(self, hidden: Tensor, tokens: Tensor, levels: int) -> list[Tensor]:
        """Normed outputs (B, T, D) of each level of the MTP block. Row i takes in token i of
        ``tokens`` (B, T), and on the first level what the body gave for the one before; on deeper
        ones, the level before's own output.

        On level n, row i sees the first level up to row i - n + 1, row i - n + 2 of the second,
        ... and itself, as the rows of a tree will.
        """
        own, block = self._parts[""], self._parts["mtp.layers.0."]
        behind = torch.arange(tokens.shape[1])[:, None] - torch.arange(tokens.shape[1])
        embedded = self._norm(self._embed(tokens), own["mtp.pre_fc_norm_embedding.weight"])
        held, outs = list[Level](), list[Tensor]()
        for n in range(levels):
            normed = self._norm(hidden, own["mtp.pre_fc_norm_hidden.weight"])
            x = F.linear(torch.cat([embedded, normed], -1), own["mtp.fc.weight"])
            q, gate, level = self._project(x.float(), block)
            held.append(level)
            seen = [behind >= n, *(behind == n - level for level in range(1, n + 1))]
            x = self._mlp(self._attend(x.float(), q, gate, held, torch.cat(seen, 1), block), block)
            outs.append(self._norm(x, own["mtp.norm.weight"]).float())
            hidden = F.pad(outs[-1], (0, 0, 1, 0))[:, :-1]
        return outs

    def logits(self, normed: Tensor) -> Tensor:
        """Over the vocabulary, float32."""
        return F.linear(normed.to(self.dtype), self._parts[""][EMBEDDING]).float()

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._parts[""][EMBEDDING]).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight, _EPS).to(self.dtype)

    def _linear_layer(self, x: Tensor, seen: Tensor, w: Weights) -> Tensor:
        return self._mlp(x + self._delta_net(self._norm(x, w["input_layernorm.weight"]), w), w)

    def _full_layer(self, x: Tensor, seen: Tensor, w: Weights) -> Tensor:
        q, gate, own = self._project(x, w)
        return self._mlp(self._attend(x, q, gate, [own], seen, w), w)

    def _mlp(self, x: Tensor, w: Weights) -> Tensor:
        y = self._norm(x, w["post_attention_layernorm.weight"])
        inner = F.silu(F.linear(y, w["mlp.gate_proj.weight"]))
        return x + F.linear(inner * F.linear(y, w["mlp.up_proj.weight"]), w["mlp.down_proj.weight"])

    def _project(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor, Level]:
        """Queries, their gates, and keys with values."""
        y = self._norm(x, w["input_layernorm.weight"])
        q, k, v = (F.linear(y, w[f"self_attn.{part}_proj.weight"]) for part in "qkv")
        q, gate = _heads(q, 2 * _SIZE).chunk(2, -1)
        k = self._rotated(self._norm(_heads(k, _SIZE), w["self_attn.k_norm.weight"]))
        q = self._rotated(self._norm(q, w["self_attn.q_norm.weight"]))
        return q, gate, (k, _heads(v, _SIZE))

    def _rotated(self, x: Tensor) -> Tensor:
        """``x`` (B, heads, T, head_dim) at positions from 0 on."""
        angles = torch.arange(x.shape[2])[:, None] * self._inv_freq
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        size = len(self._inv_freq)
        a, b, rest = x.split((size, size, _SIZE - 2 * size), -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _attend(
        self, x: Tensor, q: Tensor, gate: Tensor, levels: list[Level], seen: Tensor, w: Weights
    ) -> Tensor:
        """``x`` with what its rows attend to of all ``levels`` where ``seen`` (T, K)."""
        keys, values = (torch.cat(each, 2) for each in zip(*levels, strict=True))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        mixed = (mixed * gate.sigmoid()).transpose(1, 2).flatten(-2)
        return x + F.linear(mixed, w["self_attn.o_proj.weight"])

    def _delta_net(self, y: Tensor, w: Weights) -> Tensor:
        """Gated DeltaNet (Yang et al. 2024) of normed rows ``y`` (B, T, D)."""

        def linear(part: str) -> Tensor:
            return F.linear(y, w[f"linear_attn.in_proj_{part}.weight"])

        def unit(x: Tensor) -> Tensor:
            x = _heads(x, _WIDTH)
            x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            return x.repeat_interleave(_VALUES, 1)

        taps = w["linear_attn.conv1d.weight"][:, 0]
        mixed = F.pad(linear("qkv"), (0, 0, taps.shape[1] - 1, 0))
        turned = torch.zeros(())
        for n in range(taps.shape[1]):
            turned = turned + mixed[:, n : n + y.shape[1]] * taps[:, n]
        q, k, v = F.silu(turned).float().split((_WIDTH, _WIDTH, _ALL_VALUES), -1)
        beta = linear("b").float().sigmoid()
        step = F.softplus(linear("a").float() + w["linear_attn.dt_bias"])
        decay = -w["linear_attn.A_log"].exp() * step
        out = delta_rule(unit(q) * _WIDTH**-0.5, unit(k), _heads(v, _WIDTH), decay.mT, beta.mT)
        normed = F.rms_norm(out, (_WIDTH,), w["linear_attn.norm.weight"], _EPS)
        gated = normed.to(self.dtype).transpose(1, 2).flatten(-2) * F.silu(linear("z"))
        return F.linear(gated, w["linear_attn.out_proj.weight"])


def _heads(x: Tensor, width: int) -> Tensor:
    """(B, T, heads * width) as (B, heads, T, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """``S = exp(decay) S; S += beta k (v - k S); out = q S``, token by token, in chunks.

    q and k (B, H, T, K), v (B, H, T, V), decay and beta (B, H, T), all float32; returns as v. T is
    a multiple of 32.
    """
    each = (q, k, v, beta[..., None], decay[..., None])
    q, k, v, beta, decay = (x.unflatten(2, (-1, _CHUNK)) for x in each)
    total = decay.cumsum(3)  # (B, H, chunks, chunk, 1)
    upper = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool).triu(1)
    between = (total - total.mT).masked_fill(upper, -torch.inf).exp()
    grown, scaled = total.exp(), k * beta
    right = torch.cat([v * beta, scaled * grown], -1)
    system = (scaled @ k.mT) * between
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    within, q = (q @ k.mT) * between, q * grown
    k = (k * (total[..., -1:, :] - total).exp()).mT
    state, outs = v.new_zeros(*v.shape[:2], k.shape[-2], v.shape[-1]), []
    for n in range(q.shape[2]):
        written = new[:, :, n] - read[:, :, n] @ state
        outs.append(q[:, :, n] @ state + within[:, :, n] @ written)
        state = state * grown[:, :, n, -1:] + k[:, :, n] @ written
    return torch.cat(outs, 2)
