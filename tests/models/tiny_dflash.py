"""DFlash and DSpark drafts of tiny random models, and what plain torch makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.checkpoints.make_gguf import write_gguf
from tests.models.tiny_heads import rms

BLOCK, MASK, KERNEL = 6, 7, 2
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
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection": "selector_hidden",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
"""What a GGUF file calls a draft's tensors, behind ``blk.N.``."""


class TinyDFlash:
    """A DFlash draft of a model with ``hidden`` numbers, as a folder; with ``rank``, DSpark's, or
    DFlash 2's if it has ``choices``.

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
        choices: int = 0,
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
        self.choices, self.group, selects = choices, 8, rank if choices else 0
        if selects:
            for name in ("predecessor", "successor"):
                w[f"candidate_selector.{name}_codebook"] = torch.randn(vocab, rank)
            w["candidate_selector.hidden_projection.weight"] = torch.randn(rank, hidden) * 0.15
            for name in [
                f"layers.{n}.{part}_conv" for n in range(2) for part in ("attention", "mlp")
            ]:
                w[f"{name}.base_kernel"] = torch.randn(2, KERNEL, hidden) * 0.5
                shape = (2 * KERNEL * hidden // self.group, hidden)
                w[f"{name}.kernel_projection.weight"] = torch.randn(shape) * 0.1
        elif rank:
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
        block: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(self.LAYERS)}
        self.selector: dict[str, int] = (
            {
                "conv_kernel_size": KERNEL,
                "conv_group_size": self.group,
                "selector_rank": rank,
                "selector_top_k": choices,
            }
            if selects
            else {}
        )
        kind = "DFlash2DraftModel" if selects else "Qwen3DSparkModel"
        config = {
            "architectures": [kind if rank else "DFlashDraftModel"],
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
            **(block if rank and not selects else {"dflash_config": {**block, **self.selector}}),
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
            **self.selector,
            **keys,
        }
        if config["use_sliding_window"]:
            metadata["attention.sliding_window"] = self.window
            metadata["attention.sliding_window_pattern"] = [True] * self.layers
        tensors = {}
        for name, tensor in self.weights.items():
            stem, kind, prefix = name, "", ""
            if name.endswith(("weight", "bias", "codebook")):
                stem, _, kind = name.replace("codebook", "codebook.weight").rpartition(".")
            if stem.startswith("layers."):
                _, layer, stem = stem.split(".", 2)
                prefix = f"blk.{layer}."
            tensors[f"{prefix}{_NAMES[stem]}.{kind}".rstrip(".")] = tensor.numpy(), "f32"
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
            normed, around = self._convolved(normed, f"{stem}attention_conv")
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
            x = x + around(self._linear(joined, f"{stem}self_attn.o_proj"))
            y = self._norm(x, f"{stem}post_attention_layernorm")
            y, around = self._convolved(y, f"{stem}mlp_conv")
            gate = torch.nn.functional.silu(self._linear(y, f"{stem}mlp.gate_proj"))
            gated = gate * self._linear(y, f"{stem}mlp.up_proj")
            x = x + around(self._linear(gated, f"{stem}mlp.down_proj"))
        self.last = self._norm(x, "norm")
        return (self.last @ head.T).numpy()

    def _convolved(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, Callable[..., Any]]:
        """The rows (b, D) as DFlash 2's first convolution leaves them, and the second one."""
        if f"{name}.base_kernel" not in self.weights:
            return x, lambda rows: rows
        base = self.weights[f"{name}.base_kernel"]
        own = self._linear(x, f"{name}.kernel_projection").view(len(x), 2, KERNEL, -1)

        def side(number: int, rows: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(rows)
            for row, back, channel in np.ndindex(len(x), KERNEL, x.shape[1]):
                if back <= row:
                    kernel = (
                        base[number, back, channel] + own[row, number, back, channel // self.group]
                    )
                    out[row, channel] += kernel * rows[row - back, channel]
            return out

        return side(0, x), lambda rows: side(1, rows)

    def after(self, logits: np.ndarray, tokens: list[int], rows: Any = None) -> np.ndarray:
        """Logits (n, V) behind ``tokens``; a selector's, of rows of the last block."""
        if self.choices:
            codes = [
                self.weights[f"candidate_selector.{n}_codebook"]
                for n in ("predecessor", "successor")
            ]
            gates = self._linear(self.last[rows], "candidate_selector.hidden_projection")
            scores = logits + ((codes[0][tokens] * gates) @ codes[1].T).numpy()
            best = np.sort(logits, 1)[:, -self.choices, None]
            return np.where(logits >= best, scores, -np.inf)
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
