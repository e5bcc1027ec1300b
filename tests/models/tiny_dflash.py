"""DFlash and DSpark drafts of tiny random models, and what plain torch makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.checkpoints.make_gguf import write_gguf
from tests.models.tiny_heads import rms

BLOCK, MASK = 6, 7
_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
"""What a GGUF file calls a draft's tensors, behind ``blk.N.``."""


class TinyDFlash:
    """A DFlash draft of a model with ``hidden`` numbers, as a folder; with ``rank``, DSpark's.

    ``in_pairs``: the folder's queries and keys rotate neighbours.
    """

    LAYERS = (0, 1, 2)  # by their outputs

    def __init__(
        self,
        folder: Path,
        hidden: int,
        vocab: int,
        *,
        window: int = 1 << 20,
        rank: int = 0,
        in_pairs: bool = False,
        **changes: Any,
    ) -> None:
        self.window, self.causal = window, bool(changes.get("is_causal"))
        torch.manual_seed(3)
        self.hidden, self.heads, self.size, self.layers = hidden, 4, 16, 2
        q, kv, inner = self.heads * self.size, 2 * self.size, 96
        w = {"fc.weight": torch.randn(hidden, len(self.LAYERS) * hidden) * 0.15}
        for name in ("hidden_norm", "norm"):
            w[f"{name}.weight"] = torch.rand(hidden) + 0.5
        for layer in range(self.layers):
            shapes = {
                "self_attn.q_proj": (q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, q),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
            norms |= {"self_attn.q_norm": self.size, "self_attn.k_norm": self.size}
            for name, shape in shapes.items():
                w[f"layers.{layer}.{name}.weight"] = torch.randn(shape) * 0.15
            for name, width in norms.items():
                w[f"layers.{layer}.{name}.weight"] = torch.rand(width) + 0.5
        if rank:
            for number in (1, 2):
                w[f"markov_head.markov_w{number}.weight"] = torch.randn(vocab, rank) * 0.6
            w["confidence_head.proj.weight"] = torch.randn(1, hidden + rank)
            w["confidence_head.proj.bias"] = torch.randn(1)
        self.weights = w
        folder.mkdir(exist_ok=True)
        save_file(
            {n: _in_pairs(n, t, self.size) for n, t in w.items()} if in_pairs else w,
            folder / "model.safetensors",
        )
        block = {"mask_token_id": MASK, "target_layer_ids": list(self.LAYERS)}
        config = {
            "architectures": ["Qwen3DSparkModel" if rank else "DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 2,
            "head_dim": self.size,
            "vocab_size": vocab,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "block_size": BLOCK,
            **(block if rank else {"dflash_config": block}),
            "rope_is_neox_style": not in_pairs,
            "use_sliding_window": window < 1 << 20,
            "sliding_window": window,
            "layer_types": ["sliding_attention"] * self.layers,
            **changes,
        }
        self.config = config
        (folder / "config.json").write_text(json.dumps(config))

    def save_gguf(self, path: Path, layers: tuple[int, ...] = (1, 2, 3), **keys: Any) -> Path:
        """The draft as llama.cpp's converter writes it, which reads what goes into ``layers``."""
        config = self.config
        metadata = {
            "block_count": self.layers,
            "context_length": config["max_position_embeddings"],
            "embedding_length": self.hidden,
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": self.heads,
            "attention.head_count_kv": 2,
            "attention.key_length": self.size,
            "attention.value_length": self.size,
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": config["rope_theta"],
            "vocab_size": config["vocab_size"],
            "block_size": BLOCK,
            "target_layers": list(layers),
            **keys,
        }
        if config["use_sliding_window"]:
            metadata["attention.sliding_window"] = self.window
            metadata["attention.sliding_window_pattern"] = [True] * self.layers
        tensors = {}
        for name, tensor in self.weights.items():
            (stem, _, kind), prefix = name.rpartition("."), ""
            if stem.startswith("layers."):
                _, layer, stem = stem.split(".", 2)
                prefix = f"blk.{layer}."
            tensors[f"{prefix}{_NAMES[stem]}.{kind}"] = tensor.numpy(), "f32"
        whole = {f"dflash.{key}": value for key, value in metadata.items()}
        whole |= {"tokenizer.ggml.model": "no_vocab", "tokenizer.ggml.mask_token_id": MASK}
        return write_gguf(path, "dflash", whole, tensors)[0]

    def expected(
        self, features: torch.Tensor, embedded: torch.Tensor, head: torch.Tensor
    ) -> np.ndarray:
        """Logits of a block's rows (b, D) after tokens with ``features`` (n, 3D)."""
        context = self._norm(self._linear(features, "fc"), "hidden_norm")
        n, x = len(context), embedded
        for layer in range(self.layers):
            stem = f"layers.{layer}."
            normed = self._norm(x, f"{stem}input_layernorm")
            both = torch.cat([context, normed])
            places = torch.arange(n + len(x))
            q = self._heads(normed, f"{stem}self_attn.q_proj", f"{stem}self_attn.q_norm")
            k = self._heads(both, f"{stem}self_attn.k_proj", f"{stem}self_attn.k_norm")
            v = self._heads(both, f"{stem}self_attn.v_proj", "")
            q, k = self._turned(q, places[n:]), self._turned(k, places)
            first = max(0, n + 1 - self.window)  # of the first row's, which all rows may see
            k, v = (each[:, first:].repeat_interleave(2, 0) for each in (k, v))
            seen = places[None] <= places[n:, None] if self.causal else places[None] >= 0
            if self.causal:  # each row has its own window
                seen &= places[None] > places[n:, None] - self.window
            mask = seen.expand(len(x), -1)[:, first:]
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            joined = mixed.transpose(0, 1).reshape(len(x), -1)
            x = x + self._linear(joined, f"{stem}self_attn.o_proj")
            y = self._norm(x, f"{stem}post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(y, f"{stem}mlp.gate_proj"))
            x = x + self._linear(
                gate * self._linear(y, f"{stem}mlp.up_proj"), f"{stem}mlp.down_proj"
            )
        return (self._norm(x, "norm") @ head.T).numpy()

    def after(self, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
        """Logits (n, V) behind ``tokens``."""
        w = [self.weights[f"markov_head.markov_w{n}.weight"].numpy() for n in (1, 2)]
        changed: np.ndarray = logits + w[0][tokens] @ w[1].T
        return changed

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, self.weights[f"{name}.weight"], 1e-6)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _heads(self, x: torch.Tensor, name: str, norm: str) -> torch.Tensor:
        rows = self._linear(x, name).view(len(x), -1, self.size)
        return (self._norm(rows, norm) if norm else rows).transpose(0, 1)

    def _turned(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        angle = places[:, None] * 10000.0 ** (-torch.arange(0, 1, 2 / self.size))
        cos, sin = angle.cos(), angle.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _in_pairs(name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of heads of queries and keys, whose halves rotate, in an order in which pairs do."""
    if not any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    halves = tensor.reshape(-1, 2, size // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
