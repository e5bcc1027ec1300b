"""An EAGLE-3 head in torch (Li et al. 2025): its computation, how it begins, and its export.

The row of a token takes in the token's embedding and the target's features of the token before it,
three layers side by side; of a draft token, the head's own output. Features are kept in units in
which they are about one (``scales``), which the export folds into ``fc``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from localrt.models.checkpoints.base import EMBEDDING, HEAD, Checkpoint
from localrt.models.registry import read_config
from localrt.quant.formats import unpack
from localrt.quant.formats.packed import PackedTensor

Level = tuple[Tensor, Tensor]
"""Keys and values, (B, kv_heads, T, head_dim)."""

_LAYER = "midlayer."
_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_MATRICES = (*_INPUTS, "self_attn.o_proj", *_MLP)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What training reads of the target: its config, its embedding (V, D) and output rows of the
    draft vocabulary ``ids`` (N, D), both in bfloat16, and its last layer's weights by name.
    """

    config: dict[str, Any]
    eps: float
    inv_freq: Tensor
    ids: Tensor
    embedding: Tensor
    head: Tensor
    norm: Tensor
    last: dict[str, Tensor]

    @classmethod
    def read(cls, checkpoint: Checkpoint, ids: Tensor) -> Target:
        """Unpack them."""

        def tensor(name: str) -> Tensor:
            block = checkpoint.read(name)
            assert isinstance(block, PackedTensor), "a published file holds rows"
            return torch.from_numpy(np.array(unpack(block)))

        decoder = read_config(checkpoint)
        rope = decoder.attending[-1].rope
        assert rope is not None, "Llama's kind of attention has positions"
        embedding = tensor(EMBEDDING).bfloat16()
        head = embedding if decoder.tied_head else tensor(HEAD).bfloat16()
        prefix = f"model.layers.{decoder.layers - 1}."
        names = [*_MATRICES, "input_layernorm", "post_attention_layernorm"]
        return cls(
            config=dict(checkpoint.config),
            eps=decoder.norm_eps,
            inv_freq=torch.tensor(rope.inv_freq),
            ids=ids,
            embedding=embedding,
            head=head[ids].contiguous(),
            norm=tensor("model.norm.weight"),
            last={name: tensor(f"{prefix}{name}.weight") for name in names},
        )


