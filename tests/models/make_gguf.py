"""Tiny models as GGUF files, as llama.cpp's converter writes them, from folders of Hugging Face's.

Most tensors' names are the gguf package's; the tables here have what it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.checkpoints.make_gguf import Array, in_pairs, write_gguf
from tests.models.gguf_keys import falcon_inner, full_layer, gguf_keys

_NAMES = {
    "llama": "llama llama-tied-bias mixtral",
    "qwen2": "qwen2 internvl",
    "phi3": "phi3 phi3-longrope",
    "mistral3": "ministral3 mistral3",
    "olmo2": "olmo2 olmo3-yarn",
    "seed_oss": "seed-oss",
    "granite_swa": "granite-swa granite-moe-swa",
    "hunyuan-dense": "hunyuan",
    "ernie4_5": "ernie",
    "ernie4_5-moe": "ernie-moe",
    "paddleocr": "paddleocr-vl",
    "qwen2vl": "qwen2.5-vl",
    "qwen3vl": "qwen3-vl",
    "qwen3vlmoe": "qwen3-vl-moe",
    "glm4": "glm4 glm4v glm-ocr",
    "cohere2moe": "cohere2-moe cohere2-moe-dense-first",
    "glm4moe": "glm4-moe glm4-moe-norms glm4v-moe solar-open",
    "hy_v3": "hy-v3",
    "step35": "step",
    "nemotron_h": "nemotron-h",
    "nemotron_h_moe": "nemotron-h-moe nemotron-h-latent",
    "bailingmoe3": "ling ling-ranked",
    "qwen3next": "qwen3-next",
    "qwen35": "qwen3.5",
    "qwen35moe": "qwen3.5-moe",
    "qwen4exp": "qwen4-exp-wide",
    "lfm2moe": "lfm2-moe",
    "granitehybrid": "granite-hybrid granite-hybrid-moe",
    "qwen2moe": "qwen2-moe",
    "qwen3moe": "qwen3-moe",
    "granitemoe": "granite-moe granite-moe-shared",
    "llama4": "llama4-whole",
    "gemma4": "gemma4 gemma4-double-wide gemma4-keys-as-values gemma4-moe gemma4-unified "
    "gemma4-unified-whole",
    "deepseek2": "deepseek-v2 deepseek-v2-lite deepseek-v2-dense deepseek-v3 deepseek-v3-plain "
    "glm4-moe-lite kimi-k2.5",
    "deepseek4": "deepseek-v4-file",
    "glm5-next": "glm5-next-file",
}
_SAME = (
    "qwen3 gemma3 smollm3 exaone4 exaone-moe granite cohere2 minimax-m2 hunyuan-moe apertus "
    "falcon-h1 kimi-linear lfm2 olmoe mellum gpt-oss muse-glimmer afmoe mistral4 laguna "
    "gemma4-assistant glm-dsa"
)
FILES = {name: name for name in _SAME.split()}
FILES |= {name: file for file, names in _NAMES.items() for name in names.split()}
"""What each tiny config's file calls its architecture."""

_NEWER = {
    "granite_swa": ("granite", "granitemoe", "gpt-oss"),
    "qwen4exp": ("qwen35moe",),
    "gemma4-assistant": ("gemma4",),
    "cohere2moe": ("cohere2", "deepseek2"),
    "mellum": ("qwen3moe",),
    "bailingmoe3": ("kimi-linear", "bailingmoe2"),
    "hy_v3": ("afmoe", "hunyuan-moe", "qwen3moe"),
    "muse-glimmer": ("afmoe",),
    "laguna": ("qwen2moe", "qwen3"),
    "deepseek4": ("deepseek2", "gpt-oss"),
    "glm5-next": ("kimi-linear", "glm-dsa"),
}
"""What gguf does not know, and where most of its tensors have the same names."""
_PAIRED = (
    *("granite", "granite_swa", "granitehybrid", "granitemoe", "llama", "mistral3", "smollm3"),
    "muse-glimmer",
)
_INCLUDES_ONE = (  # in norms' weights
    *("gemma3", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "step35"),
)

