"""The compiled kernels' C interface, as ctypes: structs that mirror ``quant/csrc/abi.h``.

Importing it loads nothing, not even numpy; ``load_library`` finds the shared library beside this
package.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.errors import MissingExtraError

if TYPE_CHECKING:
    from localrt.quant.formats.packed import Format

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "SCORINGS",
    "SOURCES",
    "AttentionArgs",
    "ExpertArgs",
    "ExpertParts",
    "HeadArgs",
    "Matrix",
    "MlpArgs",
    "RouteArgs",
    "SearchArgs",
    "SpanArgs",
    "Stack",
    "best_isa",
    "find_library",
    "layout_of",
    "load_library",
]

_ABI_VERSION = 8

# In the order of abi.h's enums. Sources are rows that the library puts into tiles.
SOURCES = {
    name: number
    for number, name in enumerate(
        (
            "f32",
            "f16",
            "bf16",
            "q4_0",
            "q4_1",
            "q5_0",
            "q5_1",
            "q8_0",
            "q4_k",
            "q5_k",
            "q6_k",
            "mxfp4",
        )
    )
}
_AFFINE = [f"int{bits}{m}" for bits in (4, 5, 6, 8) for m in ("", "m")]
_LAYOUTS = {
    name: number
    for number, name in enumerate(
        (
            *("f32", "f16", "bf16"),
            *_AFFINE,
            *(f"{name}-g16" for name in _AFFINE),
            *("q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4", "nf4"),
        )
    )
}
# In the order of abi.h.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}
SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax-chosen": 2}
# How codes and scales are spaced: affine formats with and without a minimum, others by name.
FAMILIES = {"even": 0, "even-with-minimum": 1, "nf4": 2, "mxfp4": 3, "nvfp4": 4}

# GGUF's rows whose tiles are those of an affine format.
_SAME_TILES = {"q4_0": "int4", "q4_1": "int4m", "q5_0": "int5", "q5_1": "int5m", "q8_0": "int8"}


def layout_of(format_: Format) -> int | None:
    """The kernels' number for a format's tiles; None where they do not know it."""
    name = _SAME_TILES.get(format_.name, format_.name)
    kind, dash, group = name.partition("-g")
    if dash:
        name = kind + "m" * group.endswith("m") + "-g16" * (format_.block == 16)
    return _LAYOUTS.get(name)


class Matrix(Structure):
    """A tiled weight matrix."""

    _fields_ = (
        ("data", c_void_p),
        ("layout", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("span", c_int32),
        ("scale", c_float),
        ("unused", c_int32),
    )


class Stack(Structure):
    """Row-stacked matrices of one input."""

    _fields_ = (
        ("parts", POINTER(Matrix)),
        ("count", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("hadamard", c_int32),
    )


class SpanArgs(Structure):
    """One sequence of a pass in one layer."""

    _fields_ = (
        ("data", c_void_p),
        ("mask", c_void_p),
        ("stride", c_int64),
        ("format", c_int32),
        ("held", c_int32),
        ("rows", c_int32),
        ("extra", c_int32),
    )


class AttentionArgs(Structure):
    """Both attention steps of a layer."""

    _fields_ = (
        ("x", c_void_p),
        ("q", c_void_p),
        ("out", c_void_p),
        ("norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("out_bias", c_void_p),
        ("post_norm", c_void_p),
        ("sinks", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("near_turns", c_void_p),
        ("far_turns", c_void_p),
        ("positions", c_void_p),
        ("spans", POINTER(SpanArgs)),
        ("qkv", Stack),
        ("proj", Stack),
        ("rows", c_int32),
        ("span_count", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary", c_int32),
        ("window", c_int32),
        ("joint_norms", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("softcap", c_float),
    )


class MlpArgs(Structure):
    """The gated MLP step."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("norm", c_void_p),
        ("post_norm", c_void_p),
        ("gate_up", Stack),
        ("down", Stack),
        ("row_gate", Stack),
        ("rows", c_int32),
        ("activation", c_int32),
        ("eps", c_float),
    )


