"""What the configs of mixtures have in common: how many experts, how they are chosen, where.

Keys are Hugging Face's, defaults each architecture's own. It knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from localrt.common.errors import CheckpointError
from localrt.models.config import DecoderConfig, MixtureSpec
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.experts import ExpertSpec, RouterSpec, Scoring

SCORING: Mapping[str, Scoring] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "softmax-chosen": "softmax-chosen",
}
_COUNT_KEYS = ("num_experts", "num_local_experts", "moe_num_experts")
_USED_KEYS = ("num_experts_per_tok", "moe_k")


def expert_count_key(raw: RawConfig) -> str:
    """The key that tells the number of a layer's experts."""
    return next((key for key in _COUNT_KEYS if raw.has(key)), _COUNT_KEYS[0])


def read_mixture(
    raw: RawConfig,
    config: DecoderConfig,
    *,
    scoring: Scoring = "softmax",
    normalize: bool = True,
    inner: int | None = None,
) -> MixtureSpec:
    """The mixture of every sparse layer, without shared experts.

    ``scoring`` and ``normalize`` are the defaults; ``inner`` is an expert's width where it is not
    the config's ``intermediate_size``.

    Raises:
        ValueError: more experts are used than there are.
    """
    used = next((key for key in _USED_KEYS if raw.has(key)), _USED_KEYS[0])
    router = RouterSpec(
        count=raw.integer(expert_count_key(raw)),
        used=raw.integer(used),
        eps=config.norm_eps,
        scoring=raw.choice("scoring_func", scoring, SCORING),
        normalize=raw.flag("norm_topk_prob", normalize),
    )
    expert = ExpertSpec(activation=config.mlp.activation)
    return MixtureSpec(router=router, expert=expert, inner=inner or config.intermediate_size)


def sparse_layers(raw: RawConfig, layers: int) -> list[bool]:
    """Qwen's ``mlp_only_layers`` and ``decoder_sparse_step``: which layers are mixtures."""
    step = raw.integer("decoder_sparse_step", 1)
    dense = raw.sequence("mlp_only_layers") or []
    if any(type(layer) is not int for layer in dense):
        raise CheckpointError(f"config mlp_only_layers must be a list of layers, is {dense!r:.60}")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def with_mixture(
    config: DecoderConfig, spec: MixtureSpec, sparse: Sequence[bool] | None = None
) -> DecoderConfig:
    """``config`` with the mixture in the layers that are ``sparse``; None means in all."""
    chosen = sparse if sparse is not None else [True] * config.layers
    return replace(config, mixtures=tuple(spec if here else None for here in chosen))
