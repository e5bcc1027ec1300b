"""GGUF metadata as a Hugging Face config and generation config.

Translates the file's keys and adds only what the file implies (a tied head, the factors of
long-context RoPE scaling). The architecture supplies defaults for missing keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.base import EMBEDDING, HEAD, StoredTensor
from localrt.models.checkpoints.gguf.metadata import GgufMetadata
from localrt.models.checkpoints.gguf.names import (
    CONFIG_KEYS,
    CONNECTION_KEYS,
    DEEPSEEK_KEYS,
    GEMMA,
    QWEN_DELTA,
    RECURRENT_KEYS,
    ROPE_SCALING_KEYS,
    SAMPLING_KEYS,
    SCORING,
    TOKEN_KEYS,
)
from localrt.quant.formats import unpack

Config = dict[str, Any]
"""What is in a ``config.json``."""
_MOST_LAYERS = 1 << 16
_LONGEST_ROPE = 1 << 16
_STANDS_STILL = 1e9  # a rotary divisor that makes a frequency zero


def count_layers(architecture: str, metadata: GgufMetadata) -> tuple[int, int]:
    """A file's number of blocks, and of multi-token prediction blocks; 0 if missing.

    Raises:
        CheckpointError: a count is of a wrong type.
    """
    blocks = _numbers(metadata, f"{architecture}.block_count")
    predicting = _numbers(metadata, f"{architecture}.nextn_predict_layers")
    return blocks if type(blocks) is int else 0, predicting if type(predicting) is int else 0


@dataclass(frozen=True, slots=True)
class _File:
    """The sources of a config: metadata, and tensors by Hugging Face's names, of which only shapes
    and small rotary vectors are used.
    """

    architecture: str
    metadata: GgufMetadata
    tensors: Mapping[str, StoredTensor]

    def integer(self, key: str) -> int | None:
        """An integer under one of the architecture's keys."""
        return self.metadata.integer(f"{self.architecture}.{key}")

    def listed(self, key: str) -> list[Any] | None:
        """An array with about one entry per layer; None if it is missing or too long."""
        key = f"{self.architecture}.{key}"
        listed = key in self.metadata and self.metadata.is_array(key)
        short = listed and self.metadata.count(key) <= _MOST_LAYERS
        return list(self.metadata[key]) if short else None


def model_config(
    architecture: str,
    metadata: GgufMetadata,
    tensors: Mapping[str, StoredTensor],
    predicting: Collection[int] = (),
) -> Config:
    """Return the model's parameters under Hugging Face's keys.

    ``tensors`` has Hugging Face's names. ``predicting`` are the blocks that are not layers of the
    decoder.

    Raises:
        CheckpointError: a parameter is of a wrong type.
    """
    config: Config = {}
    file = _File(architecture, metadata, tensors)
    for key, name in CONFIG_KEYS.items():
        value = _numbers(metadata, f"{architecture}.{key}")
        if value is not None:
            config[name] = value
    _add_routing(config, file)
    config["tie_word_embeddings"] = HEAD not in tensors
    config["sliding_window"] = config.get("sliding_window") or None  # 0 means none
    _add_vocabulary(config, file)
    _add_partial_rotary(config)
    _add_rope_scaling(config, file)
    _add_layer_types(config, file)
    if architecture.startswith("nemotron_h"):
        _add_kinds(config, file)
    _add_recurrent(config, file)
    _leave_out(config, predicting, metadata)
    if architecture in GEMMA or architecture in QWEN_DELTA:
        config["norm_weights_include_one"] = True
    for add in _FAMILIES.get(architecture, ()):
        add(config, file)
    return config


