"""Nemotron-H and Nemotron 3 (NVIDIA): layers of one kind each, Mamba-2, attention without rotary
embedding, an MLP with a squared ReLU and no gate, or a mixture of such.
"""

from __future__ import annotations

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures.mamba import mamba_names, read_mamba
from localrt.models.config import DecoderConfig, LayerNames, MixtureSpec
from localrt.models.layers.block import ResidualBlock
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.experts import ExpertSpec, RouterSpec
from localrt.quant.ops.protocol import AttentionSpec, LayerSpec, MlpSpec

_KEYS = {
    "conv_kernel": "mamba_d_conv",
    "layer_norm_epsilon": "rms_norm_eps",
    "mamba_head_dim": "mamba_d_head",
    "mamba_num_heads": "mamba_n_heads",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "n_groups": "mamba_n_groups",
    "num_local_experts": "n_routed_experts",
    "ssm_state_size": "mamba_d_state",
    "use_conv_bias": "mamba_conv_bias",
}
_LISTS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_KINDS = {
    **{"linear_attention": "mamba", "full_attention": "attention"},
    **{kind: kind for kind in ("mamba", "attention", "mlp", "moe")},
    # in a pattern
    **{"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"},
}
_ACTIVATIONS = ("relu2",)


def read_config(raw: RawConfig) -> DecoderConfig:
    """What each layer is, says a list, or in first models a pattern of letters."""
    raw = raw.renamed(_KEYS)
    kinds = _kinds(raw)
    eps, heads = raw.number("rms_norm_eps", 1e-5), raw.integer("num_attention_heads")
    hidden = raw.integer("hidden_size")
    head_dim = raw.integer("head_dim", hidden // heads)
    attending = AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        eps=eps,
        rope=None,
    )
    inner = raw.integer("mamba_n_heads") * raw.integer("mamba_d_head")
    mamba = read_mamba(raw, eps=eps, inner=inner)
    mixers: dict[str, LayerSpec] = {"mamba": mamba, "attention": attending}
    mixture = _read_mixture(raw, eps) if "moe" in kinds else None
    dense = raw.integer("intermediate_size") if "mlp" in kinds else 0
    if raw.flag("mlp_bias"):
        raise UnsupportedModelError("mlp_bias of Nemotron-H is not supported")
    return DecoderConfig(
        architecture="nemotron_h",
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=max(dense, 0 if mixture is None else mixture.shared),
        context_length=raw.integer("max_position_embeddings"),
        norm_eps=eps,
        attention=tuple(mixers.get(kind) for kind in kinds),
        mlp=MlpSpec(activation="relu2", eps=eps),
        block=ResidualBlock(),
        tied_head=raw.flag("tie_word_embeddings"),
        inner_sizes=tuple(dense if kind == "mlp" else 0 for kind in kinds),
        mixtures=tuple(mixture if kind == "moe" else None for kind in kinds) if mixture else (),
        names=_GGUF_NAMES if raw.is_gguf else _NAMES,
        recurrent=mamba_names(
            raw, "mamba" if raw.is_gguf else "mixer", biased=raw.flag("use_bias")
        ),
    )


_NAMES = LayerNames(
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    mlp_norm="norm",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
)
_GGUF_NAMES = LayerNames(mlp_norm="input_layernorm", gate_up=("mlp.up_proj",))


def _kinds(raw: RawConfig) -> list[str]:
    key = next((key for key in _LISTS if raw.has(key)), _LISTS[0])
    layers = raw.integer("num_hidden_layers", raw.count(key))
    return raw.layer_kinds(key, layers, _KINDS) or []


def _read_mixture(raw: RawConfig, eps: float) -> MixtureSpec:
    """As DeepSeek-V3 chooses, of experts without a gate."""
    groups = raw.integer("n_group", 1)
    router = RouterSpec(
        count=raw.integer("n_routed_experts"),
        used=raw.integer("num_experts_per_tok"),
        eps=eps,
        scoring="sigmoid",
        normalize=raw.flag("norm_topk_prob", default=True),
        scale=raw.number("routed_scaling_factor", 1.0),
        groups=groups,
        used_groups=raw.integer("topk_group", 1),
        group_top=2,
    )
    return MixtureSpec(
        router=router,
        expert=ExpertSpec(activation="relu2"),
        inner=raw.integer("moe_intermediate_size"),
        shared=raw.integer("shared_expert_intermediate_size"),
        choice_bias=True,
        latent=raw.optional_integer("moe_latent_size") or 0,
    )
