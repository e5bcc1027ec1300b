"""Gemma 4 (text): Gemma 3's norms, two head sizes, per-layer embeddings, shared keys and values.

No card has run this yet.

The last layers attend to the keys and values of the nearest earlier layer of their kind that has
its own. Full layers have larger heads, rotate a part of each, and may use their projected keys as
values. Queries, keys and values are normed per head and not scaled. Mixtures run in parallel with a
dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import gemma
from localrt.models.architectures.family import SANDWICH_NORMS, Config, Family, GgufFacts
from localrt.models.config import EXPERT_SCALE, ROUTER, ROUTER_NORM, DecoderConfig, MixtureSpec
from localrt.models.encoders import EncoderConfig
from localrt.models.layers.inputs import LAYER_EMBEDDING, PROJECTION, GatedInputs, LayerInputs
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, expert_activation
from localrt.quant.formats import unpack
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.experts import ExpertSpec, RouterSpec

_SOFTCAP = 30.0


def read_config(raw: RawConfig) -> DecoderConfig:
    """Gemma 4's ``text_config`` keys."""
    layers = raw.integer("num_hidden_layers")
    windowed = raw.windowed([(layer + 1) % 6 != 0 for layer in range(layers)])
    windowed[-1] = False  # fixed, as in transformers
    sliding, full = _read_kinds(raw, windowed)
    config = gemma.sandwich_config(raw, full, sliding, windowed)
    sources = _sources(raw, windowed)
    sizes = _inner_sizes(raw, sources)
    if raw.text("use_bidirectional_attention", "") == "all":
        raise UnsupportedModelError("attention to later tokens is not supported")
    return replace(
        config,
        attention=tuple(
            replace(spec, reads=source)
            for spec, source in zip(config.attending, sources, strict=True)
        ),
        qk_norm=True,
        norm_offset=0.0,
        # Without a value, llama.cpp uses the cap of all published models.
        final_softcap=config.final_softcap or (_SOFTCAP if raw.is_gguf else None),
        inner_sizes=sizes,
        intermediate_size=max(sizes),
        block=GatedInputs(inputs=_layer_inputs(raw, config.vocab_size)),
        mixtures=(_read_mixture(raw, config),) * layers if raw.flag("enable_moe_block") else (),
    )


def read_embedding(raw: RawConfig) -> EncoderConfig:
    """EmbeddingGemma 2: Gemma 4 whose tokens see those after them, as far as a window each way.

    A layer's own inputs have no table. A matrix behind the last norm makes the vectors.
    """
    raw = raw if raw.has("rope_scaling") else raw.changed(partial_rotary_factor=1.0)
    own_heads = raw.changed(attention_k_eq_v=True)  # full layers have their own number, as there
    return replace(
        gemma.encoder_config(raw, read_config(own_heads)),
        inputs=raw.integer("hidden_size_per_layer_input"),
        dense=(raw.integer("embedding_dim"),),
    )


def _layer_inputs(raw: RawConfig, vocab_size: int) -> LayerInputs | None:
    """The per-layer embeddings, where a model has them; ``vocab_size`` is the default of theirs."""
    if (width := raw.optional_integer("hidden_size_per_layer_input")) is None:
        return None
    rows = raw.integer("vocab_size_per_layer_input", vocab_size)
    return LayerInputs(width=width, vocab_size=rows)


def _sources(raw: RawConfig, windowed: Sequence[bool]) -> list[int | None]:
    """For each layer, the layer whose keys and values it attends to; None: its own.

    Raises:
        ValueError: there is no earlier layer of its kind.
    """
    layers, shared = len(windowed), raw.index("num_kv_shared_layers", 0)
    if shared >= layers:
        raise ValueError(f"num_kv_shared_layers must be below the {layers} layers, is {shared}")
    own = range(layers - shared)
    last = {
        kind: max((n for n in own if windowed[n] is kind), default=None) for kind in (True, False)
    }
    missing = [n for n in range(layers) if n not in own and last[windowed[n]] is None]
    if missing:
        raise ValueError(
            f"layer {missing[0]} shares keys and values (num_kv_shared_layers {shared}) with an "
            "earlier layer of its kind in layer_types, and there is none"
        )
    return [None if n in own else last[windowed[n]] for n in range(layers)]