def generation_config(metadata: GgufMetadata) -> Config:
    """Return BOS and EOS token ids and sampling defaults under Hugging Face's keys.

    Raises:
        CheckpointError: a value is of a wrong type.
    """
    config: Config = {}
    for key, name in TOKEN_KEYS.items():
        token = metadata.integer(f"tokenizer.ggml.{key}")
        if token is not None and token not in (known := config.setdefault(name, [])):
            known.append(token)
    for name, known in config.items():
        config[name] = known if len(known) > 1 else known[0]
    for key, name in SAMPLING_KEYS.items():
        number = metadata.number(f"general.sampling.{key}")
        if number is not None:
            config[name] = number
    if "temperature" in config:
        config["do_sample"] = config["temperature"] > 0
    return config


def _leave_out(config: Config, predicting: Collection[int], metadata: GgufMetadata) -> None:
    """Remove the prediction blocks from the layer count and from per-block lists.

    Raises:
        CheckpointError: a list has entries for fewer or more blocks.
    """
    blocks = config.get("num_hidden_layers")
    if type(blocks) is not int:
        return
    layers = blocks - sum(block < blocks for block in predicting)
    config["num_hidden_layers"] = layers
    for key, value in config.items():
        if not isinstance(value, list):
            continue
        if len(value) not in (layers, blocks, layers + len(predicting)):
            raise CheckpointError(
                f"{metadata.path}: the metadata has {len(value)} values of {key!r} for {blocks} "
                "blocks: the file is damaged, or was converted by a program that does not know it"
            )
        own = value[:layers]
        same = own and key != "layer_types" and own.count(own[0]) == layers
        config[key] = own[0] if same else own


def _numbers(metadata: GgufMetadata, key: str) -> object:
    """Return a number, or a list if it differs between layers."""
    if key not in metadata or not metadata.is_array(key):
        return metadata.number(key)
    values = metadata[key] if metadata.count(key) <= _MOST_LAYERS else ["too many"]
    if not values or not all(type(value) in (int, float) for value in values):
        raise CheckpointError(f"{metadata.path}: metadata key {key!r} is not a list of numbers")
    return values[0] if values.count(values[0]) == len(values) else values


def _add_routing(config: Config, file: _File) -> None:
    """Add the router's scoring function. The architecture rejects unknown numbers."""
    normalized = file.metadata.flag(f"{file.architecture}.expert_weights_norm")
    if normalized is not None:
        config["norm_topk_prob"] = normalized
    function = file.integer("expert_gating_func")
    if function:  # 0: unspecified
        config["scoring_func"] = SCORING.get(function, str(function))


def _head_size(config: Mapping[str, object]) -> int | None:
    """Hidden size divided by heads, if both are known."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        return hidden // heads
    return None


def _add_vocabulary(config: Config, file: _File) -> None:
    """Add the vocabulary size, from the embedding's rows if the key is missing."""
    if "vocab_size" in config:
        return
    if (embedding := file.tensors.get(EMBEDDING)) is not None:
        config["vocab_size"] = embedding.rows
    elif "tokenizer.ggml.tokens" in file.metadata:
        config["vocab_size"] = file.metadata.count("tokenizer.ggml.tokens")


def _add_partial_rotary(config: Config) -> None:
    """Add partial RoPE in Hugging Face's form: a fraction of each head."""
    head_dim, rope_dim = config.get("head_dim", _head_size(config)), config.get("rope_dim")
    if isinstance(head_dim, int) and isinstance(rope_dim, int) and 0 < rope_dim < head_dim:
        config["partial_rotary_factor"] = rope_dim / head_dim


def _add_rope_scaling(config: Config, file: _File) -> None:
    architecture, metadata = file.architecture, file.metadata
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.text(f"{prefix}type")
    scaling: Config = {}
    for key, name in ROPE_SCALING_KEYS.items():
        value = metadata.number(prefix + key)
        if value is not None:
            scaling[name] = value
    if "original_max_position_embeddings" in scaling and architecture == "phi3":
        config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    for length in ("long", "short"):
        factors = file.tensors.get(f"rope_factors_{length}.weight")
        if factors is not None and factors.info.nbytes <= _LONGEST_ROPE:
            kind = "longrope"
            scaling[f"{length}_factor"] = unpack(factors.read()).reshape(-1).tolist()
    sections = file.listed("rope.dimension_sections")
    if sections and architecture.startswith("qwen"):
        scaling["mrope_section"] = sections[:3]  # a fourth is always 0
        kind = "default" if kind in (None, "none") else kind
    if kind in (None, "none"):
        linear = metadata.number(f"{architecture}.rope.scale_linear")  # older files, without a type
        if linear in (None, 1.0):
            return
        kind, scaling = "linear", {"factor": linear}
    config["rope_scaling"] = {"rope_type": kind, **scaling}