class RouteArgs(Structure):
    """A mixture's norm and router."""

    _fields_ = (
        ("x", c_void_p),
        ("normed", c_void_p),
        ("experts", c_void_p),
        ("scores", c_void_p),
        ("weights", c_void_p),
        ("norm", c_void_p),
        ("gate_bias", c_void_p),
        ("choice_bias", c_void_p),
        ("gate", Stack),
        ("rows", c_int32),
        ("used", c_int32),
        ("ranked", c_int32),
        ("scoring", c_int32),
        ("normalize", c_int32),
        ("groups", c_int32),
        ("used_groups", c_int32),
        ("group_top", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    )


class ExpertParts(Structure):
    """An expert of a table; one without parts is not there."""

    _fields_ = (
        ("gate_up", Stack),
        ("down", Stack),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
    )


class ExpertArgs(Structure):
    """Experts of a layer, and the rows that chose them."""

    _fields_ = (
        ("x", c_void_p),
        ("slots", c_void_p),
        ("table", c_void_p),
        ("chosen", c_void_p),
        ("asked", c_void_p),
        ("rows", c_int32),
        ("used", c_int32),
        ("stride", c_int32),
        ("count", c_int32),
        ("asked_count", c_int32),
        ("activation", c_int32),
        ("limit", c_float),
    )


class SearchArgs(Structure):
    """A search for the scales of groups."""

    _fields_ = (
        ("groups", c_void_p),
        ("scales", c_void_p),
        ("shrinks", c_void_p),
        ("count", c_int64),
        ("block", c_int32),
        ("steps", c_int32),
        ("family", c_int32),
        ("bits", c_int32),
    )


class HeadArgs(Structure):
    """The final norm and vocabulary projection."""

    _fields_ = (
        ("x", c_void_p),
        ("wanted", c_void_p),
        ("logits", c_void_p),
        ("norm", c_void_p),
        ("weight", Stack),
        ("count", c_int32),
        ("eps", c_float),
        ("softcap", c_float),
    )


_SIGNATURES = {
    "lrt_abi_version": (c_int, ()),
    "lrt_create": (c_void_p, (c_int, c_char_p)),
    "lrt_destroy": (None, (c_void_p,)),
    "lrt_isa": (c_char_p, (c_void_p,)),
    "lrt_norm_qkv_rope_append": (None, (c_void_p, POINTER(AttentionArgs))),
    "lrt_attention_output": (None, (c_void_p, POINTER(AttentionArgs))),
    "lrt_norm_gated_mlp": (None, (c_void_p, POINTER(MlpArgs))),
    "lrt_norm_route": (None, (c_void_p, POINTER(RouteArgs))),
    "lrt_run_experts": (c_int, (c_void_p, POINTER(ExpertArgs))),
    "lrt_combine_experts": (
        None,
        (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p),
    ),
    "lrt_head": (None, (c_void_p, POINTER(HeadArgs))),
    "lrt_linear": (None, (c_void_p, POINTER(Stack), c_void_p, c_int, c_void_p)),
    "lrt_read_rows": (None, (c_void_p, POINTER(Matrix), c_void_p, c_int, c_float, c_void_p)),
    "lrt_search_scales": (None, (c_void_p, POINTER(SearchArgs))),
    "lrt_norm_latent_append": (None, (c_void_p, c_void_p)),
    "lrt_latent_output": (None, (c_void_p, c_void_p)),
    "lrt_multiply_peak": (c_double, (c_void_p, c_int)),
    "lrt_read_all": (None, (c_void_p, c_void_p, c_int64)),
    "lrt_tile": (None, (c_void_p, c_int, c_void_p, c_int, c_int, c_void_p)),
}


def find_library() -> Path | None:
    """The compiled kernels, or None where they were not built."""
    folder = Path(__file__).parent
    names = [f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((path for name in names if (path := folder / name).is_file()), None)


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """The library at ``path``, with its functions typed.

    Raises:
        MissingExtraError: it cannot be loaded, or belongs to another version of localrt.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, list(arguments)
    except (OSError, AttributeError) as error:
        raise MissingExtraError(
            f"the compiled kernels cannot be loaded ({error}): install localrt again"
        ) from error
    if library.lrt_abi_version() != _ABI_VERSION:
        raise MissingExtraError(
            "the compiled kernels are of another version: install localrt again"
        )
    return library


def best_isa() -> str | None:
    """The code path that the kernels choose on this processor; None where they cannot be used."""
    path = find_library()
    if path is None:
        return None
    try:
        library = load_library(path)
    except MissingExtraError:
        return None
    handle = library.lrt_create(1, b"")
    name: bytes = library.lrt_isa(handle)
    library.lrt_destroy(handle)
    return name.decode()