def _read_kinds(raw: RawConfig, windowed: Sequence[bool]) -> tuple[AttentionSpec, AttentionSpec]:
    """Read a sliding and a full layer."""
    heads, size = raw.integer("num_attention_heads"), raw.integer("head_dim")
    sliding = AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads"),
        head_dim=size,
        scale=1.0,
        eps=raw.number("rms_norm_eps", 1e-6),
        rope=read_rope(
            raw,
            size,
            parameters={
                # The whole head rotates; a GGUF file's divisors are for full layers
                "rope_type": "proportional",
                "rope_theta": raw.number("rope_local_base_freq", 1e4),
                "partial_rotary_factor": 1.0,
            },
        ),
        window=raw.integer("sliding_window", 512),
        value_norm=True,
    )
    tied = raw.flag("attention_k_eq_v")
    full_size, groups = _full_heads(raw, windowed, tied=tied)
    scaled = {
        "rope_type": "proportional",
        "rope_theta": raw.number("rope_theta", 1e6),
        "partial_rotary_factor": raw.number("partial_rotary_factor", 0.25),
        **raw.mapping("rope_scaling"),
    }
    full = replace(
        sliding,
        kv_heads=groups or sliding.kv_heads,
        head_dim=full_size,
        rope=read_rope(raw, full_size, parameters=scaled),
        window=None,
        keys_as_values=tied,
    )
    return sliding, full


def _full_heads(raw: RawConfig, windowed: Sequence[bool], *, tied: bool) -> tuple[int, int | None]:
    """Size and number of a full layer's key/value heads; None: as in other layers.

    Newer configs have them in ``per_layer_config``, the same for each of these layers; without an
    entry, a layer has the heads of others.
    """
    first = str(windowed.index(False))
    if raw.has("per_layer_config"):
        if first not in raw.mapping("per_layer_config"):
            return raw.integer("head_dim"), None
        special = raw.nested("per_layer_config", first)
        size = special.integer("head_dim", raw.integer("head_dim"))
        return size, special.optional_integer("num_key_value_heads")
    groups = raw.optional_integer("num_global_key_value_heads") if tied else None
    return raw.integer("global_head_dim", 512), groups


def _inner_sizes(raw: RawConfig, sources: Sequence[int | None]) -> tuple[int, ...]:
    """Layers without keys and values of their own may have MLPs of twice the width."""
    sizes = raw.integers("intermediate_size", len(sources))
    if not raw.flag("use_double_wide_mlp"):
        return sizes
    return tuple(
        size if source is None else 2 * size for size, source in zip(sizes, sources, strict=True)
    )


def _read_mixture(raw: RawConfig, config: DecoderConfig) -> MixtureSpec:
    return MixtureSpec(
        router=RouterSpec(
            count=raw.integer("num_experts"), used=raw.integer("top_k_experts"), eps=config.norm_eps
        ),
        expert=ExpertSpec(activation=expert_activation(config)),
        inner=raw.integer("moe_intermediate_size"),
        beside_dense=True,
    )


_LONGEST_ROPE = 1 << 16
_STANDS_STILL = 1e9  # a rotary divisor that makes a frequency zero


def add_full_layers(config: Config, file: GgufFacts) -> None:
    """Add the head size of full-attention layers, which is under the plain key, and the rows of the
    table of layers' inputs. Full layers' rotary divisors determine which pairs rotate.
    """
    tensors = file.tensors
    if (table := tensors.get(LAYER_EMBEDDING)) is not None:
        config["vocab_size_per_layer_input"] = table.rows
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


FAMILIES = (
    Family(
        name="gemma4",
        read=read_config,
        folders="Gemma4ForCausalLM Gemma4ForConditionalGeneration "
        "Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration",
        gguf="gemma4",
        tensors={
            "router.proj.weight": f"{ROUTER}.weight",
            "router.scale": ROUTER_NORM,
            "router.per_expert_scale": EXPERT_SCALE,
        },
        gguf_layer={
            **SANDWICH_NORMS,
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        gguf_config=add_full_layers,
    ),
    Family(
        name="gemma_embedding2",
        encoder=read_embedding,
        folders="EmbeddingGemma2Model EmbeddingGemma2TextModel",
        tensors={
            "ple_block.per_layer_input_gate.weight": "per_layer_input_gate.weight",
            "ple_block.per_layer_projection.weight": "per_layer_projection.weight",
            "ple_block.post_per_layer_input_norm.weight": "post_per_layer_input_norm.weight",
            "model.ple.per_layer_model_projection.weight": f"{PROJECTION}.weight",
            "model.ple.per_layer_projection_norm.weight": "model.per_layer_projection_norm.weight",
            "model.embedding_projection.weight": "dense_2.weight",
        },
    ),
)
