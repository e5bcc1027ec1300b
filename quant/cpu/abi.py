"""The compiled kernels' C interface, as ctypes: structs that mirror ``quant/cpu/csrc/abi.h``
field by field.

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
from typing import TYPE_CHECKING, Any

from localrt.common.errors import MissingExtraError

if TYPE_CHECKING:
    from localrt.quant.formats.packed import Format

_ABI_VERSION = 26


def _numbered(names: str, first: int = 0) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split(), first)}


def fields(*members: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """A struct's fields in order: types, and the names of those that have them."""
    return tuple((name, kind) for kind, names in members for name in names.split())


# In the order of abi.h's enums. Sources are rows that the library puts into tiles.
SOURCES = _numbered(
    "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q4_k q5_k q6_k mxfp4 q2_k q3_k iq4_nl iq4_xs tq2_0"
    " iq3_xxs iq3_s iq2_xxs iq2_xs iq2_s iq1_s iq1_m"
)
_LAYOUTS = {
    **_numbered("f32 f16 bf16 int4 int4m int5 int5m int6"),
    **_numbered("int8 int8m", 9),
    **_numbered("q4_k q5_k q6_k mxfp4 nvfp4 nf4 q2_k q3_k iq4_nl iq4_xs tq2_0", 19),
    **_numbered("iq3_xxs iq3_s iq2_xxs iq2_xs iq2_s iq1_s iq1_m", 30),
    **_numbered("int4b int8b int4z int8z nf4-f32 e4m3", 37),
}
ACTIVATIONS = _numbered("silu gelu_tanh swiglu_oai relu2")
VISION_STEPS = _numbered("linear norm rotate gate add attention")
VISION_ACTIVATIONS = _numbered("none gelu gelu_tanh quick_gelu silu")
RECURRENT_KINDS = _numbered("delta ssm conv ngram")
SCORINGS = _numbered("softmax sigmoid softmax-chosen")
# How codes and scales are spaced: affine formats with and without a minimum, others by name.
FAMILIES = _numbered("even even-with-minimum nf4 mxfp4 nvfp4 q3_k q2_k iq4_nl")

# GGUF's rows whose tiles are those of an affine format.
_SAME_TILES = {"q4_0": "int4", "q4_1": "int4m", "q5_0": "int5", "q5_1": "int5m", "q8_0": "int8"}


def layout_of(format_: Format) -> int | None:
    """The kernels' number for a format's tiles; None if unsupported."""
    name = _SAME_TILES.get(format_.name, format_.name)
    kind, dash, group = name.partition("-g")
    return _LAYOUTS.get(kind + group.lstrip("0123456789") if dash else name)


class Matrix(Structure):
    """A tiled weight matrix."""

    _fields_ = fields(
        (c_void_p, "data"),
        (c_int32, "layout rows cols span"),
        (c_float, "scale"),
        (c_int32, "site"),
    )


class LowRankArgs(Structure):
    """What an adapter set adds to the products of one matrix."""

    _fields_ = fields((c_void_p, "a a_scales b factors"), (c_int32, "rank _"))


class LowRankPack(Structure):
    """The inputs for packing a ``LowRankArgs``."""

    _fields_ = fields((c_void_p, "a b"), (c_int32, "rank rows columns"))


class AdapterArgs(Structure):
    """The adapters of a pass's rows."""

    _fields_ = fields((c_void_p, "mixes"), (POINTER(LowRankArgs), "table"), (c_int32, "rows sites"))


class Stack(Structure):
    """Row-stacked matrices of one input."""

    _fields_ = fields((POINTER(Matrix), "parts"), (c_int32, "count rows cols hadamard"))


class SpanArgs(Structure):
    """One sequence of a pass in one layer."""

    _fields_ = fields(
        (c_void_p, "data mask ahead"),
        (c_int64, "stride"),
        (c_int32, "format held rows windows_only extra"),
    )


class AttentionArgs(Structure):
    """Both attention steps of a layer."""

    _fields_ = fields(
        (c_void_p, "x q out norm qkv_bias q_norm k_norm v_norm out_bias post_norm sinks"),
        (c_void_p, "cos sin near_turns far_turns positions chosen spans"),
        (Stack, "qkv proj"),
        (c_int32, "rows span_count heads kv_heads head_dim rotary window joint_norms projections"),
        (c_int32, "gated head_gates norms_last most_chosen"),
        (c_float, "eps scale softcap"),
        (c_void_p, "place_cos place_sin"),
    )


