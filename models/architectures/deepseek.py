"""DeepSeek, GLM and Solar Open: experts chosen by groups, and latent attention in most models.

The first layers are dense. V2 scores by a softmax and ranks groups by their best expert. V3 scores
by sigmoids, with a bias that only affects the choice, and ranks groups by their best two. The
attention scale is multiplied by YaRN's ``mscale_all_dim`` squared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.common.option_names import option
from localrt.models.architectures import llama
from localrt.models.architectures.family import MLP_NORM, Config, Family, GgufFacts
from localrt.models.architectures.llama import ACTIVATIONS
from localrt.models.config import CHOICE_BIAS, FIRST_INDEXER, DecoderConfig, MixtureSpec
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.hyper_connections import MixedStreams
from localrt.models.layers.rope import read_rope, scaling_number, yarn_mscale
from localrt.models.raw_config import SCORING, RawConfig
from localrt.models.row_order import regrouped
from localrt.models.tensor_source import RowSource
from localrt.quant.ops.attention import LatentIndexSpec, LatentSpec, Rope
from localrt.quant.ops.experts import ExpertSpec, RouterSpec
from localrt.quant.ops.protocol import MlpSpec


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read the config of V2, V3, or GGUF's ``deepseek2``, which is either."""
    eps = raw.number("rms_norm_eps", 1e-6)
    layers = raw.integer("num_hidden_layers")
    activation = raw.choice("hidden_act", "silu", ACTIVATIONS)
    return DecoderConfig(
        architecture="deepseek",
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        intermediate_size=raw.integer("intermediate_size"),
        context_length=raw.integer("max_position_embeddings"),
        norm_eps=eps,
        attention=(_attention(raw, eps),) * layers,
        mlp=MlpSpec(activation=activation, eps=eps),
        block=ResidualBlock(),
        tied_head=raw.flag("tie_word_embeddings"),
        mixtures=read_mixtures(raw, eps, layers, activation),
    )


def read_mistral4(raw: RawConfig) -> DecoderConfig:
    """Mistral Small 4: DeepSeek's latents, and queries that grow at late positions.

    Experts are chosen by a softmax, from groups that are ranked by their best two.
    """
    # A share of queries, all of what DeepSeek calls their rotary part
    raw = raw.without("partial_rotary_factor")
    config, temperature = read_config(raw), llama.read_temperature(raw)
    mixtures = tuple(
        spec
        and replace(
            spec,
            choice_bias=False,
            router=replace(spec.router, scoring="softmax", group_top=2),
        )
        for spec in config.mixtures
    )
    attention = tuple(replace(spec, temperature=temperature) for spec in config.attending)
    return replace(config, architecture="mistral4", attention=attention, mixtures=mixtures)


def _attention(raw: RawConfig, eps: float) -> LatentSpec:
    latent, rotary = raw.integer("kv_lora_rank", 512), raw.index("qk_rope_head_dim", 64)
    nope = raw.integer("qk_nope_head_dim", 128)
    rope = read_rope(raw, rotary) if rotary else Rope(())
    if 2 * len(rope.inv_freq) != rotary:
        raise CheckpointError(f"qk_rope_head_dim is {rotary}, {2 * len(rope.inv_freq)} are turned")
    mscale = _mscale(raw)
    return LatentSpec(
        heads=raw.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=rotary + latent,
        scale=mscale * mscale / math.sqrt(nope + rotary),
        eps=eps,
        rope=rope,
        latent=latent,
        nope=nope,
        value=raw.integer("v_head_dim", 128),
        query_rank=raw.optional_integer("q_lora_rank"),
        interleaved=raw.flag("rope_interleave", default=True),
        # transformers leaves these norms at their default; llama.cpp gives them the model's
        latent_eps=eps if raw.is_gguf else 1e-6,
    )


def _mscale(raw: RawConfig) -> float:
    """YaRN's factor of queries and keys in all dimensions, rotary or not."""
    scaling = raw.mapping("rope_scaling")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = scaling_number(scaling, "factor")
    return yarn_mscale(factor, scaling_number(scaling, "mscale_all_dim"))