class HeadModel:
    """The head. ``weights`` have the published names and shapes, but for the output rows, which
    stay the target's. ``scales`` (3,) are about the size of each layer's features, ``width`` is
    that of its MLP: the last layer's largest neurons.
    """

    def __init__(self, target: Target, scales: Tensor, width: int) -> None:
        config = target.config
        self.target, self.scales = target, scales
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config["num_key_value_heads"])
        hidden, last = int(config["hidden_size"]), dict(target.last)
        norms = last["mlp.down_proj"].norm(dim=0) * last["mlp.up_proj"].norm(dim=1)
        kept = norms.argsort(descending=True)[:width].sort().values
        last["mlp.gate_proj"] = last["mlp.gate_proj"][kept]
        last["mlp.up_proj"] = last["mlp.up_proj"][kept]
        last["mlp.down_proj"] = last["mlp.down_proj"][:, kept]
        generator = torch.Generator().manual_seed(0)

        def beside(name: str) -> Tensor:
            """The last layer's matrix for the features, and a random one for the embedding."""
            matrix = last[name]
            random = torch.empty_like(matrix).normal_(0.0, 0.02, generator=generator)
            return torch.cat([random, matrix], 1)

        # A new head passes the target's last hidden state on, through its last layer.
        fc = torch.cat([torch.zeros(hidden, 2 * hidden), 0.5 * torch.eye(hidden)], 1)
        weights = {"fc": fc, "norm": target.norm, f"{_LAYER}input_layernorm": torch.ones(hidden)}
        weights[f"{_LAYER}hidden_norm"] = last["input_layernorm"]
        weights[f"{_LAYER}post_attention_layernorm"] = last["post_attention_layernorm"]
        for name in _MATRICES:
            weights[_LAYER + name] = beside(name) if name in _INPUTS else last[name]
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[_LAYER + name] = weights[_LAYER + name] / scales[-1]
        self.weights = {
            name: weight.clone().float().requires_grad_() for name, weight in weights.items()
        }

    def fused(self, features: Tensor) -> Tensor:
        """The target's features (..., 3D), as they are stored, in the head's own terms (..., D)."""
        parts = split(features.float(), 3) / self.scales[:, None]
        return self._linear(parts.flatten(-2), "fc")

    def project(self, x: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Level]:
        """Queries, and keys with values, of rows: features ``x`` (B, T, D), ``tokens`` (B, T)."""
        embedded = self._norm(self.target.embedding[tokens], f"{_LAYER}input_layernorm")
        both = torch.cat([embedded, self._norm(x, f"{_LAYER}hidden_norm")], -1)
        angles = positions[:, None] * self.target.inv_freq

        def heads(part: str, count: int) -> Tensor:
            rows = self._linear(both, f"{_LAYER}self_attn.{part}_proj")
            return split(rows, count).transpose(1, 2)

        v = heads("v", self._kv_heads)
        q = _rotate(heads("q", self._heads), angles).to(v.dtype)
        return q, (_rotate(heads("k", self._kv_heads), angles).to(v.dtype), v)

    def finish(self, x: Tensor, q: Tensor, levels: list[Level], seen: Tensor) -> Tensor:
        """The output (B, T, D) of rows that attend to all ``levels`` where ``seen`` (T, K)."""
        keys, values = (torch.cat(each, 2) for each in zip(*levels, strict=True))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        x = x + self._linear(mixed.transpose(1, 2).flatten(-2), f"{_LAYER}self_attn.o_proj")
        y = self._norm(x, f"{_LAYER}post_attention_layernorm")
        inner = F.silu(self._linear(y, f"{_LAYER}mlp.gate_proj"))
        inner = inner * self._linear(y, f"{_LAYER}mlp.up_proj")
        return x + self._linear(inner, f"{_LAYER}mlp.down_proj")

    def logits(self, x: Tensor) -> Tensor:
        """Over the draft vocabulary, float32."""
        return F.linear(self._norm(x, "norm").bfloat16(), self.target.head).float()

    def unrolled(self, features: Tensor, tokens: Tensor, levels: int) -> list[Tensor]:
        """Outputs (B, T, D) of each level. Row i takes in token i, and on the first level
        ``features`` (B, T, 3D) of the token before; on deeper ones, the level before's own output.

        On level n, row i sees the first level up to row i - n + 1, row i - n + 2 of the second,
        ... and itself, as the rows of a tree will.
        """
        x, rows = self.fused(features), torch.arange(tokens.shape[1])
        behind = rows[:, None] - rows
        held: list[Level] = []
        outs: list[Tensor] = []
        for n in range(levels):
            q, own = self.project(x, tokens, rows)
            held.append(own)
            seen = [behind >= n, *(behind == n - level for level in range(1, n + 1))]
            outs.append(self.finish(x, q, held, torch.cat(seen, 1)))
            x = F.pad(outs[-1], (0, 0, 1, 0))[:, :-1]
        return outs

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weights[name], self.target.eps)


def split(x: Tensor, parts: int) -> Tensor:
    """Rows (..., N) as (..., parts, N / parts)."""
    return x.reshape(*x.shape[:-1], parts, -1)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def export(model: HeadModel, layers: tuple[int, ...], folder: Path) -> None:
    """Write the head to ``folder`` as it is published, in bfloat16. ``layers`` are those whose
    inputs it reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, own = model.target, model.target.config
    weights = {name: weight.detach().clone() for name, weight in model.weights.items()}
    weights["fc"] = (split(weights["fc"], 3) / model.scales[:, None]).flatten(-2)
    weights["lm_head"] = target.head
    tensors = {f"{name}.weight": each.bfloat16().contiguous() for name, each in weights.items()}
    used = torch.zeros(int(own["vocab_size"]), dtype=torch.bool)
    used[target.ids] = True
    tensors |= {"d2t": target.ids - torch.arange(len(target.ids)), "t2d": used}
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    kept = (
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings"),
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": len(target.ids),
        "target_hidden_size": own["hidden_size"],
        "intermediate_size": len(model.weights[f"{_LAYER}mlp.up_proj"]),
        **{name: own[name] for name in kept if name in own},
        "eagle_config": {
            # Listed by the layers whose outputs they are.
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "new.safetensors").replace(folder / "model.safetensors")
