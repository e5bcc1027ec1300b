"""Latent attention through the compiled kernels: its struct, and what is checked beforehand.

Mirrors ``quant/csrc/latent_args.h``. The cache of a latent layer has formats of its own, in which a
row is key and value at once: ``cache_format`` says which. It allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_void_p

from localrt.errors import OptionError
from localrt.quant.ops.latent import LatentSpec
from localrt.quant.ops.native.abi import SpanArgs, Stack
from localrt.quant.ops.native.kv import LATENT_FORMATS, KVFormat
from localrt.quant.ops.protocol import AttentionSpec

__all__ = ["LatentArgs", "cache_format", "kernels_fit"]

_WIDEST = 512  # latents, and rotary numbers: quant/csrc/kv.h's MAX_HEAD


class LatentArgs(Structure):
    """Both steps of a layer."""

    _fields_ = (
        ("x", c_void_p),
        ("q", c_void_p),
        ("out", c_void_p),
        ("norm", c_void_p),
        ("query_norm", c_void_p),
        ("latent_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("spans", POINTER(SpanArgs)),
        ("down", Stack),
        ("query_up", Stack),
        ("key_up", Stack),
        ("value_up", Stack),
        ("proj", Stack),
        ("rows", c_int32),
        ("span_count", c_int32),
        ("heads", c_int32),
        ("rotary", c_int32),
        ("latent", c_int32),
        ("nope", c_int32),
        ("value", c_int32),
        ("interleaved", c_int32),
        ("eps", c_float),
        ("latent_eps", c_float),
        ("scale", c_float),
    )


def cache_format(layers: Sequence[AttentionSpec], kv_format: KVFormat) -> KVFormat:
    """The format of the layers' cache where ``kv_format`` is asked for, or has been given before.

    Raises:
        OptionError: latents are not kept in so few bits.
    """
    if not any(isinstance(spec, LatentSpec) for spec in layers):
        return kv_format
    if kv_format in LATENT_FORMATS.values():
        return kv_format
    if kv_format not in LATENT_FORMATS:
        raise OptionError(
            f"kv_format {kv_format} is not for latent attention, whose cache is small as it is: "
            f"use {' or '.join(LATENT_FORMATS)}"
        )
    return LATENT_FORMATS[kv_format]


def kernels_fit(spec: LatentSpec) -> bool:
    """Whether the kernels can do it: whole tiles of 16 everywhere."""
    sizes = (spec.rope_dim, spec.latent, spec.value, spec.nope)
    return all(size % 16 == 0 for size in sizes) and max(spec.rope_dim, spec.latent) <= _WIDEST