def read_mixtures(
    raw: RawConfig, eps: float, layers: int, activation: str
) -> tuple[MixtureSpec | None, ...]:
    """Read the mixture of each layer, for ``DecoderConfig.mixtures``."""
    if not raw.optional_integer("n_routed_experts"):
        return ()
    if activation != "silu":
        raise UnsupportedModelError(f"experts of this kind with {activation} are not supported")
    inner = raw.integer("moe_intermediate_size")
    shared = inner * (raw.optional_integer("n_shared_experts") or 0)
    dense = raw.optional_integer("first_k_dense_replace") or 0
    frequency = raw.integer("moe_layer_freq", 1)
    sparse = raw.sparse(layers)
    if sparse is None:
        sparse = [layer >= dense and layer % frequency == 0 for layer in range(layers)]
    method = raw.text("topk_method", "noaux_tc" if _is_v3(raw) else "greedy")
    router = _router(raw, eps, method)
    # In GGUF only the tensor shows whether there is a bias.
    biased = method == "noaux_tc"
    if raw.is_gguf:
        biased = any(raw.has_tensor(f"model.layers.{n}.{CHOICE_BIAS}") for n in range(layers))

    mixture = MixtureSpec(
        router=router, expert=ExpertSpec(), inner=inner, shared=shared, choice_bias=biased
    )
    return tuple(mixture if here else None for here in sparse)


def _is_v3(raw: RawConfig) -> bool:
    """Whether missing keys have V3's defaults; GGUF has all keys."""
    return not raw.architecture.startswith("DeepseekV2")


def _router(raw: RawConfig, eps: float, method: str) -> RouterSpec:
    newer = _is_v3(raw)
    scoring = raw.choice("scoring_func", "sigmoid" if newer else "softmax", SCORING)
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise UnsupportedModelError(
            f"topk_method {method!r} is not supported (known: greedy, group_limited_greedy, "
            "noaux_tc)"
        )
    normalize = raw.flag("norm_topk_prob", default=newer)
    if normalize and raw.architecture == "DeepseekV2ForCausalLM":
        raise UnsupportedModelError(
            "norm_topk_prob of DeepSeek-V2 is not supported: its published implementations differ"
        )
    groups = 1 if method == "greedy" else raw.integer("n_group", 1)
    return RouterSpec(
        count=raw.integer("n_routed_experts"),
        used=raw.integer("num_experts_per_tok"),
        eps=eps,
        scoring=scoring,
        normalize=normalize,
        scale=raw.number("routed_scaling_factor", 1.0),
        groups=groups,
        used_groups=raw.integer("topk_group", groups) if groups > 1 else 1,
        group_top=2 if scoring == "sigmoid" else 1,
    )