_OTHERS = re.compile(
    r"(model\.)?(visual|vision_(tower|adapter|embedder|projection|model)|embed_(vision|audio)"
    r"|multi_modal_projector|mlp_AR|vit_\w+|mm_projector|merger|projector)\..*"
)
_EXPERT = re.compile(r"(.+\.)experts\.(\d+)\.(\w+)\.weight")
_STACKED = re.compile(
    r"\.experts\.(gate_up|down)_proj(_bias)?|block_sparse_moe\.input_linear\.weight"
)
_KINDS = {"w1": "gate", "w2": "down", "w3": "up"}
_CONNECTION = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_POOL = ("gate", "ape")
_MIX = [f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")]
_ORDER = "masked_embd_ordering"
_WHOLE = {
    "head.weight": "output.weight",  # DeepSeek-V4's, as in a folder
    **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    "masked_embedding.centroids.weight": "masked_embd_centroids.weight",
    "masked_embedding.token_ordering": _ORDER,
}
"""Tensors that belong to no layer: most are an assistant's."""
_STEMS = {
    "dt_bias": "ssm_dt.bias",
    "f_proj.weight": "ssm_f_a.weight",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "moe.router_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    **{f"self_attn.{gate}_proj.weight": "attn_gate.weight" for gate in ("g", "gate")},
    "self_attn.q_k_v_proj.weight": "attn_qkv.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    **{f"block_sparse_moe.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in _KINDS.values()},
    **{
        f"{theirs}_hyper_connection.{name}.weight": f"hc_{ours}_{stem}.weight"
        for ours, theirs in (("attn", "attn"), ("ffn", "mlp"))
        for name, stem in _CONNECTION.items()
    },
    **{f"indexer.{part}_layernorm.weight": f"indexer.{part}_norm.weight" for part in "qk"},
    **{f"ple.{part}_proj.weight": f"ple_{part}.weight" for part in ("key", "value")},
    **{f"ple.norm_{part}.weight": f"ple_norm_{part}.weight" for part in ("key", "query", "conv")},
    "ple.conv1d.weight": "ple_conv1d.weight",
    **{f"indexer.index_kpool_compress_{p}": f"indexer_compressor_{p}.weight" for p in _POOL},
    **{mix: f"{mix}.weight" for mix in _MIX},
}
"""Behind ``blk.N.``, by how a tensor's name ends."""
_V4_NAMES = (
    # of what a name has behind the layer's number, and how it is called in the file
    (r"attn\.attn_sink", "attn_sinks.weight"),
    (r"attn\.indexer\.compressor\.", "indexer_compressor_"),
    (r"attn\.compressor\.", "attn_compressor_"),
    (r"attn\.indexer\.weights_", "indexer."),
    (r"attn\.indexer\.wq_b", "indexer.attn_q_b"),
    (r"attn\.(?:kv_)?norm\.", "attn_kv_a_norm."),
    (r"attn\.w([qo])_([ab])\.", r"attn_\1_\2."),
    (r"attn\.wkv", "attn_kv"),
    (r"attn\.q_norm", "attn_q_a_norm"),
    (r"ffn\.gate\.bias", "exp_probs_b.bias"),
    (r"ffn\.gate\.tid2eid", "ffn_gate_tid2eid.weight"),
    (r"ffn\.gate\.", "ffn_gate_inp."),
    (r"ffn\.shared_experts\.w1", "ffn_gate_shexp"),
    (r"ffn\.shared_experts\.w2", "ffn_down_shexp"),
    (r"ffn\.shared_experts\.w3", "ffn_up_shexp"),
    (r"_compressor_w", "_compressor_"),
    (r"attn_o_", "attn_output_"),
    (r"(_ape|hc_\w+)$", r"\1.weight"),
)
_NEXTN = {
    "fc": "eh_proj",
    "eh_proj": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "enorm": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "hnorm": "hnorm",
    "norm": "shared_head_norm",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "embed_tokens": "embed_tokens",
}
"""What lies beside the layer of a prediction block, and is called there behind ``nextn.``."""


