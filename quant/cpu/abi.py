"""The compiled kernels' C interface, as ctypes.

Structs and functions are declared once, in C++: they are read from ``csrc/abi.h`` and
``csrc/library.cpp``.

Importing it loads no library, not even numpy; ``load_library`` finds the shared library beside this
package.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
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
from typing import TYPE_CHECKING, Any, TypeVar

from localrt.common.errors import MissingExtraError

if TYPE_CHECKING:
    from localrt.quant.formats.packed import Format

_FOLDER = Path(__file__).parent
_Struct = TypeVar("_Struct", bound=Structure)


def fields(*members: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """A struct's fields in order: types, and the names of those that have them."""
    return tuple((name, kind) for kind, names in members for name in names.split())


# -- reading C++ -----------------------------------------------------------------------------------

_SOURCE = re.sub(
    "//.*", "", "".join((_FOLDER / "csrc" / name).read_text() for name in ("abi.h", "library.cpp"))
)
_VERSION = int(re.findall(r"lrt_abi_version\(\) { return (\d+); }", _SOURCE)[0])
# What is between the braces of structs and enums.
_BODIES = dict(re.findall(r"^(?:struct|enum) (\w+)[^;{]*{([^}]*)};", _SOURCE, re.MULTILINE))
_FUNCTION = re.compile(r"LRT_API ([\w *]+?)(\w+)\(([^)]*)\)")
_DECLARED = re.compile(r"\s*(?:const )?(\w+)(.+)", re.DOTALL)
_DECLARATOR = re.compile(r"(\*?) *(\w+)(?:\[(\d+)\])?")
_TYPES: dict[str, Any] = {
    "void": None,
    "int": c_int,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "float": c_float,
    "double": c_double,
}


def _numbers(enum: str, names: str) -> dict[str, int]:
    """The numbers of ``enum``, by our names for its members in their order."""
    numbers: list[int] = []
    for member in _BODIES[enum].split(","):
        _, _, number = member.partition("=")
        numbers.append(int(number) if number else numbers[-1] + 1 if numbers else 0)
    return dict(zip(names.split(), numbers, strict=True))


def _declared(declaration: str) -> list[tuple[str, Any]]:
    """Names and types of fields or of a parameter, such as ``const float *x, *y``."""
    kind, declarators = _DECLARED.findall(declaration)[0]
    address = c_char_p if kind == "char" else c_void_p
    found = []
    for star, name, count in _DECLARATOR.findall(declarators):
        type_ = address if star else _TYPES[kind]
        found.append((name, type_ * int(count) if count else type_))
    return found


def _parameter(declaration: str) -> Any:
    """The type of a parameter: a struct is passed as it is where a pointer to one is declared."""
    kind = _DECLARED.findall(declaration)[0][0]
    return POINTER(_TYPES[kind]) if kind in _BODIES else _declared(declaration)[0][1]


def _in_header(name: str) -> Callable[[type[_Struct]], type[_Struct]]:
    """Give a class the fields of the struct ``name``, whose own structs come first."""

    def define(struct: type[_Struct]) -> type[_Struct]:
        declarations = _BODIES[name].split(";")[:-1]
        struct._fields_ = [field for each in declarations for field in _declared(each)]
        _TYPES[name] = struct
        return struct

    return define


# -- enums and structs -----------------------------------------------------------------------------

# Sources are rows that the library puts into tiles.
SOURCES = _numbers(
    "Source",
    "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q4_k q5_k q6_k mxfp4 q2_k q3_k iq4_nl iq4_xs tq2_0"
    " iq3_xxs iq3_s iq2_xxs iq2_xs iq2_s iq1_s iq1_m",
)
_LAYOUTS = _numbers(
    "Layout",
    "f32 f16 bf16 int4 int4m int5 int5m int6 int8 int8m q4_k q5_k q6_k mxfp4 nvfp4 nf4 q2_k q3_k"
    " iq4_nl iq4_xs tq2_0 iq3_xxs iq3_s iq2_xxs iq2_xs iq2_s iq1_s iq1_m"
    " int4b int8b int4z int8z nf4-f32 e4m3",
)
ACTIVATIONS = _numbers("Activation", "silu gelu_tanh swiglu_oai relu2")
VISION_STEPS = _numbers("VisionStep", "linear norm rotate gate add attention")
VISION_ACTIVATIONS = _numbers("VisionActivation", "none gelu gelu_tanh quick_gelu silu")
RECURRENT_KINDS = _numbers("RecurrentKind", "delta ssm conv ngram")
SCORINGS = _numbers("Scoring", "softmax sigmoid softmax-chosen")
# How codes and scales are spaced: affine formats with and without a minimum, others by name.
FAMILIES = _numbers("Family", "even even-with-minimum nf4 mxfp4 nvfp4 q3_k q2_k iq4_nl")
STEP_KINDS = _numbers(
    "StepKind",
    "lrt_read_rows lrt_norm_qkv_rope_append lrt_attention_output lrt_norm_gated_mlp lrt_head add",
)
"""What a ``Step`` does: a function of the library, or a sum."""