def read_glm4_moe(raw: RawConfig) -> DecoderConfig:
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and text of their V models: half of each head is rotated,
    experts are chosen as in DeepSeek-V3, and the first layers are dense.

    GLM-4.7-Flash has latent attention too: ``read_config`` reads its config.

    Reads Llama's keys and DeepSeek's mixture keys; the largest models have ``use_qk_norm``.
    """
    config = llama.read_config(raw)
    spec = config.attending[0]
    share = {"partial_rotary_factor": raw.number("partial_rotary_factor", 0.5)}
    rope = read_rope(raw, spec.head_dim, parameters={**share, **raw.mapping("rope_scaling")})
    normed = raw.flag("use_qk_norm") or raw.has_tensor("model.layers.0.self_attn.q_norm.weight")
    return replace(
        config,
        architecture="glm4_moe",
        attention=(replace(spec, rope=rope, window=None),) * config.layers,
        qk_norm=normed,
        mixtures=read_mixtures(raw, config.norm_eps, config.layers, config.mlp.activation),
    )


def read_solar_open(raw: RawConfig) -> DecoderConfig:
    """Solar Open: Llama with experts as in GLM-4.5, in every layer. GGUF files call it ``glm4moe``.

    Reads Llama's keys and DeepSeek's mixture keys.
    """
    if not raw.has("intermediate_size"):  # of dense layers
        raw = raw.renamed({"moe_intermediate_size": "intermediate_size"})
    config = llama.read_config(raw)
    mixtures = read_mixtures(raw, config.norm_eps, config.layers, config.mlp.activation)
    return replace(config, architecture="solar_open", mixtures=mixtures)


def read_glm_dsa(raw: RawConfig) -> DecoderConfig:
    """GLM-5 to 5.2: DeepSeek-V3 with an indexer that chooses ``index_topk`` tokens for attention.

    It is computed only where a longer context is asked for: it chooses all tokens of others.

    Raises:
        UnsupportedModelError: the context is longer, and the model was packed without indexers.
    """
    config, most = replace(read_config(raw), architecture="glm_dsa"), raw.integer("index_topk")
    sparse, there = raw.context is not None and raw.context > most, raw.has_tensor(FIRST_INDEXER)
    if sparse and not there:
        raise UnsupportedModelError(
            f"this model was packed without its indexers, and runs with up to {most} tokens: give "
            f"{option('ctx', str(most))} or less, or pack it again"
        )
    config = with_indexers(config, raw, sparse=sparse) if there else config
    return config if sparse else replace(config, context_length=min(config.context_length, most))


_OWN = {"full": True, "shared": False, "F": True, "S": False}


def with_indexers(
    config: DecoderConfig, raw: RawConfig, *, sparse: bool = True, block: int = 0
) -> DecoderConfig:
    """``config`` with indexers of blocks (0: of tokens); layers may share that of one before.

    Raises:
        UnsupportedModelError: there is none before.
    """
    rank, size, layers = raw.integer("q_lora_rank"), raw.integer("index_head_dim"), config.layers
    kinds = raw.layer_kinds("indexer_types", layers, _OWN)
    kinds = kinds or raw.layer_kinds("index_topk_pattern", layers, _OWN)
    if not kinds:
        every, first = raw.index("index_topk_freq", 1) or 1, raw.index("index_skip_topk_offset", 2)
        kinds = [max(layer - first + 1, 0) % every == 0 for layer in range(layers)]
    attention, index = list(config.attention), None
    for layer, spec in enumerate(attention):
        if not isinstance(spec, LatentSpec):
            continue
        index = index or LatentIndexSpec(
            heads=raw.integer("index_n_heads"),
            kv_heads=1,
            head_dim=3 * size if block else size,
            scale=1.0,
            eps=spec.eps,
            rope=spec.rope,
            block=block or 1,
            budget=raw.integer("index_topk"),
            size=size,
            longest=raw.context or config.context_length,
        )
        if not any(kinds[: layer + 1]):
            raise UnsupportedModelError(f"no layer before layer {layer} has an indexer to share")
        own = index if kinds[layer] else None
        attention[layer] = replace(spec, query_rank=rank, index=own, sparse=sparse)
    return replace(config, attention=tuple(attention))


def with_streams(config: DecoderConfig, raw: RawConfig, *, mean: bool = False) -> DecoderConfig:
    """``config`` with DeepSeek-V4's streams and limits; ``mean``: the head reads their mean."""
    count, rounds = raw.integer("hc_mult"), raw.integer("hc_sinkhorn_iters")
    limit, mixtures = raw.number("swiglu_limit"), list(config.mixtures)
    for layer, own in enumerate(mixtures):
        if own is not None:
            expert = replace(own.expert, activation="swiglu", limit=limit)
            mixtures[layer] = replace(own, expert=expert)
    return replace(
        config,
        mlp=MlpSpec(activation="swiglu", eps=config.norm_eps, limit=limit),
        block=MixedStreams(count=count, eps=raw.number("hc_eps"), rounds=rounds, mean=mean),
        mixtures=tuple(mixtures),
    )


