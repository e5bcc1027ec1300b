"""DeepSeek-V4: compressed tokens, an indexer, streams that matrices mix, and experts by token.

Layers see a window, and an entry for every 4 tokens, of which an indexer chooses, or for every 128.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from localrt.models.architectures import deepseek, llama
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import CHOICE_BIAS, ROUTER, DecoderConfig, LayerNames
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig
from localrt.models.row_order import Stack, split_rows
from localrt.models.tensor_source import EMBEDDING, HEAD, RowSource
from localrt.quant.ops.attention import CompressedSpec, Rope

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {"0": "sliding_attention", "4": _SPARSE, "128": _HEAVY}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys and DeepSeek's: as published, as transformers saves them, and of GGUF."""
    config = llama.read_config(raw.renamed({"moe_intermediate_size": "intermediate_size"}))
    raw.integer("n_routed_experts")
    all_sparse = raw.without("mlp_layer_types").without("first_k_dense_replace")
    (mixture,) = deepseek.read_mixtures(all_sparse, config.norm_eps, 1, "silu")
    assert mixture is not None, "all layers have experts"
    mixture = replace(mixture, choice_bias=True)
    hashed = replace(mixture, choice_bias=False, hashed=True)
    kinds, first = {"hash_moe": hashed, "moe": mixture}, raw.index("num_hash_layers")
    default = [hashed if layer < first else mixture for layer in range(config.layers)]
    config = replace(
        config,
        architecture="deepseek_v4",
        attention=_attention(raw, config),
        names=LayerNames(mlp_norm="ffn_norm"),
        mixtures=tuple(raw.layer_kinds("mlp_layer_types", config.layers, kinds) or default),
    )
    return deepseek.with_streams(config, raw)


def _attention(raw: RawConfig, config: DecoderConfig) -> tuple[CompressedSpec, ...]:
    size, window, ropes = raw.integer("head_dim"), raw.integer("sliding_window"), _ropes(raw)
    plain = CompressedSpec(
        heads=raw.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=size,
        scale=1 / math.sqrt(size),
        eps=config.norm_eps,
        rope=ropes[0],
        window=window,
        sinks=True,
        needs="StreamOps",
        size=size,
        nearest=window,
        query_rank=raw.integer("q_lora_rank"),
        groups=raw.integer("o_groups"),
        group_rank=raw.integer("o_lora_rank"),
    )
    rates, index_size = raw.nested("compress_rates"), raw.integer("index_head_dim")
    entries = replace(plain, rope=ropes[1], window=None, entries=(size,))
    heavy = replace(entries, block=rates.integer(_HEAVY, 128), head_dim=size + 3 * size)
    indexed = replace(
        entries,
        block=rates.integer(_SPARSE, 4),
        head_dim=size + 5 * (size + index_size),
        series=2,
        entries=(size, index_size),
        index_heads=raw.integer("index_n_heads"),
        chosen=raw.integer("index_topk"),
    )
    specs = dict(zip(_RATIOS.values(), (plain, indexed, heavy), strict=True))
    names = [_SPARSE if n > 2 and n % 2 else _HEAVY for n in range(config.layers)]
    if (ratios := raw.layer_list("compress_ratios", config.layers)) is not None:
        names = [_RATIOS.get(str(ratio), str(ratio)) for ratio in ratios]
    raw = raw if raw.has("layer_types") else raw.changed(layer_types=names)
    return tuple(raw.layer_kinds("layer_types", config.layers, specs) or ())


def _ropes(raw: RawConfig) -> tuple[Rope, Rope]:
    """Of layers without and with entries; transformers saves the parameters of both."""
    size, share = raw.integer("head_dim"), raw.optional_number("partial_rotary_factor")
    rotary = int(size * share) if share else raw.integer("qk_rope_head_dim", size // 8)
    raw, kinds = raw.changed(rope_dim=rotary), raw.mapping("rope_parameters")
    main, entries = kinds.get("main"), kinds.get("compress")
    if not (isinstance(main, Mapping) and isinstance(entries, Mapping)):
        theta, scaling = raw.number("compress_rope_theta"), raw.mapping("rope_scaling")
        main, entries = {}, {"attention_factor": 1.0, **scaling, "rope_theta": theta}
    return read_rope(raw, size, parameters=main), read_rope(raw, size, parameters=entries)


def _decoders(
    stored: Mapping[str, RowSource], config: Mapping[str, object]
) -> dict[str, RowSource]:
    """``stored`` in the decoder's form: what is never quantized as vectors, and a matrix for each
    group of the output projection.
    """
    found: dict[str, RowSource] = {}
    groups = config.get("o_groups")
    for name, tensor in stored.items():
        if name.endswith(".wo_a.weight"):
            parts = range(groups if type(groups) is int and 0 < groups <= 4096 else 8)
            names = tuple(name.replace("wo_a.", f"wo_a.{part}.") for part in parts)
            found |= {own.info.name: own for own in split_rows(tensor, Stack(names), "", None)}
        else:
            tensor = deepseek.flat_vector(tensor)
            found[tensor.info.name] = tensor
    return found


_GGUF_KEYS = {
    "hash_layer_count": "num_hash_layers",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.output_group_count": "o_groups",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.compress_rope_freq_base": "compress_rope_theta",
    **deepseek.GGUF_HOST_KEYS,
}


def _add_keys(config: Config, file: GgufFacts) -> None:
    config |= {name: file.value(key) for key, name in _GGUF_KEYS.items()}
    ratios = file.listed("attention.compress_ratios") or []
    config["compress_ratios"] = ratios[: config.get("num_hidden_layers")]
    config["n_routed_experts"] = config.pop("num_local_experts", None)
    config["swiglu_limit"] = config.pop("swiglu_limits", None)


_GGUF_LAYER = {
    "attn_q_a": "attn.wq_a",
    "attn_q_b": "attn.wq_b",
    "attn_q_a_norm": "attn.q_norm",
    "attn_kv": "attn.wkv",
    "attn_kv_a_norm": "attn.norm",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    "indexer.proj": "attn.indexer.weights_proj",
    "indexer.attn_q_b": "attn.indexer.wq_b",
    "ffn_norm": "ffn_norm",
    "ffn_gate_tid2eid": f"{ROUTER}.tid2eid",
    "attn_norm": "attn_norm",
    **{
        f"{stem}_compressor_{theirs}": f"attn.{own}compressor.{ours}"
        for stem, own in (("attn", ""), ("indexer", "indexer."))
        for theirs, ours in {"kv": "wkv", "gate": "wgate", "ape": "ape", "norm": "norm"}.items()
    },
    **deepseek.GGUF_MIX,
}
FAMILIES = (
    Family(
        name="deepseek_v4",
        read=read_config,
        folders="DeepseekV4ForCausalLM",
        tensors={
            **{"embed.weight": EMBEDDING, "head.weight": HEAD, "norm.weight": "model.norm.weight"},
            **{f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
            "attn.kv_norm.weight": "attn.norm.weight",
            **{"ffn.gate.weight": f"{ROUTER}.weight", "ffn.gate.tid2eid": f"{ROUTER}.tid2eid"},
            "ffn.gate.bias": CHOICE_BIAS,
            **{
                f"ffn.shared_experts.{theirs}.weight": f"mlp.shared_experts.{ours}_proj.weight"
                for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
            },
        },
        predicts=False,
        convert=_decoders,
        gguf="deepseek4",
        gguf_top={f"output_hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
        gguf_layer=_GGUF_LAYER,
        gguf_config=_add_keys,
    ),
)
