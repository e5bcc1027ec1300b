"""GGUF metadata as a Hugging Face config and generation config.

Translates the file's keys and adds only what the file implies (a tied head, the factors of
long-context RoPE scaling). The architecture supplies defaults for missing keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import CheckpointError
from localrt.models.architectures.family import Config, head_size
from localrt.models.checkpoints.gguf.metadata import GgufMetadata
from localrt.models.checkpoints.gguf.names import (
    CONFIG_KEYS,
    RECURRENT_KEYS,
    ROPE_SCALING_KEYS,
    SAMPLING_KEYS,
    SCORING,
    TOKEN_KEYS,
)
from localrt.models.registry import find_family
from localrt.models.tensor_source import EMBEDDING, HEAD, StoredTensor
from localrt.quant.formats import unpack

_MOST_LAYERS = 1 << 16
_LONGEST_ROPE = 1 << 16


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
    """The sources of a config: metadata and tensors. See ``GgufFacts``."""

    architecture: str
    metadata: GgufMetadata
    tensors: Mapping[str, StoredTensor]

    def integer(self, key: str) -> int | None:
        return self.metadata.integer(f"{self.architecture}.{key}")

    def flag(self, key: str) -> bool | None:
        return self.metadata.flag(f"{self.architecture}.{key}")

    def number(self, key: str) -> float | None:
        return self.metadata.number(f"{self.architecture}.{key}")

    def value(self, key: str) -> object:
        return self.metadata.get(f"{self.architecture}.{key}")

    def token(self, name: str) -> int | None:
        return self.metadata.integer(f"tokenizer.ggml.{name}_token_id")

    def listed(self, key: str) -> list[Any] | None:
        key = key if key in self.metadata else f"{self.architecture}.{key}"
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
    _add_recurrent(config, file)
    _leave_out(config, predicting, metadata)
    family = find_family(architecture)
    if family.gguf_plus_one:
        config["norm_weights_include_one"] = True
    if family.gguf_config is not None:
        family.gguf_config(config, file)
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
    never = metadata.numbers("tokenizer.ggml.suppress_tokens")
    if never is not None and never.dtype.kind in "iu":
        config["suppress_tokens"] = never.tolist()
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
    head_dim, rope_dim = config.get("head_dim", head_size(config)), config.get("rope_dim")
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
    for length in ("long", "short"):
        factors = file.tensors.get(f"rope_factors_{length}.weight")
        if factors is not None and factors.info.nbytes <= _LONGEST_ROPE:
            kind = "longrope"
            scaling[f"{length}_factor"] = unpack(factors.read()).reshape(-1).tolist()
    sections = file.listed("rope.dimension_sections")
    if sections and architecture.startswith(("qwen", "paddleocr", "glm4")):
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


def _add_recurrent(config: Config, file: _File) -> None:
    """Add sizes of recurrent layers, and which layers attend: those that have KV heads."""
    groups = config.get("num_key_value_heads")
    if isinstance(groups, list) and 0 in groups:
        config["layer_types"] = [
            "full_attention" if count else "linear_attention" for count in groups
        ]
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