# GGUF's rows whose tiles are those of an affine format.
_SAME_TILES = {"q4_0": "int4", "q4_1": "int4m", "q5_0": "int5", "q5_1": "int5m", "q8_0": "int8"}


def layout_of(format_: Format) -> int | None:
    """The kernels' number for a format's tiles; None if unsupported."""
    name = _SAME_TILES.get(format_.name, format_.name)
    kind, dash, group = name.partition("-g")
    return _LAYOUTS.get(kind + group.lstrip("0123456789") if dash else name)


@_in_header("Matrix")
class Matrix(Structure):
    """A tiled weight matrix."""


@_in_header("LowRank")
class LowRankArgs(Structure):
    """What an adapter set adds to the products of one matrix."""


@_in_header("LowRankPack")
class LowRankPack(Structure):
    """The inputs for packing a ``LowRankArgs``."""


@_in_header("AdapterArgs")
class AdapterArgs(Structure):
    """The adapters of a pass's rows."""


@_in_header("Stack")
class Stack(Structure):
    """Row-stacked matrices of one input."""


@_in_header("Span")
class SpanArgs(Structure):
    """One sequence of a pass in one layer."""


@_in_header("AttentionArgs")
class AttentionArgs(Structure):
    """Both attention steps of a layer."""


@_in_header("IndexArgs")
class IndexArgs(Structure):
    """An indexer that chooses tokens."""


@_in_header("LatentArgs")
class LatentArgs(Structure):
    """Both steps of a layer of latent attention."""


@_in_header("StateSpan")
class StateSpanArgs(Structure):
    """One sequence of a pass in one recurrent layer."""


@_in_header("RecurrentArgs")
class RecurrentArgs(Structure):
    """A recurrent layer."""


@_in_header("MlpArgs")
class MlpArgs(Structure):
    """The gated MLP step."""


@_in_header("InputArgs")
class InputArgs(Structure):
    """A layer's gate on its own inputs."""


@_in_header("StreamArgs")
class StreamArgs(Structure):
    """Predicting or correcting residual streams."""


@_in_header("ConnectionArgs")
class ConnectionArgs(Structure):
    """Reading several residual streams."""


@_in_header("NgramArgs")
class NgramArgs(Structure):
    """A layer's hashed n-grams."""


@_in_header("RouteArgs")
class RouteArgs(Structure):
    """A mixture's norm and router."""


@_in_header("Expert")
class ExpertParts(Structure):
    """An expert of a table; one without parts is not there."""


@_in_header("ExpertArgs")
class ExpertArgs(Structure):
    """Experts of a layer, and the rows that chose them."""


@_in_header("SearchArgs")
class SearchArgs(Structure):
    """A search for the scales of groups."""


@_in_header("HeadArgs")
class HeadArgs(Structure):
    """The final norm and vocabulary projection."""


@_in_header("VisionArgs")
class VisionArgs(Structure):
    """A step of a vision tower."""


@_in_header("Step")
class Step(Structure):
    """A step of a list that ``lrt_run`` runs: a kernel's arguments, or two rows that are added."""


def find_library() -> Path | None:
    """The path of the compiled kernels, or None if they were not built."""
    names = [f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((path for name in names if (path := _FOLDER / name).is_file()), None)


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """The library at ``path``, with its functions typed.

    Raises:
        MissingExtraError: it cannot be loaded, or belongs to another version of localrt.
    """
    try:
        library = ctypes.CDLL(str(path))
        for result, name, parameters in _FUNCTION.findall(_SOURCE):
            function = getattr(library, name)
            function.restype = _declared(f"{result} result")[0][1]
            each = parameters.split(",") if parameters else []
            function.argtypes = list(map(_parameter, each))
    except (OSError, AttributeError) as error:
        raise MissingExtraError(
            f"the compiled kernels cannot be loaded ({error}): install localrt again"
        ) from error
    if library.lrt_abi_version() != _VERSION:
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