class IndexArgs(Structure):
    """An indexer that chooses tokens."""

    _fields_ = fields(
        (c_void_p, "x chosen q_norm k_norm cos sin block_cos block_sin spans"),
        (Stack, "qk"),
        (c_int32, "rows span_count heads head_dim rotary block budget"),
        (c_float, "eps"),
    )


class LatentArgs(Structure):
    """Both steps of a layer of latent attention."""

    _fields_ = fields(
        (c_void_p, "x q out norm query_norm latent_norm cos sin spans"),
        (Stack, "down query_up key_up value_up proj"),
        (c_int32, "rows span_count heads rotary latent nope value interleaved"),
        (c_float, "eps latent_eps scale"),
    )


class StateSpanArgs(Structure):
    """One sequence of a pass in one recurrent layer."""

    _fields_ = fields(
        (c_void_p, "source target rows_from rows_to parents"),
        (c_int32, "ring_from ring_to position fold held rows extra _"),
    )


class RecurrentArgs(Structure):
    """A recurrent layer."""

    _fields_ = fields(
        (c_void_p, "x out norm conv taps_bias decay decay_bias skip out_norm"),
        (c_void_p, "mix_bias out_bias post_norm mix_scale"),
        (POINTER(StateSpanArgs), "spans"),
        (Stack, "mix proj gate_up decay_up"),
        (c_int32, "rows span_count kind heads key_heads key_size value_size taps width tiled"),
        (c_int32, "channel_decay norm_size norm_width gate_sigmoid gate_first dilation"),
        (c_float, "eps norm_eps strength least_step most_step"),
    )


class MlpArgs(Structure):
    """The gated MLP step."""

    _fields_ = fields(
        (c_void_p, "x out norm post_norm"),
        (Stack, "gate_up down row_gate"),
        (c_int32, "rows activation cut"),
        (c_float, "eps cutoff gate_scale"),
    )


class InputArgs(Structure):
    """A layer's gate on its own inputs."""

    _fields_ = fields(
        (c_void_p, "x inputs out post_norm"),
        (Stack, "gate proj"),
        (c_int32, "rows stride first activation"),
        (c_float, "eps"),
    )


class StreamArgs(Structure):
    """Predicting or correcting residual streams."""

    _fields_ = fields(
        (c_void_p, "streams activated out active norm coefficients scale"),
        (Stack, "router"),
        (c_int32, "rows count which"),
        (c_float, "eps"),
    )


class ConnectionArgs(Structure):
    """Reading several residual streams."""

    _fields_ = fields(
        (c_void_p, "streams out shares norm"),
        (Stack, "down up share"),
        (c_int32, "rows count"),
        (c_float, "eps"),
    )


class NgramArgs(Structure):
    """A layer's hashed n-grams."""

    _fields_ = fields(
        (c_void_p, "streams ngrams tokens key_norm stream_norm value_norm conv"),
        (POINTER(StateSpanArgs), "spans"),
        (Stack, "key value"),
        (c_int32, "rows span_count count taps dilation"),
        (c_float, "eps"),
    )


class RouteArgs(Structure):
    """A mixture's norm and router."""

    _fields_ = fields(
        (c_void_p, "x normed experts scores weights norm gate_bias choice_bias"),
        (c_void_p, "gate_norm expert_scale"),
        (Stack, "gate"),
        (c_int32, "rows used ranked scoring normalize groups used_groups group_top"),
        (c_float, "eps scale"),
    )


class ExpertParts(Structure):
    """An expert of a table; one without parts is not there."""

    _fields_ = fields((Stack, "gate_up down"), (c_void_p, "gate_up_bias down_bias"))


class ExpertArgs(Structure):
    """Experts of a layer, and the rows that chose them."""

    _fields_ = fields(
        (c_void_p, "x slots table chosen asked"),
        (c_int32, "rows used stride count asked_count activation"),
        (c_float, "limit"),
    )


class SearchArgs(Structure):
    """A search for the scales of groups."""

    _fields_ = fields(
        (c_void_p, "groups scales shrinks weights"),
        (c_int64, "count weight_count"),
        (c_int32, "block steps family bits"),
    )


