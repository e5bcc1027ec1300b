"""Draft heads of tiny random models, and what transformers' layers and plain torch make of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.make_gguf import in_pairs, write_gguf
from tests.models.tiny import save_tiny
from tests.models.tiny_configs import SIZES, WINDOW

BLOCK, MASK, KERNEL = 6, 7, 2  # DFlash's rows, and the token of those that are drafted
CLUSTERS = {"num_centroids": 211, "centroid_intermediate_top_k": 40}  # 211 is a prime


def rms(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight


class TinyBlock:
    """A model with an MTP block in its folder, and what transformers makes of the block."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.target = save_tiny(name, folder).module
        config = self.target.config.get_text_config()
        self.config, hidden = config, config.hidden_size
        numbered = not name.startswith("qwen")
        block = type(self.target)(self._one_layer(config))
        state = load_file(folder / "model.safetensors")
        torch.manual_seed(7)
        for parameter in block.parameters():
            parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15)
            parameter.data += 0.5 if parameter.ndim == 1 else 0.0
        self.embed = self.target.get_input_embeddings()
        matrices = {}
        if name.startswith("deepseek"):  # whose block is published with matrices of its own
            self.embed = block.get_input_embeddings()
            matrices = {"embed_tokens": self.embed.weight, "shared_head.head": block.lm_head.weight}
        else:
            block.lm_head.weight = self.target.lm_head.weight
        self.block = block.float().eval()
        self.fc = torch.randn(hidden, 2 * hidden) * 0.15
        self.norms = [torch.rand(hidden) + 0.5 for _ in range(2)]
        self.offset = 1.0 if name.startswith("qwen") else 0.0
        own = {
            key: value.contiguous()
            for key, value in block.state_dict().items()
            if ".layers." in key or key == "model.norm.weight"
        }
        prefix = f"model.layers.{config.num_hidden_layers}." if numbered else "mtp.layers.0."
        found = {key.replace("model.layers.0.", prefix): value for key, value in own.items()}
        beside = (
            ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            if numbered
            else ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        )
        stem = prefix if numbered else "mtp."
        values = (*self.norms, self.fc, found.pop("model.norm.weight"))
        for part, value in zip(beside, values, strict=True):
            found[f"{stem}{part}.weight"] = value
        found |= {f"{stem}{part}.weight": value.data for part, value in matrices.items()}
        save_file(state | found, folder / "model.safetensors", metadata={"format": "pt"})
        if numbered:
            path = folder / "config.json"
            path.write_text(
                json.dumps({**json.loads(path.read_text("utf-8")), "num_nextn_predict_layers": 1})
            )

    def _one_layer(self, config: Any) -> Any:
        values = config.to_dict()
        values["num_hidden_layers"] = 1
        for key in ("layer_types", "mlp_layer_types"):
            if values.get(key):
                values[key] = ["full_attention" if key == "layer_types" else "sparse"]
        if "first_k_dense_replace" in values:
            values["first_k_dense_replace"] = 0
        own = type(config)(**values)
        own._attn_implementation = "eager"
        return own

    def expected(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The target's features, and the block's logits of all rows but the first."""
        with torch.no_grad():
            body = self.target.get_decoder()
            hidden = body(torch.tensor([ids])).last_hidden_state[0]
            embedded = self.embed(torch.tensor(ids))
            eps = self.config.rms_norm_eps
            weights = [norm + self.offset for norm in self.norms]
            both = [rms(embedded[1:], weights[0], eps), rms(hidden[:-1], weights[1], eps)]
            x = torch.cat(both, -1) @ self.fc.T
            logits = self.block(inputs_embeds=x[None]).logits[0]
        return hidden.numpy(), logits.float().numpy()


_EAGLE_NAMES = {
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "fc": "fc",
    "fc_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
}
"""What a GGUF file calls a head's tensors."""


class TinyEagle3:
    """An EAGLE-3 head of a tiny Llama, as a folder, and its layer in plain torch."""

    LAYERS = (0, 1, 2)  # by their outputs

    def __init__(self, folder: Path, hidden: int, vocab: int, **flags: bool) -> None:
        torch.manual_seed(3)
        self.flags, self.hidden, self.heads, self.size = flags, hidden, 4, 16
        self.tokens = np.sort(np.random.default_rng(1).choice(vocab, 90, replace=False))
        q, kv, inner = self.heads * self.size, 2 * self.size, 96
        shapes = {
            "fc": (hidden, 3 * hidden),
            "midlayer.self_attn.q_proj": (q, 2 * hidden),
            "midlayer.self_attn.k_proj": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, q),
            "midlayer.mlp.gate_proj": (inner, hidden),
            "midlayer.mlp.up_proj": (inner, hidden),
            "midlayer.mlp.down_proj": (hidden, inner),
            "lm_head": (len(self.tokens), hidden),
        }
        norms = {"midlayer.input_layernorm", "midlayer.hidden_norm", "norm"}
        norms |= {"midlayer.post_attention_layernorm"}
        w = {f"{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
        w |= {f"{name}.weight": torch.rand(hidden) + 0.5 for name in sorted(norms)}
        if flags.get("norm_before_fc"):
            w["fc_norm.weight"] = torch.rand(3 * hidden) + 0.5
        self.weights = w
        offsets = torch.tensor(self.tokens - np.arange(len(self.tokens)))
        chosen = torch.isin(torch.arange(vocab), torch.tensor(self.tokens))
        save_file(w | {"d2t": offsets, "t2d": chosen}, folder / "model.safetensors")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 2,
            "head_dim": self.size,
            "vocab_size": vocab,
            "draft_vocab_size": len(self.tokens),
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.LAYERS)},
            **flags,
        }
        self.config = config
        (folder / "config.json").write_text(json.dumps(config))

    def save_speculators(self, folder: Path) -> Path:
        """The head as vLLM's library writes it: the layer's config apart, other names."""
        beside = ("draft_vocab_size", "architectures", "eagle_config", *self.flags)
        layer = {key: value for key, value in self.config.items() if key not in beside}
        config = {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": len(self.tokens),
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.LAYERS],
            "norm_before_residual": False,
            "speculators_model_type": "eagle3",
            "target_hidden_size": None,
            "transformer_layer_config": layer,
            **self.flags,
        }
        (folder / "config.json").write_text(json.dumps(config))
        names = {"midlayer": "layers.0", "fc_norm": "input_norm"}
        path = folder / "model.safetensors"
        renamed = {}
        for name, tensor in load_file(path).items():
            stem, dot, rest = name.partition(".")
            renamed[f"{names.get(stem, stem)}{dot}{rest}"] = tensor
        save_file(renamed, path)
        return folder

    def save_gguf(
        self,
        path: Path,
        layers: tuple[int, ...] = (1, 2, 3),
        kind: str = "i64",
        more: Mapping[str, np.ndarray] = MappingProxyType({}),
        mapped: bool = True,
        **keys: Any,
    ) -> Path:
        """The head as llama.cpp's converter writes it, which reads what goes into ``layers``, with
        ``more`` tensors; without a map of its tokens unless ``mapped``.
        """
        config = self.config
        metadata = {
            "block_count": 1,
            "context_length": config["max_position_embeddings"],
            "embedding_length": self.hidden,
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": self.heads,
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": self.size,
            "attention.value_length": self.size,
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.dimension_count": self.size,
            "rope.freq_base": config["rope_theta"],
            "vocab_size": config["vocab_size"],
            "target_layers": list(layers),
            "target_hidden_size": self.hidden,
            "norm_before_residual": self.flags.get("norm_before_residual", False),
            "norm_before_fc": self.flags.get("norm_before_fc", False),
            **keys,
        }
        numbers = self.tokens.astype({"i": "int", "f": "float"}[kind[0]] + kind[1:])
        tensors: dict[str, Any] = {"d2t": (numbers, kind)} if mapped else {}
        tensors |= {f"{name}.weight": (array, "f32") for name, array in more.items()}
        for name, tensor in self.weights.items():
            stem = name.removesuffix(".weight")
            rows = tensor.numpy()
            if stem.endswith(("q_proj", "k_proj")):
                rows = in_pairs(rows, self.heads if "q_proj" in stem else 2)
            tensors[f"{_EAGLE_NAMES[stem]}.weight"] = rows, "f32"
        whole = {f"eagle3.{key}": value for key, value in metadata.items()}
        return write_gguf(path, "eagle3", {**whole, "tokenizer.ggml.model": "no_vocab"}, tensors)[0]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, self.weights[f"{name}.weight"], 1e-5)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def expected(
        self, embedded: torch.Tensor, features: torch.Tensor, divisors: torch.Tensor
    ) -> torch.Tensor:
        """Logits of rows (n, D) at positions 1 to n, given features (n, 3D); rotary frequencies are
        divided by ``divisors``.
        """
        if self.flags.get("norm_before_fc"):
            features = self.norm(features, "fc_norm")
        g, n = self.linear(features, "fc"), len(embedded)
        normed = self.norm(g, "midlayer.hidden_norm")
        both = torch.cat([self.norm(embedded, "midlayer.input_layernorm"), normed], -1)
        shape = (n, -1, self.size)
        q, k, v = (
            self.linear(both, f"midlayer.self_attn.{part}_proj").view(shape).transpose(0, 1)
            for part in "qkv"
        )
        frequencies = 10000.0 ** (-torch.arange(0, 1, 2 / self.size)) / divisors
        angle = torch.arange(1, n + 1)[:, None] * frequencies
        cos, sin = angle.cos(), angle.sin()

        def turned(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        k, v = (each.repeat_interleave(2, 0) for each in (turned(k), v))
        mixed = torch.nn.functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        x = normed if self.flags.get("norm_before_residual") else g
        joined = mixed.transpose(0, 1).reshape(n, -1)
        x = x + self.linear(joined, "midlayer.self_attn.o_proj")
        y = self.norm(x, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(y, "midlayer.mlp.gate_proj"))
        x = x + self.linear(gate * self.linear(y, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")
        return self.linear(self.norm(x, "norm"), "lm_head")


_DFLASH_NAMES = {
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
            {n: _neighbours(n, t, self.size) for n, t in w.items()} if in_pairs else w,
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
            tensors[f"{prefix}{_DFLASH_NAMES[stem]}.{kind}".rstrip(".")] = tensor.numpy(), "f32"
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


def _neighbours(name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of heads of queries and keys, whose halves rotate, in an order in which pairs do."""
    if not any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    halves = tensor.reshape(-1, 2, size // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


class TinyAssistant:
    """Gemma 4's assistant of the tiny model ``name``, as a folder, and transformers' own."""

    def __init__(self, name: str, target: Path, folder: Path, **options: Any) -> None:
        self.target = save_tiny(name, target).module
        import transformers  # the others need torch alone

        theirs = self.target.config.get_text_config()
        unified = "unified" in theirs.model_type
        kind = "Gemma4Unified" if unified else "Gemma4"
        inputs = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        text = getattr(transformers, f"{kind}TextConfig")(
            **{**SIZES, "hidden_size": 32, "num_hidden_layers": 4},
            **({} if unified else dict.fromkeys(inputs, 0)),
            num_kv_shared_layers=4,
            head_dim=16,
            global_head_dim=theirs.per_layer_config[-1].head_dim,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            attention_k_eq_v=theirs.attention_k_eq_v,
            num_global_key_value_heads=theirs.per_layer_config[-1].num_key_value_heads,
        )
        config = getattr(transformers, f"{kind}AssistantConfig")(
            text_config=text, backbone_hidden_size=theirs.hidden_size, **options
        )
        config._attn_implementation = "eager"
        torch.manual_seed(5)
        with pytest.MonkeyPatch.context() as patch:
            kind_of_text = transformers.Gemma4TextConfig
            usual = kind_of_text.kv_sharing_modes.fget

            def shared(config: Any) -> Any:  # no word for layers that all read another model's
                every = config.num_kv_shared_layers == config.num_hidden_layers
                return ["reuse"] * config.num_hidden_layers if every else usual(config)

            patch.setattr(kind_of_text, "kv_sharing_modes", property(shared))
            model = getattr(transformers, f"{kind}AssistantForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)
                if parameter.ndim == 1:
                    parameter.add_(0.7)
            for each in model.model.layers:
                each.layer_scalar.copy_(torch.rand(1) + 0.5)
            if config.use_ordered_embeddings:
                order = torch.randperm(theirs.vocab_size)
                model.masked_embedding.token_ordering.copy_(order)
        self.model = model.float().eval()
        self.model.save_pretrained(folder)

    def levels(self, ids: list[int], drafts: list[int]) -> list[np.ndarray]:
        """Logits of each level below ``ids``, whose last token the target has not seen."""
        with torch.no_grad():
            held = torch.tensor([ids[:-1]])
            seen = self.target(
                held, output_hidden_states=True, return_shared_kv_states=True, use_cache=True
            )
            hidden, found = seen.hidden_states[-1][:, -1:], []
            for token in (ids[-1], *drafts):
                embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
                made = self.model(
                    inputs_embeds=torch.cat([embedded, hidden], -1),
                    position_ids=torch.tensor([[len(ids) - 1]]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    shared_kv_states=seen.shared_kv_states,
                )
                hidden = made.last_hidden_state
                found.append(made.logits[0, 0].numpy())
        return found