def _add_layer_types(config: Config, file: _File) -> None:
    """Add which layers have a window: all but every n-th, or according to a flag per layer."""
    key = "attention.sliding_window_pattern"
    whole = f"{file.architecture}.{key}"
    if whole in file.metadata and not file.metadata.is_array(whole):
        config["sliding_window_pattern"] = file.integer(key)
    elif (flags := file.listed(key)) is not None:
        config["layer_types"] = [
            "sliding_attention" if flag else "full_attention" for flag in flags
        ]


def _add_choice(config: Config, file: _File) -> None:
    """Add how DeepSeek and GLM choose experts. Early GLM files do not say that scores are sigmoids.

    Files do not name the method: groups are ranked by their best expert, or with sigmoids by their
    best two.
    """
    biased = any(name.endswith("e_score_correction_bias") for name in file.tensors)
    scoring = config.setdefault("scoring_func", "sigmoid" if biased else "softmax")
    config["topk_method"] = "noaux_tc" if scoring == "sigmoid" else "group_limited_greedy"
    config["n_routed_experts"] = config.pop("num_local_experts", None)
    config.setdefault("norm_topk_prob", False)
    if not config.get("routed_scaling_factor"):  # 0: none
        config.pop("routed_scaling_factor", None)


def _add_temperature(config: Config, file: _File) -> None:
    """Add Mistral 3's RoPE scaling, which does not change the magnitude of queries and keys."""
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling["llama_4_scaling_beta"] = config.pop("llama_4_scaling_beta", None)
        if "mscale_all_dim" in scaling:
            scaling["mscale"] = scaling["mscale_all_dim"]


def _add_kinds(config: Config, file: _File) -> None:
    """Add the kind of each layer of Nemotron-H: attention if it has KV heads, an MLP or mixture if
    it has a width.
    """
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        return
    heads, widths = (
        value if isinstance(value, list) else [value or 0] * layers
        for value in (config.get("num_key_value_heads"), config.get("intermediate_size"))
    )
    wide = "moe" if config.get("num_local_experts") else "mlp"
    config["layer_types"] = [
        "full_attention" if count else wide if width else "linear_attention"
        for count, width in zip(heads, widths, strict=False)
    ]
    config["num_key_value_heads"], config["intermediate_size"] = max(heads), max(widths)
    config["moe_latent_size"] = file.integer("moe_latent_size")


def _add_recurrent(config: Config, file: _File) -> None:
    """Add sizes of recurrent layers, and which layers attend: those that have KV heads."""
    groups = config.get("num_key_value_heads")
    if isinstance(groups, list) and 0 in groups:
        other = "conv" if file.architecture.startswith("lfm2") else "linear_attention"
        config["layer_types"] = ["full_attention" if count else other for count in groups]
        config["num_key_value_heads"] = max(groups)
    sizes = {name: file.integer(key) for key, name in RECURRENT_KEYS.items()}
    if not sizes["heads"] or not sizes["inner"]:
        return
    finetuned = f"{file.architecture}.rope.scaling.finetuned"
    if not file.metadata.flag(finetuned):  # Granite's flag
        config["position_embedding_type"] = "nope"
    value = sizes["inner"] // sizes["heads"]
    config |= {
        "linear_num_value_heads": sizes["heads"],
        "linear_num_key_heads": sizes["key_heads"],
        "linear_key_head_dim": sizes["key_size"],
        "linear_value_head_dim": value,
        "linear_conv_kernel_dim": sizes["taps"],
        "mamba_n_heads": sizes["heads"],
        "mamba_n_groups": sizes["key_heads"],
        "mamba_d_state": sizes["key_size"],
        "mamba_d_head": value,
        "mamba_d_ssm": sizes["inner"],
        "mamba_d_conv": sizes["taps"],
    }


