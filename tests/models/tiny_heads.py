"""Draft heads of tiny random models, and what transformers' layers and plain torch make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.make_gguf import in_pairs, write_gguf
from tests.models.tiny import save_tiny


def rms(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight


class TinyBlock:
    """A model with an MTP block in its folder, and what transformers makes of the block."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.target = save_tiny(name, folder)
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


_TENSORS = {
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
            tensors[f"{_TENSORS[stem]}.weight"] = rows, "f32"
        whole = {f"eagle3.{key}": value for key, value in metadata.items()}
        return write_gguf(path, "eagle3", {**whole, "tokenizer.ggml.model": "no_vocab"}, tensors)[0]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, self.weights[f"{name}.weight"], 1e-5)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def expected(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Logits of rows (n, D) at positions 1 to n, given features (n, 3D)."""
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
        angle = torch.arange(1, n + 1)[:, None] * 10000.0 ** (-torch.arange(0, 1, 2 / self.size))
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