class HeadArgs(Structure):
    """The final norm and vocabulary projection."""

    _fields_ = fields(
        (c_void_p, "x wanted logits norm"),
        (Stack, "weight"),
        (c_int32, "count"),
        (c_float, "eps softcap"),
    )


class VisionArgs(Structure):
    """A step of a vision tower."""

    _fields_ = fields(
        (c_void_p, "x y z out weight bias ends"),
        (Stack, "matrix"),
        (c_int64 * 3, "strides"),
        (c_int32, "rows heads size activation rms segments"),
        (c_float, "eps scale"),
    )


class Step(Structure):
    """A step of a list that ``lrt_run`` runs: a kernel's arguments, or two rows that are added."""

    _fields_ = fields(
        (c_void_p, "args x y"),
        (c_int32, "kind count"),
        (c_float, "scale total"),
    )


STEP_KINDS = {
    "lrt_read_rows": 0,
    "lrt_norm_qkv_rope_append": 1,
    "lrt_attention_output": 2,
    "lrt_norm_gated_mlp": 3,
    "lrt_head": 4,
    "add": 5,
}
"""What a ``Step`` does: a function of the library, or a sum."""


_SIGNATURES = {
    "lrt_abi_version": (c_int, ()),
    "lrt_create": (c_void_p, (c_int, c_char_p)),
    "lrt_destroy": (None, (c_void_p,)),
    "lrt_resize": (c_int, (c_void_p, c_int)),
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
    "lrt_run": (None, (c_void_p, POINTER(Step), c_int)),
    "lrt_linear": (None, (c_void_p, POINTER(Stack), c_void_p, c_int, c_void_p)),
    "lrt_read_rows": (None, (c_void_p, POINTER(Matrix), c_void_p, c_int, c_float, c_void_p)),
    "lrt_search_scales": (None, (c_void_p, POINTER(SearchArgs))),
    "lrt_norm_latent_append": (None, (c_void_p, POINTER(LatentArgs))),
    "lrt_latent_output": (None, (c_void_p, POINTER(LatentArgs))),
    "lrt_norm_rows": (None, (c_void_p, c_void_p, c_int, c_int, c_void_p, c_float)),
    "lrt_project_inputs": (
        None,
        (c_void_p, POINTER(Stack), c_void_p, c_int, c_int, c_void_p, c_float, c_void_p),
    ),
    "lrt_gate_inputs": (None, (c_void_p, POINTER(InputArgs))),
    "lrt_low_rank": (
        None,
        (
            c_void_p,
            POINTER(Stack),
            POINTER(Stack),
            c_void_p,
            c_int,
            c_void_p,
            c_void_p,
            c_float,
            c_void_p,
        ),
    ),
    "lrt_split_streams": (None, (c_void_p, POINTER(Stack), c_void_p, c_int, c_void_p)),
    "lrt_read_streams": (None, (c_void_p, POINTER(ConnectionArgs))),
    "lrt_predict_streams": (None, (c_void_p, POINTER(StreamArgs))),
    "lrt_correct_streams": (None, (c_void_p, POINTER(StreamArgs))),
    "lrt_join_streams": (None, (c_void_p, POINTER(Stack), c_void_p, c_int, c_void_p)),
    "lrt_choose_tokens": (None, (c_void_p, POINTER(IndexArgs))),
    "lrt_add_ngrams": (None, (c_void_p, POINTER(NgramArgs))),
    "lrt_recurrent": (None, (c_void_p, POINTER(RecurrentArgs))),
    "lrt_multiply_peak": (c_double, (c_void_p, c_int)),
    "lrt_read_all": (None, (c_void_p, c_void_p, c_int64)),
    "lrt_set_adapters": (None, (c_void_p, POINTER(AdapterArgs))),
    "lrt_pack_low_rank": (None, (c_void_p, POINTER(LowRankPack), POINTER(LowRankArgs))),
    "lrt_vision": (None, (c_void_p, c_int, POINTER(VisionArgs))),
    "lrt_set_codebook": (None, (c_int, c_int, c_int, c_void_p)),
    "lrt_tile": (None, (c_void_p, c_int, c_void_p, c_int, c_int, c_void_p)),
}


def find_library() -> Path | None:
    """The path of the compiled kernels, or None if they were not built."""
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
    """The code path that the kernels choose on this processor; None if they cannot be used."""
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
