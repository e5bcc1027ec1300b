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


_NAMES = {
    "fc": "fc",
    "fc_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "input_layernorm": "attn_norm",
    "midlayer.hidden_norm": "attn_norm_2",
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
"""What a GGUF file calls a head's tensors; of a layer's, what is behind ``blk.N.``."""


class _TinyHead:
    """A head with layers of its own for a tiny model, as a folder, and the layers in torch."""

    LAYERS = (0, 1, 2)  # whose outputs it reads
    SIZE, HEADS, INNER = 16, 4, 96

    def __init__(self, hidden: int, vocab: int, eps: float) -> None:
        torch.manual_seed(3)
        self.hidden, self.eps = hidden, eps
        self.weights = {"fc.weight": torch.randn(hidden, 3 * hidden) * 0.15}
        self.config: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": self.INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": self.HEADS,
            "num_key_value_heads": 2,
            "head_dim": self.SIZE,
            "vocab_size": vocab,
            "max_position_embeddings": 256,
            "rms_norm_eps": eps,
            "rope_theta": 10000.0,
        }

    def add_layer(self, stem: str, columns: int) -> None:
        """Make a layer's weights; ``columns`` go into its attention."""
        hidden, rows = self.hidden, {"q": self.HEADS * self.SIZE, "k": 2 * self.SIZE}
        shapes = {f"self_attn.{part}_proj": (rows.get(part, rows["k"]), columns) for part in "qkv"}
        shapes["self_attn.o_proj"] = hidden, rows["q"]
        shapes |= {f"mlp.{part}_proj": (self.INNER, hidden) for part in ("gate", "up")}
        shapes["mlp.down_proj"] = hidden, self.INNER
        for name, shape in shapes.items():
            self.weights[f"{stem}{name}.weight"] = torch.randn(shape) * 0.15
        self.add_norms(f"{stem}input_layernorm", f"{stem}post_attention_layernorm")

    def add_norms(self, *names: str, size: int | None = None) -> None:
        for name in names:
            self.weights[f"{name}.weight"] = torch.rand(size or self.hidden) + 0.5

    def keys(self) -> dict[str, Any]:
        """Metadata of a GGUF file, as llama.cpp's converter writes them."""
        config = self.config
        return {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": self.hidden,
            "feed_forward_length": self.INNER,
            "attention.head_count": self.HEADS,
            "attention.head_count_kv": 2,
            "attention.key_length": self.SIZE,
            "attention.value_length": self.SIZE,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.dimension_count": self.SIZE,
            "rope.freq_base": config["rope_theta"],
            "vocab_size": config["vocab_size"],
        }

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, self.weights[f"{name}.weight"], self.eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def heads(self, x: torch.Tensor, name: str, norm: str = "") -> torch.Tensor:
        """Rows of a projection, (heads, n, size)."""
        rows = self.linear(x, name).view(len(x), -1, self.SIZE)
        return (self.norm(rows, norm) if norm else rows).transpose(0, 1)

    def turned(
        self, x: torch.Tensor, places: torch.Tensor, divisors: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """Rotated by rows' places, at frequencies that are divided by ``divisors``."""
        frequencies = 10000.0 ** (-torch.arange(0, 1, 2 / self.SIZE)) / divisors
        angle = places[:, None] * frequencies
        cos, sin = angle.cos(), angle.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def mlp(self, y: torch.Tensor, stem: str) -> torch.Tensor:
        gate = torch.nn.functional.silu(self.linear(y, f"{stem}mlp.gate_proj"))
        return self.linear(gate * self.linear(y, f"{stem}mlp.up_proj"), f"{stem}mlp.down_proj")


class TinyEagle3(_TinyHead):
    """An EAGLE-3 head of a tiny Llama."""

    def __init__(self, folder: Path, hidden: int, vocab: int, **flags: bool) -> None:
        super().__init__(hidden, vocab, 1e-5)
        self.flags = flags
        self.tokens = np.sort(np.random.default_rng(1).choice(vocab, 90, replace=False))
        self.add_layer("midlayer.", 2 * hidden)
        self.add_norms("midlayer.hidden_norm", "norm")
        self.weights["lm_head.weight"] = torch.randn(len(self.tokens), hidden) * 0.15
        if flags.get("norm_before_fc"):
            self.add_norms("fc_norm", size=3 * hidden)
        offsets = torch.tensor(self.tokens - np.arange(len(self.tokens)))
        chosen = torch.isin(torch.arange(vocab), torch.tensor(self.tokens))
        save_file(self.weights | {"d2t": offsets, "t2d": chosen}, folder / "model.safetensors")
        self.config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": len(self.tokens),
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.LAYERS)},
            **flags,
        }
        (folder / "config.json").write_text(json.dumps(self.config))

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
        more: Mapping[str, np.ndarray] = MappingProxyType({}),
        mapped: bool = True,
        **keys: Any,
    ) -> Path:
        """The head as a GGUF file, which reads what goes into ``layers``, with ``more`` tensors;
        without a map of its tokens unless ``mapped``.
        """
        metadata = {
            **self.keys(),
            "target_layers": list(layers),
            "target_hidden_size": self.hidden,
            "norm_before_residual": self.flags.get("norm_before_residual", False),
            "norm_before_fc": self.flags.get("norm_before_fc", False),
            **keys,
        }
        tensors: dict[str, Any] = {"d2t": (self.tokens, "i64")} if mapped else {}
        tensors |= {f"{name}.weight": (array, "f32") for name, array in more.items()}
        for name, tensor in self.weights.items():
            stem, rows = name.removesuffix(".weight"), tensor.numpy()
            if stem.endswith(("q_proj", "k_proj")):
                rows = in_pairs(rows, self.HEADS if "q_proj" in stem else 2)
            own = _NAMES.get(stem) or _NAMES[stem.removeprefix("midlayer.")]
            prefix = "blk.0." if stem.startswith("midlayer.") else ""
            tensors[f"{prefix}{own}.weight"] = rows, "f32"
        whole = {f"eagle3.{key}": value for key, value in metadata.items()}
        return write_gguf(path, "eagle3", {**whole, "tokenizer.ggml.model": "no_vocab"}, tensors)[0]

    def expected(
        self, embedded: torch.Tensor, features: torch.Tensor, divisors: torch.Tensor
    ) -> torch.Tensor:
        """Logits of rows (n, D) at positions 1 to n, given features (n, 3D); rotary frequencies are
        divided by ``divisors``.
        """
        if self.flags.get("norm_before_fc"):
            features = self.norm(features, "fc_norm")
        g, places = self.linear(features, "fc"), torch.arange(1, len(embedded) + 1)
        normed = self.norm(g, "midlayer.hidden_norm")
        both = torch.cat([self.norm(embedded, "midlayer.input_layernorm"), normed], -1)
        q, k, v = (self.heads(both, f"midlayer.self_attn.{part}_proj") for part in "qkv")
        q, k = (self.turned(each, places, divisors) for each in (q, k))
        k, v = (each.repeat_interleave(2, 0) for each in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = normed if self.flags.get("norm_before_residual") else g
        joined = mixed.transpose(0, 1).reshape(len(x), -1)
        x = x + self.linear(joined, "midlayer.self_attn.o_proj")
        x = x + self.mlp(self.norm(x, "midlayer.post_attention_layernorm"), "midlayer.")
        return self.linear(self.norm(x, "norm"), "lm_head")


class TinyDFlash(_TinyHead):
    """A DFlash draft of a model with ``hidden`` numbers; with ``rank``, DSpark's, or DFlash 2's if
    it has ``choices``.
    """

    GROUP = 8  # channels that share a kernel

    def __init__(
        self,
        folder: Path,
        hidden: int,
        vocab: int,
        *,
        window: int = 1 << 20,
        rank: int = 0,
        choices: int = 0,
        **changes: Any,
    ) -> None:
        super().__init__(hidden, vocab, 1e-6)
        self.window, self.causal = window, bool(changes.get("is_causal"))
        self.layers, self.choices = 2, choices
        self.add_norms("hidden_norm", "norm")
        for layer in range(self.layers):
            self.add_layer(f"layers.{layer}.", hidden)
            norms = (f"layers.{layer}.self_attn.{part}_norm" for part in "qk")
            self.add_norms(*norms, size=self.SIZE)
        w = self.weights
        if choices:
            for name in ("predecessor", "successor"):
                w[f"candidate_selector.{name}_codebook"] = torch.randn(vocab, rank)
            w["candidate_selector.hidden_projection.weight"] = torch.randn(rank, hidden) * 0.15
            for name in [
                f"layers.{n}.{part}_conv" for n in range(2) for part in ("attention", "mlp")
            ]:
                w[f"{name}.base_kernel"] = torch.randn(2, KERNEL, hidden) * 0.5
                shape = (2 * KERNEL * hidden // self.GROUP, hidden)
                w[f"{name}.kernel_projection.weight"] = torch.randn(shape) * 0.1
        elif rank:
            for number in (1, 2):
                w[f"markov_head.markov_w{number}.weight"] = torch.randn(vocab, rank) * 0.6
            w["confidence_head.proj.weight"] = torch.randn(1, hidden + rank)
            w["confidence_head.proj.bias"] = torch.randn(1)
        folder.mkdir(exist_ok=True)
        save_file(w, folder / "model.safetensors")
        block: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(self.LAYERS)}
        kernels = {"conv_kernel_size": KERNEL, "conv_group_size": self.GROUP}
        self.selector = {"selector_rank": rank, "selector_top_k": choices} if choices else {}
        self.selector |= kernels if choices else {}
        kind = "DFlash2DraftModel" if choices else "Qwen3DSparkModel"
        self.config |= {
            "architectures": [kind if rank else "DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "block_size": BLOCK,
            **(block if rank and not choices else {"dflash_config": {**block, **self.selector}}),
            "use_sliding_window": window < 1 << 20,
            "sliding_window": window,
            "layer_types": ["sliding_attention"] * self.layers,
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(self.config))

    def save_gguf(self, path: Path, layers: tuple[int, ...] = (1, 2, 3), **keys: Any) -> Path:
        """The draft as a GGUF file, which reads what goes into ``layers``."""
        metadata = {
            **self.keys(),
            "block_size": BLOCK,
            "target_layers": list(layers),
            **self.selector,
            **keys,
        }
        if self.config["use_sliding_window"]:
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
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        n, x = len(context), embedded
        for layer in range(self.layers):
            stem = f"layers.{layer}."
            normed = self.norm(x, f"{stem}input_layernorm")
            normed, around = self._convolved(normed, f"{stem}attention_conv")
            both = torch.cat([context, normed])
            places = torch.arange(n + len(x))
            q = self.heads(normed, f"{stem}self_attn.q_proj", f"{stem}self_attn.q_norm")
            k = self.heads(both, f"{stem}self_attn.k_proj", f"{stem}self_attn.k_norm")
            v = self.heads(both, f"{stem}self_attn.v_proj")
            q, k = self.turned(q, places[n:]), self.turned(k, places)
            first = max(0, n + 1 - self.window)  # of the first row's, which all rows may see
            k, v = (each[:, first:].repeat_interleave(2, 0) for each in (k, v))
            seen = places[None] <= places[n:, None] if self.causal else places[None] >= 0
            if self.causal:  # each row has its own window
                seen &= places[None] > places[n:, None] - self.window
            mask = seen.expand(len(x), -1)[:, first:]
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            joined = mixed.transpose(0, 1).reshape(len(x), -1)
            x = x + around(self.linear(joined, f"{stem}self_attn.o_proj"))
            y = self.norm(x, f"{stem}post_attention_layernorm")
            y, around = self._convolved(y, f"{stem}mlp_conv")
            x = x + around(self.mlp(y, stem))
        self.last = self.norm(x, "norm")
        return (self.last @ head.T).numpy()

    def _convolved(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, Callable[..., Any]]:
        """The rows (b, D) as DFlash 2's first convolution leaves them, and the second one."""
        if f"{name}.base_kernel" not in self.weights:
            return x, lambda rows: rows
        base = self.weights[f"{name}.base_kernel"]
        own = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, KERNEL, -1)
        kernels = base + own.repeat_interleave(self.GROUP, -1)  # (b, 2, KERNEL, D)

        def side(number: int, rows: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(rows)
            for back in range(KERNEL):
                out[back:] += kernels[back:, number, back] * rows[: len(rows) - back]
            return out

        return side(0, x), lambda rows: side(1, rows)

    def after(self, logits: np.ndarray, tokens: list[int], rows: Any = None) -> np.ndarray:
        """Logits (n, V) behind ``tokens``; a selector's, of rows of the last block."""
        if self.choices:
            codes = [
                self.weights[f"candidate_selector.{n}_codebook"]
                for n in ("predecessor", "successor")
            ]
            gates = self.linear(self.last[rows], "candidate_selector.hidden_projection")
            scores = logits + ((codes[0][tokens] * gates) @ codes[1].T).numpy()
            best = np.sort(logits, 1)[:, -self.choices, None]
            return np.where(logits >= best, scores, -np.inf)
        w = [self.weights[f"markov_head.markov_w{n}.weight"].numpy() for n in (1, 2)]
        changed: np.ndarray = logits + w[0][tokens] @ w[1].T
        return changed


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