def _add_kimi(config: Config, file: _File) -> None:
    """Add sizes of delta layers (as many heads as others); expert weights sum to 1."""
    config["linear_head_dim"] = file.integer("kda.head_dim")
    config["linear_num_heads"] = config.get("num_attention_heads")
    config["linear_conv_kernel_dim"] = file.integer("ssm.conv_kernel")
    config.setdefault("norm_topk_prob", True)


def _add_connections(config: Config, file: _File) -> None:
    """Add Qwen3.8-Flash-Next's streams, indexer and n-grams, with the file's hash constants."""
    config["output_gate_type"] = "sigmoid"
    for key, name in CONNECTION_KEYS.items():
        config[name] = file.integer(key)
    ratios = file.listed("attention.compress_ratios")
    config["indexer_compress_ratio"] = max(ratios or (), default=None)
    layers = file.listed("ple.layers") or ()
    config["ple_layer_ids"] = [layer + 1 for layer in layers]
    for key in ("layer_multipliers", "head_vocab_sizes"):
        config[f"ngram_{key}"] = file.listed(f"ple.{key}") or []
    if (table := file.tensors.get("model.ngram_embedding.weight")) is not None:
        config["ngram_rows"] = table.rows
    width = config.pop("hidden_size_per_layer_input", None)
    if isinstance(width, int):
        config["ple_embed_dim"] = width * len(config["ngram_head_vocab_sizes"])


def _add_bases(config: Config, file: _File) -> None:
    """Add which layers have RoPE: in Hugging Face's configs, the others have base 0."""
    if (flags := file.listed("attention.rope_pattern")) is not None:
        base = config.get("rope_theta")
        config["layer_rope_theta"] = [base if flag else 0 for flag in flags]


def _add_query_scale(config: Config, file: _File) -> None:
    """Add Gemma 3's query scale: from the head size, or for the 27B model from hidden size /
    heads.
    """
    scale = _head_size(config) if config.get("num_hidden_layers") == 62 else None
    config["query_pre_attn_scalar"] = scale or config.get("head_dim")


