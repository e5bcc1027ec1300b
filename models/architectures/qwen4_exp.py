"""Qwen3.8-Flash-Next, the prototype of Qwen4: Qwen3.5's mixtures with several residual streams.

Layers read a mixture of the streams and have no norms of their own. Attention sees the tokens that
an indexer chooses. Before one layer, hashed n-gram embeddings are added to the streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import qwen3_5
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.hyper_connections import HyperConnections
from localrt.models.layers.ngrams import NgramLayer, NgramSpec
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.attention import IndexSpec
from localrt.quant.ops.recurrent import RecurrentSpec

_GATES = {"silu": "silu", "sigmoid": "sigmoid"}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read the config; ``output_gate_type`` applies to DeltaNet layers."""
    config = qwen3_5.read_config(raw)
    gate = raw.choice("output_gate_type", raw.text("hidden_act", "silu"), _GATES)
    streams = raw.integer("hc_count", 4)
    return replace(
        config,
        attention=tuple(
            replace(spec, gate=gate) if isinstance(spec, RecurrentSpec) else spec
            for spec in config.attention
        ),
        names=LayerNames(attention_norm="", mlp_norm=""),
        block=HyperConnections(
            count=streams,
            rank=raw.integer("hc_lowrank", 320),
            ngrams=_ngrams(raw, config, streams),
            index=_index(raw, config),
            index_apart=raw.is_gguf,
        ),
    )


def _index(raw: RawConfig, config: DecoderConfig) -> IndexSpec:
    attending = config.attending[0] if config.attending else None
    if attending is None or attending.rope is None:
        raise ValueError("layer_types must have a layer that attends, with a rotary embedding")
    size, rotary = raw.integer("indexer_head_dim"), 2 * len(attending.rope.inv_freq)
    if rotary > size:
        raise ValueError(f"indexer_head_dim must be at least {rotary} (what rotates), is {size}")
    return IndexSpec(
        heads=raw.integer("indexer_n_heads"),
        kv_heads=raw.integer("indexer_kv_heads", 1),
        head_dim=size,
        scale=1.0,
        eps=config.norm_eps,
        rope=attending.rope,
        block=raw.integer("indexer_compress_ratio"),
        budget=raw.integer("indexer_budget"),
    )


def _ngrams(raw: RawConfig, config: DecoderConfig, streams: int) -> NgramLayer | None:
    """Read the n-grams of the one layer that has them; files count layers from 1."""
    layers = raw.sequence("ple_layer_ids") or []
    if not layers:
        return None
    if len(layers) > 1:
        raise UnsupportedModelError(
            f"ple_layer_ids {layers!r:.60}: n-grams of more than one layer are not supported"
        )
    (layer,) = layers
    if type(layer) is not int or not 1 <= layer <= config.layers:
        raise ValueError(
            f"ple_layer_ids must be a layer from 1 to {config.layers}, is {layer!r:.60}"
        )
    spec = NgramSpec(
        orders=raw.integer("ngram_size", 3),
        heads=raw.integer("heads_per_ngram", 8),
        rows_from=raw.integer("ngram_vocab_size_base", 20_000_000),
        rows_multiple=raw.integer("make_ngram_vocab_size_divisible_by", 128),
        vocab=config.vocab_size,
        separator=raw.first_index("eos_token_id"),
        seed=raw.integer("seed", 1234),
        sizes=tuple(raw.sequence("ngram_head_vocab_sizes") or ()),
        multipliers=tuple(raw.sequence("ngram_layer_multipliers") or ()),
        rows=raw.integer("ngram_rows") if raw.has("ngram_rows") else None,
    )
    memory = RecurrentSpec(
        kind="ngram",
        taps=raw.integer("ple_conv_kernel_size", 4),
        dilation=spec.orders,
        eps=config.norm_eps,
        width=streams * config.hidden_size,
    )
    width = raw.integer("ple_embed_dim", config.hidden_size)
    return NgramLayer(layer=layer - 1, width=width, spec=spec, memory=memory)


_GGUF_KEYS: Mapping[str, str] = {
    "hyper_connection.count": "hc_count",
    "hyper_connection.low_rank": "hc_lowrank",
    "attention.indexer.head_count": "indexer_n_heads",
    "attention.indexer.key_length": "indexer_head_dim",
    "attention.indexer.top_k": "indexer_budget",
    "ple.ngram_size": "ngram_size",
    "ple.heads_per_ngram": "heads_per_ngram",
    "ple.conv_kernel": "ple_conv_kernel_size",
    "ple.eos_token_id": "eos_token_id",
}
_GGUF_LAYER: Mapping[str, str] = {
    **qwen3_5.GGUF_DELTA,
    **{
        f"hc_{ours}_{stem}": f"{theirs}_hyper_connection.{name}"
        for ours, theirs in (("attn", "attn"), ("ffn", "mlp"))
        for stem, name in (
            ("norm", "hc_norm"),
            ("down", "input_mix_weight_down"),
            ("up", "input_mix_weight_up"),
            ("inject", "block_inject_weight"),
        )
    },
    "indexer.q_proj": "self_attn.indexer.q_proj",
    "indexer.k_proj": "self_attn.indexer.k_proj",
    "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm",
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
    "ple_norm_key": "ple.norm_key",
    "ple_norm_query": "ple.norm_query",
    "ple_norm_conv": "ple.norm_conv",
    "ple_conv1d": "ple.conv1d",
}


def _add_connections(config: Config, file: GgufFacts) -> None:
    """Add Qwen3.8-Flash-Next's streams, indexer and n-grams, with the file's hash constants."""
    config["output_gate_type"] = "sigmoid"
    for key, name in _GGUF_KEYS.items():
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


FAMILIES = (
    Family(
        name="qwen4_exp",
        read=read_config,
        folders="Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration",
        gguf="qwen4exp",
        gguf_top={
            "per_layer_token_embd": "model.ngram_embedding",
            "output_hc_norm": "model.hyper_connection_mixer.hc_norm",
            "output_hc_down": "model.hyper_connection_mixer.input_mix_weight_down",
            "output_hc_up": "model.hyper_connection_mixer.input_mix_weight_up",
        },
        gguf_layer=_GGUF_LAYER,
        gguf_plus_one=True,
        gguf_by_turns=True,
        gguf_config=_add_connections,
    ),
)
