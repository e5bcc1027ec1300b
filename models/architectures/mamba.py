"""Mamba-2 layers, as the configs of several families describe them: no architecture of its own."""

from __future__ import annotations

from localrt.common.errors import CheckpointError
from localrt.models.config import RecurrentNames
from localrt.models.raw_config import RawConfig, positive_number
from localrt.quant.ops.protocol import RecurrentSpec


def read_mamba(raw: RawConfig, *, eps: float, inner: int) -> RecurrentSpec:
    """A layer by ``mamba_*``; ``inner`` is its width. Results are normed by groups of heads."""
    heads, groups = raw.integer("mamba_n_heads"), raw.integer("mamba_n_groups", 1)
    if inner % heads or inner % groups:
        raise CheckpointError(
            f"config mamba_n_heads ({heads}) and mamba_n_groups ({groups}) must divide {inner}"
        )
    limits = raw.sequence("time_step_limit") or []
    least, most = (*limits, None, None)[:2]
    return RecurrentSpec(
        kind="ssm",
        heads=heads,
        key_heads=groups,
        key_size=raw.integer("mamba_d_state", 128),
        value_size=inner // heads,
        taps=raw.integer("mamba_d_conv", 4),
        eps=eps,
        conv_bias=raw.flag("mamba_conv_bias", default=True),
        norm_size=inner // groups,
        gate_first=True,
        time_steps=(positive_number(least) or 0.0, positive_number(most) or float("inf")),
    )


def mamba_names(raw: RawConfig, prefix: str, *, biased: bool) -> RecurrentNames:
    """The tensors below ``prefix``."""
    return RecurrentNames(
        mix=(f"{prefix}.in_proj",),
        taps=(f"{prefix}.conv1d",),
        out=f"{prefix}.out_proj",
        decay=f"{prefix}.{'A' if raw.is_gguf else 'A_log'}",
        decay_is_rate=raw.is_gguf,
        decay_bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        out_norm=f"{prefix}.norm",
        biased=biased,
    )