def _add_streams(config: Config, file: _File) -> None:
    """Add the keys specific to Gemma 3n's and Gemma 4's layers, some of them from tensors."""
    tensors = file.tensors
    if (table := tensors.get("model.embed_tokens_per_layer.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.rows
    deviations = file.listed("activation_sparsity_scale")
    if deviations is not None:
        config["activation_sparsity_scale"] = [n if n > 0 else None for n in deviations]
    if (left := tensors.get("model.layers.0.laurel.linear_left.weight")) is not None:
        config["laurel_rank"] = left.rows


def _add_full_layers(config: Config, file: _File) -> None:
    """Add the head size of Gemma 4's full-attention layers, which is under the plain key. Their
    rotary divisors determine which pairs rotate.
    """
    tensors = file.tensors
    config.pop("rope_dim", None)
    config.pop("partial_rotary_factor", None)
    full = {"head_dim": config.pop("head_dim", None)}
    config["head_dim"] = file.integer("attention.key_length_swa")
    types, heads = config.get("layer_types"), config.get("num_key_value_heads")
    first = types.index("full_attention") if types and "full_attention" in types else 0
    if isinstance(heads, list) and types and len(heads) == len(types):
        full["num_key_value_heads"] = heads[first]
        sliding = (n for n, kind in zip(heads, types, strict=True) if kind != "full_attention")
        config["num_key_value_heads"] = next(sliding, heads[first])
    config["per_layer_config"] = {str(first): full}
    config["attention_k_eq_v"] = f"model.layers.{first}.self_attn.v_proj.weight" not in tensors
    factors = tensors.get("rope_freqs.weight")
    if factors is not None and factors.info.nbytes <= _LONGEST_ROPE:
        turning = unpack(factors.read()).reshape(-1) < _STANDS_STILL
        config["partial_rotary_factor"] = float(turning.mean())
    config["enable_moe_block"] = bool(config.get("num_local_experts"))
    config["num_experts"] = config.get("num_local_experts")
    config["top_k_experts"] = config.get("num_experts_per_tok")


def _add_eagle(config: Config, file: _File) -> None:
    for name in ("target_hidden_size", "norm_before_residual", "norm_before_fc"):
        config[name] = file.metadata.get(f"eagle3.{name}")
    config["eagle_aux_hidden_state_layer_ids"] = file.listed("target_layers") or []


def _add_assistant(config: Config, file: _File) -> None:
    config["backbone_hidden_size"] = file.integer("embedding_length_out")
    if (clusters := file.tensors.get("model.masked_embedding.centroids.weight")) is not None:
        config["num_centroids"] = clusters.rows


def _add_dflash(config: Config, file: _File) -> None:
    """Add DFlash's options, including unknown ones. A file numbers layers' inputs, a folder their
    outputs.
    """
    layers = file.listed("target_layers") or ()
    config["use_sliding_window"] = config["sliding_window"] is not None
    config["is_causal"] = file.metadata.flag("dflash.attention.causal")
    if "embedding_multiplier" in config:
        config["input_embedding_scale"] = config["embedding_multiplier"]
    config["dflash_config"] = {
        "block_size": file.integer("block_size"),
        "mask_token_id": file.metadata.integer("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": [n - 1 if type(n) is int else n for n in layers],
        "selector_rank": file.integer("selector_rank"),
        "hyper_connection": file.integer("hyper_connection.count"),
        "markov_head": any(name.startswith("markov_") for name in file.tensors),
    }


def _add_latents(config: Config, file: _File) -> None:
    """Add the keys of DeepSeek-V2 and V3.

    Newer files store latent attention in its absorbed form: plain keys have the size of the single
    KV head, keys that end in ``_mla`` the size of each head. Older files have the latter under the
    plain keys.
    """
    for key, name in DEEPSEEK_KEYS.items():
        value = file.metadata.number(f"{file.architecture}.{key}")
        if value:
            config[name] = value

    def head_size(kind: str) -> int | None:
        stem = f"attention.{kind}_length"
        return file.integer(f"{stem}_mla") or file.integer(stem)

    size, rotary = head_size("key"), config.get("qk_rope_head_dim")
    if size is not None and isinstance(rotary, int):
        config["qk_nope_head_dim"] = size - rotary
    if (value := head_size("value")) is not None:
        config["v_head_dim"] = value
    config["rope_interleave"] = True
    config.pop("head_dim", None)
    config.pop("partial_rotary_factor", None)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "mscale_all_dim" in scaling:
        # GGUF stores a tenth of the factor; both factors are equal in all published models.
        scaling["mscale_all_dim"] = scaling["mscale"] = 10 * scaling["mscale_all_dim"]


_FAMILIES: Mapping[str, tuple[Callable[[Config, _File], None], ...]] = {
    "deepseek2": (_add_choice, _add_latents),
    "dflash": (_add_dflash,),
    "eagle3": (_add_eagle,),
    "gemma3": (_add_query_scale,),
    "gemma3n": (_add_streams,),
    "gemma4": (_add_streams, _add_full_layers),
    "gemma4-assistant": (_add_streams, _add_full_layers, _add_assistant),
    "glm4moe": (_add_choice,),
    "granite_swa": (_add_bases,),
    "kimi-linear": (_add_kimi, _add_choice, _add_latents),
    "mistral3": (_add_temperature,),
    "qwen4exp": (_add_connections,),
}
"""Functions for specific architectures, in order."""