def write_tiny_gguf(
    folder: Path,
    path: Path,
    name: str,
    *,
    kind: str = "f32",
    stacked: bool = True,
    absorbed: bool = True,
    predicting: int = 0,
    only_block: bool = False,
    without: tuple[str, ...] = (),
) -> Path:
    """The model in ``folder``, of the tiny config ``name``, as the file ``path``.

    Matrices are of the ggml type ``kind``. Without ``stacked`` every expert is a tensor, as in
    Mixtral's first files. ``absorbed`` writes DeepSeek's ``attn_k_b`` and ``attn_v_b``.
    ``predicting`` blocks of multi-token prediction follow the layers: the folder's, if it has one.
    ``only_block`` leaves the layers out, ``without`` tensors that end so.
    """
    architecture = FILES[name]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config = {**config, **config.get("text_config", {})}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    config = SimpleNamespace(**config)
    state = {key: value for file in folder.glob("*.safetensors") for key, value in _loaded(file)}
    model = _Model(architecture, config, stacked=stacked, absorbed=absorbed)
    metadata = gguf_keys(architecture, config, absorbed=absorbed)
    count = metadata["block_count"]
    block = {own: state.pop(key) for key in list(state) if (own := _of_block(key, count))}
    tensors = model.tensors(state)
    if predicting:
        _add_prediction(tensors, metadata, config, predicting, model.tensors(block))
    whole = {f"{architecture}.{key}": value for key, value in metadata.items()}
    if architecture == "apertus":
        whole |= _curves(state, config.num_hidden_layers)
    always_f32 = ("_norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias")
    layers = tuple(f"blk.{layer}." for layer in range(count))
    typed = {
        name: (array, "f32" if array.ndim == 1 or name.endswith(always_f32) else kind)
        for name, array in tensors.items()
        if not (only_block and name.startswith(layers)) and not name.endswith(without or "\0")
    }
    for name, (order, _) in typed.items():
        if name == _ORDER or "tid2eid" in name:
            typed[name] = order.astype(np.int32), "i32"
    whole["tokenizer.ggml.model"] = "no_vocab"
    return write_gguf(path, architecture, whole, typed)[0]


def gguf_tensors(architecture: str, config: Any, state: Mapping[str, Array]) -> dict[str, Array]:
    """A model's tensors by their names in a file, and in its form."""
    model = _Model(architecture, config, stacked=True, absorbed=True)
    return model.tensors({key.replace("language_model.", ""): state[key] for key in state})