def flat_vector(tensor: RowSource) -> RowSource:
    """``tensor``, as a vector if it is never quantized; GGUF's names end in ``.weight``."""
    name = re.sub(r"(\.ape|_fn|_base|_scale|tid2eid)\.weight$", r"\1", tensor.info.name)
    name = name.replace(".self_attn.sinks", ".attn.attn_sink")  # GGUF's, too
    flat = name.endswith((".ape", "_fn", ".tid2eid"))
    shape = (math.prod(tensor.info.shape),) if flat else tensor.info.shape
    info = replace(tensor.info, name=name, shape=shape)
    return regrouped(replace(tensor, info=info), integers=flat)


GGUF_LATENT: Mapping[str, str] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""GGUF's names of latent attention."""
_GGUF_KEYS: Mapping[str, str] = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}


def add_choice(config: Config, file: GgufFacts) -> None:
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


def add_latents(config: Config, file: GgufFacts) -> None:
    """Add the keys of DeepSeek-V2 and V3.

    Newer files store latent attention in its absorbed form: plain keys have the size of the single
    KV head, keys that end in ``_mla`` the size of each head. Older files have the latter under the
    plain keys.
    """
    for key, name in _GGUF_KEYS.items():
        if value := file.number(key):
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


def _add_mistral4(config: Config, file: GgufFacts) -> None:
    scaling = config.get("rope_scaling", {})
    length = file.integer("attention.temperature_length")
    if length is not None and isinstance(scaling, dict):
        scaling.setdefault("original_max_position_embeddings", length)
    llama.add_temperature(config, file)
    _add_both(config, file)


def _add_both(config: Config, file: GgufFacts) -> None:
    add_choice(config, file)
    add_latents(config, file)


def add_indexers(config: Config, file: GgufFacts) -> None:
    """Add the keys of DeepSeek's indexer. Early files of GLM-5.2 do not say which layers have one:
    their tensors do.
    """
    _add_both(config, file)
    config |= {name: file.value(key) for key, name in GGUF_HOST_KEYS.items()}
    own, layers = file.listed("attention.indexer.types"), config.get("num_hidden_layers")
    if own is None and type(layers) is int:
        numbers = range(min(layers, len(file.tensors)))
        own = [FIRST_INDEXER.replace("0", str(n)) in file.tensors for n in numbers]
    config["indexer_types"] = ["full" if each else "shared" for each in (own or [])[:layers]]


GGUF_HOST_KEYS = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "hyper_connection.count": "hc_mult",
    "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
}
"""GGUF's keys of indexers and of streams that matrices mix."""
_MIX = [f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")]
GGUF_MIX = dict(zip(_MIX, _MIX, strict=True))
_INDEXER = {"proj": "weights_proj", "attn_k": "wk", "attn_q_b": "wq_b", "k_norm": "k_norm"}
GGUF_INDEXER = {f"indexer.{key}": f"self_attn.indexer.{own}" for key, own in _INDEXER.items()}
"""GGUF's names of what mixes streams, and of indexers."""
FAMILIES = (
    Family(
        name="glm_dsa",
        read=read_glm_dsa,
        folders="GlmMoeDsaForCausalLM",
        gguf="glm-dsa",
        gguf_layer={**GGUF_LATENT, **GGUF_INDEXER},
        gguf_config=add_indexers,
    ),
    Family(
        name="deepseek",
        read=read_config,
        folders="DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM "
        "Kimi_K25ForConditionalGeneration KimiK25ForConditionalGeneration",
        gguf="deepseek2",
        gguf_layer=GGUF_LATENT,
        gguf_config=_add_both,
    ),
    Family(
        name="mistral4",
        read=read_mistral4,
        folders="Mistral4ForCausalLM",
        gguf="mistral4",
        gguf_layer=GGUF_LATENT,
        gguf_config=_add_mistral4,
    ),
    Family(
        name="glm4_moe",
        read=read_glm4_moe,
        folders="Glm4MoeForCausalLM Glm4vMoeForConditionalGeneration",
        gguf="glm4moe",
        gguf_layer=MLP_NORM,
        gguf_config=add_choice,
    ),
    Family(
        name="solar_open",
        read=read_solar_open,
        folders="SolarOpenForCausalLM",
    ),
)