def _curves(state: Mapping[str, Array], layers: int) -> dict[str, list[float]]:
    """The numbers of Apertus's activation, by layer."""
    prefixes = [f"model.layers.{layer}.mlp.act_fn." for layer in range(layers)]
    return {
        f"xielu.{name}": [float(state[prefix + name].item()) for prefix in prefixes]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


def tiny_gguf(folder: Path, arch: str) -> Path:
    """A random model."""
    from tests.models.tiny import save_tiny  # which needs transformers

    save_tiny(arch, folder / f"{arch}-base")
    return write_tiny_gguf(folder / f"{arch}-base", folder / f"{arch}.gguf", arch)


def _loaded(file: Path) -> Iterator[tuple[str, Array]]:
    """A file's tensors by their names without what is around a text model."""
    for key, value in load_file(file).items():
        if _OTHERS.fullmatch(key) is None:
            yield (
                key.replace("model.language_model.", "model.")
                .removeprefix("language_model.")
                .replace("model.blocks.", "model.layers.")  # Kimi K2.5's
                .replace(".attention.dense.", ".self_attn.o_proj.")
                .replace(".attention.", ".self_attn."),  # Ling's
                value,
            )


class _Model:
    """One model's tensors in the file's form."""

    def __init__(self, architecture: str, config: Any, *, stacked: bool, absorbed: bool) -> None:
        self.architecture, self.config = architecture, config
        self.stacked, self.absorbed = stacked, absorbed
        self.maps = [
            gguf.get_tensor_name_map(arch, config.num_hidden_layers + 1)
            for arch, name in gguf.MODEL_ARCH_NAMES.items()
            if name in _NEWER.get(architecture, (architecture,))
        ]

    def tensors(self, state: Mapping[str, Array]) -> dict[str, Array]:
        stacks: dict[str, dict[int, Array]] = {}
        found: dict[str, Array] = {}
        if self.architecture == "falcon-h1":  # which has other factors than the embedding
            state = {"lm_head.weight": state["model.embed_tokens.weight"], **state}
        for key, value in state.items():
            if (one := _EXPERT.fullmatch(key)) is not None:
                kind = _KINDS.get(one[3]) or one[3].removesuffix("_proj")
                stack = stacks.setdefault(f"blk.{_layer(key)}.ffn_{kind}_exps.weight", {})
                stack[int(one[2])] = value
            elif (part := re.search(r"ngram_embedding\.shard_(\d+)\.weight", key)) is not None:
                stacks.setdefault("per_layer_token_embd.weight", {})[int(part[1])] = value
            elif ".ple_embedding." not in key and ".act_fn." not in key:
                found |= self._tensor(key, value)
        for name, parts in stacks.items():
            ordered = [parts[number] for number in sorted(parts)]
            if name.startswith("per_layer"):
                found[name] = np.concatenate(ordered)
            elif self.stacked:
                found[name] = np.stack(ordered)
            else:
                stem = name.removesuffix("_exps.weight")
                found |= {f"{stem}.{n}.weight": value for n, value in enumerate(ordered)}
        if self.architecture == "muse-glimmer":
            for layer in range(self.config.num_hidden_layers):
                ones = np.ones(self.config.head_dim, np.float32)
                found[f"blk.{layer}.attn_q_norm.weight"] = ones * self.config.qk_scale_factor
                found[f"blk.{layer}.attn_k_norm.weight"] = ones
        if self.architecture.startswith("gemma4"):
            found["rope_freqs.weight"] = self._divisors()
        if self.architecture == "step35":
            found["rope_freqs.weight"] = self._llama3_divisors()
        rope = vars(self.config).get("rope_parameters") or {}
        for length in ("long", "short"):
            if factors := rope.get(f"{length}_factor"):
                found[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
        return found

    def _tensor(self, key: str, value: Array) -> Mapping[str, Array]:
        """What one published tensor is in the file."""
        config, architecture = self.config, self.architecture
        prefix = f"blk.{_layer(key)}."
        module = re.sub(r"\.(weight|bias)$", "", key).rpartition(".")[2]
        if architecture == "falcon-h1":
            value = self._multiplied(module, value)
        if _STACKED.search(key):
            return self._experts(prefix, key, value)
        if "shared_mlp.input_linear" in key:
            shared = "_shexp" if config.num_local_experts else ""
            if architecture == "granite_swa":
                return {f"{prefix}ffn_up{shared}.weight": value}
            gate, up = np.split(value, 2)
            return {f"{prefix}ffn_gate{shared}.weight": gate, f"{prefix}ffn_up{shared}.weight": up}
        if "shared_mlp.output_linear" in key and not config.num_local_experts:
            return {f"{prefix}ffn_down.weight": value}
        if module == "in_proj_qkvz":
            return self._apart(prefix, value)
        if module == "index_qk_proj":
            first = config.indexer_n_heads * config.indexer_head_dim
            parts = zip("qk", np.split(value, [first]), strict=True)
            return {f"{prefix}indexer.{part}_proj.weight": own for part, own in parts}
        if module == "kv_b_proj" and self.absorbed:
            both = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(both, [config.qk_nope_head_dim], axis=1)
            keys = np.ascontiguousarray(keys.swapaxes(1, 2))
            return {f"{prefix}attn_k_b.weight": keys, f"{prefix}attn_v_b.weight": values}
        return {self._name(key): self._value(key, module, value)}

    def _experts(self, prefix: str, key: str, value: Array) -> Mapping[str, Array]:
        """Of all experts of a layer at once."""
        kind = "bias" if key.endswith("_bias") else "weight"
        odd = self.architecture == "gpt-oss"
        if kind == "weight" and self.architecture in ("gpt-oss", "llama4"):
            value = value.swapaxes(1, 2)
        if "down_proj" in key:
            return {f"{prefix}ffn_down_exps.{kind}": value}
        if self.architecture == "gemma4":
            return {f"{prefix}ffn_gate_up_exps.{kind}": value}
        gate, up = (value[:, ::2], value[:, 1::2]) if odd else np.split(value, 2, axis=1)
        return {f"{prefix}ffn_gate_exps.{kind}": gate, f"{prefix}ffn_up_exps.{kind}": up}

    def _name(self, key: str) -> str:
        layer = _layer(key)
        if key in _WHOLE:
            return _WHOLE[key]
        if self.architecture == "deepseek4" and layer is not None:
            rest = key.partition(f".{layer}.")[2]
            for pattern, own in _V4_NAMES:
                rest = re.sub(pattern, own, rest)
            return f"blk.{layer}.{rest}"
        if layer is not None:
            if ".nextn." in key:
                return f"blk.{layer}.{key.partition(f'.{layer}.')[2]}"
            if self.architecture == "bailingmoe3" and key.endswith(".g_proj.weight"):
                attends = self.config.layer_types[int(layer)] == "full_attention"
                return f"blk.{layer}.{'attn_gate' if attends else 'ssm_g_a'}.weight"
            if self.architecture == "hy_v3" and key.endswith(".expert_bias"):
                return f"blk.{layer}.exp_probs_b"
            for end, own in _STEMS.items():
                if key.endswith(f".{end}"):
                    return f"blk.{layer}.{own}"
        elif (
            mixer := re.fullmatch(r"model\.hyper_connection_mixer\.(\w+)\.weight", key)
        ) is not None:
            return f"output_hc_{_CONNECTION[mixer[1]]}.weight"
        known = (names.get_name(key, try_suffixes=(".weight", ".bias")) for names in self.maps)
        name: str | None = next(filter(None, known), None)
        assert name is not None, f"gguf has no name for {key}"
        if self.architecture == "falcon-h1" and "ffn_norm" in name:
            return name.removesuffix(".weight")
        plain = name.endswith((".weight", ".bias", "ssm_a", "ssm_d"))
        return name if plain else f"{name}.weight"

    def _halves(self, module: str, value: Array) -> Array:
        """Queries and keys as llama.cpp's M-RoPE takes them: the rotated part is not in pairs."""
        if module not in ("q_proj", "k_proj"):
            return value
        usual = self.config.hidden_size // self.config.num_attention_heads
        size = getattr(self.config, "head_dim", usual)
        turned = int(size * self.config.rope_parameters["partial_rotary_factor"])
        order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, size)]
        heads = value.reshape(-1, size, *value.shape[1:])
        return np.ascontiguousarray(heads[:, order]).reshape(value.shape)

    def _value(self, key: str, module: str, value: Array) -> Array:
        config, architecture = self.config, self.architecture
        if architecture in _PAIRED and module in ("q_proj", "k_proj"):
            queries = module == "q_proj"
            heads = config.num_attention_heads if queries else config.num_key_value_heads
            return in_pairs(value, heads)
        if architecture == "glm4" and "mrope_section" in config.rope_parameters:
            return self._halves(module, value)
        if architecture.startswith(("qwen35", "qwen4exp")):
            value = self._value_heads_in_turns(key, value)
        if module == "A_log":
            rates = np.exp(value) if architecture == "bailingmoe3" else -np.exp(value)
            flat = architecture in (*_INCLUDES_ONE, "kimi-linear", "glm5-next")
            return rates if flat else rates[:, None]
        if module == "D":
            return value[:, None]
        if architecture == "muse-glimmer" and key.endswith("layernorm.weight"):
            return value + 1
        if module in ("shared_expert_gate", "e_score_correction_bias"):
            return value.reshape(-1)
        if "conv" in module and value.ndim == 3:
            own = ("kimi-linear", "bailingmoe3", "glm5-next")
            return value[None] if architecture in own else value[:, 0]
        if key.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = getattr(config, "mamba_n_groups", None) or config.n_groups
            return value.reshape(groups, -1)
        if architecture in _INCLUDES_ONE and "norm" in key and "linear_attn" not in key:
            return value + 1
        return value

    def _apart(self, prefix: str, value: Array) -> Mapping[str, Array]:
        """Queries, keys and values of all key heads, and their gates."""
        config = self.config
        groups, key = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // groups * config.linear_value_head_dim
        cuts = np.cumsum([key, key, values])
        parts = np.split(value.reshape(groups, -1, value.shape[1]), cuts, axis=1)
        *qkv, z = (part.reshape(-1, value.shape[1]) for part in parts)
        return {f"{prefix}attn_qkv.weight": np.concatenate(qkv), f"{prefix}attn_gate.weight": z}

    def _value_heads_in_turns(self, key: str, value: Array) -> Array:
        """Value heads of each key head side by side, as llama.cpp's converter puts them."""
        config = self.config
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        size, each = config.linear_value_head_dim, values // keys

        def turned(part: Array, width: int, axis: int = 0) -> Array:
            shape = part.shape
            split = (*shape[:axis], keys, each, width, *shape[axis + 1 :])
            return part.reshape(split).swapaxes(axis, axis + 1).reshape(shape)

        module = key.partition(".linear_attn.")[2].removesuffix(".weight")
        if module in ("in_proj_qkv", "conv1d"):
            first = 2 * keys * config.linear_key_head_dim
            return np.concatenate([value[:first], turned(value[first:], size)])
        if module in ("in_proj_z", "out_proj"):
            return turned(value, size, axis=int(module == "out_proj"))
        return (
            turned(value, 1) if module in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else value
        )

    def _multiplied(self, module: str, value: Array) -> Array:
        """Falcon-H1's factors are in the weights of a file."""
        config = self.config
        factors = {
            "q_proj": config.attention_in_multiplier,
            "k_proj": config.attention_in_multiplier * config.key_multiplier,
            "v_proj": config.attention_in_multiplier,
            "o_proj": config.attention_out_multiplier,
            "in_proj": config.ssm_in_multiplier,
            "out_proj": config.ssm_out_multiplier,
            "gate_proj": config.mlp_multipliers[0],
            "down_proj": config.mlp_multipliers[1],
            "embed_tokens": config.embedding_multiplier,
            "lm_head": config.lm_head_multiplier,
        }
        value = value * np.float32(factors.get(module, 1.0))
        if module == "in_proj":
            keys, inner = config.mamba_n_groups * config.mamba_d_state, falcon_inner(config)
            sizes = (inner, inner, keys, keys, config.mamba_n_heads)
            value *= np.repeat(np.float32(config.ssm_multipliers), sizes)[:, None]
        return value

    def _llama3_divisors(self) -> Array:
        """What those of Step's full layers are divided by, and ones."""
        config, rope = self.config, self.config.rope_parameters["full_attention"]
        size = int(config.head_dim * rope["partial_rotary_factor"])
        lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
        values = np.ones(config.head_dim // 2, np.float32)
        share = np.clip(share, 0, 1)
        values[: size // 2] = 1 / (share + (1 - share) / rope["factor"])
        return values

    def _divisors(self) -> Array:
        """What the rotary frequencies of Gemma's full layers are divided by."""
        pairs = full_layer(self.config)["head_dim"] // 2
        share = self.config.rope_parameters["full_attention"]["partial_rotary_factor"]
        values = np.full(pairs, 1e30, np.float32)
        values[: int(pairs * share)] = 1.0
        return values


def _layer(key: str) -> str | None:
    match = re.search(r"\.layers\.(\d+)\.", key)
    return match and match[1]


def _of_block(key: str, layers: int) -> str | None:
    """A published tensor of the first prediction block as one of the layer after the last."""
    if key.startswith("mtp."):
        rest = key.removeprefix("mtp.").removeprefix("layers.0.")
    elif _layer(key) == str(layers):
        rest = key.partition(f".{layers}.")[2]
    else:
        return None
    stem, _, kind = rest.rpartition(".")
    return f"model.layers.{layers}.{f'nextn.{_NEXTN[stem]}' if stem in _NEXTN else stem}.{kind}"


def _add_prediction(
    tensors: dict[str, Array],
    metadata: dict[str, Any],
    config: Any,
    count: int,
    block: Mapping[str, Array],
) -> None:
    """Add ``block``, or blocks like the last layer, and with what joins tokens and states."""
    layers, hidden = metadata["block_count"], config.hidden_size
    metadata["block_count"] = layers + count
    metadata["nextn_predict_layers"] = count
    for key, value in metadata.items():
        if isinstance(value, list) and len(value) == layers:
            metadata[key] = [*value, *[max(value)] * count]
    tensors.update(block)
    for number in range(layers, layers + count if not block else layers):
        last = f"blk.{layers - 1}."
        own = {name: values for name, values in tensors.items() if name.startswith(last)}
        for name, values in own.items():
            tensors[f"blk.{number}.{name.removeprefix(last)}"] = values
        tensors[f"blk.{number}.nextn.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            tensors[f"blk.{number}.nextn.{norm}.weight"] = np.ones(hidden, np.float32)
