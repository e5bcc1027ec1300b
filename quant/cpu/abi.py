"""The compiled kernels' C interface, as ctypes.

Structs and functions are declared once, in C++: they are read from ``csrc/abi.h`` and
``csrc/library.cpp``.

Importing it loads no library, not even numpy; ``load_library`` finds the shared library beside this
package.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, Structure
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.common.errors import MissingExtraError
from localrt.quant.declarations import Declarations

if TYPE_CHECKING:
    from localrt.quant.formats.packed import Format

_FOLDER = Path(__file__).parent
CPP = Declarations(
    "".join((_FOLDER / "csrc" / name).read_text("utf-8") for name in ("abi.h", "library.cpp"))
)
_VERSION = int(re.findall(r"lrt_abi_version\(\) { return (\d+); }", CPP.text)[0])
_FUNCTION = re.compile(r"LRT_API ([\w *]+?)(\w+)\(([^)]*)\)")

CONSTANTS = CPP.constants
_LAYOUTS = CPP.numbers(
    "Layout",
    "f32 f16 bf16 int4 int4m int5 int5m int6 int8 int8m q4_k q5_k q6_k mxfp4 nvfp4 nf4 q2_k q3_k"
    " iq4_nl iq4_xs tq2_0 iq3_xxs iq3_s iq2_xxs iq2_xs iq2_s iq1_s iq1_m"
    " int4b int8b int4z int8z nf4-f32 e4m3 fp4-f32",
)
ACTIVATIONS = CPP.numbers("Activation", "silu gelu_tanh swiglu_oai relu2 xielu swiglu")
CACHE_FORMATS = CPP.numbers("KvFormat", "bf16 int8 int4 latent-bf16 latent-int8")
VISION_STEPS = CPP.numbers("VisionStep", "linear norm rotate gate add attention")
VISION_ACTIVATIONS = CPP.numbers("VisionActivation", "none gelu gelu_tanh quick_gelu silu")
RECURRENT_KINDS = CPP.numbers("RecurrentKind", "delta ssm conv ngram")
SCORINGS = CPP.numbers("Scoring", "softmax sigmoid softmax-chosen sqrt-softplus")
# How codes and scales are spaced: affine formats with and without a minimum, others by name.
FAMILIES = CPP.numbers("Family", "even even-with-minimum nf4 mxfp4 nvfp4 q3_k q2_k iq4_nl")
STEP_KINDS = CPP.numbers(
    "StepKind",
    "lrt_read_rows lrt_norm_qkv_rope_append lrt_attention_output lrt_norm_latent_append"
    " lrt_latent_output lrt_recurrent lrt_norm_gated_mlp lrt_norm_route lrt_run_experts"
    " lrt_combine_experts lrt_norm_rows lrt_head add",
)
"""What a ``Step`` does: a function of the library, or a sum."""

# GGUF's rows whose tiles are those of an affine format.
_SAME_TILES = {"q4_0": "int4", "q4_1": "int4m", "q5_0": "int5", "q5_1": "int5m", "q8_0": "int8"}


def layout_of(format_: Format) -> int | None:
    """The kernels' number for a format's tiles; None if unsupported."""
    name = _SAME_TILES.get(format_.name, format_.name)
    kind, dash, group = name.partition("-g")
    return _LAYOUTS.get(kind + group.lstrip("0123456789") if dash else name)


@CPP.struct("Matrix")
class Matrix(Structure):
    """A tiled weight matrix."""


@CPP.struct("LowRank")
class LowRankArgs(Structure):
    """What an adapter set adds to the products of one matrix."""


@CPP.struct("LowRankPack")
class LowRankPack(Structure):
    """The inputs for packing a ``LowRankArgs``."""


@CPP.struct("AdapterArgs")
class AdapterArgs(Structure):
    """The adapters of a pass's rows."""


@CPP.struct("Stack")
class Stack(Structure):
    """Row-stacked matrices of one input."""


@CPP.struct("Span")
class SpanArgs(Structure):
    """One sequence of a pass in one layer."""


@CPP.struct("AttentionArgs")
class AttentionArgs(Structure):
    """Both attention steps of a layer."""


@CPP.struct("IndexArgs")
class IndexArgs(Structure):
    """An indexer that chooses tokens."""


@CPP.struct("LatentArgs")
class LatentArgs(Structure):
    """Both steps of a layer of latent attention."""


@CPP.struct("StateSpan")
class StateSpanArgs(Structure):
    """One sequence of a pass in one recurrent layer."""


@CPP.struct("RecurrentArgs")
class RecurrentArgs(Structure):
    """A recurrent layer."""


@CPP.struct("MlpArgs")
class MlpArgs(Structure):
    """The gated MLP step."""


@CPP.struct("InputArgs")
class InputArgs(Structure):
    """A layer's gate on its own inputs."""


@CPP.struct("ConnectionArgs")
class ConnectionArgs(Structure):
    """Reading several residual streams."""


@CPP.struct("NgramArgs")
class NgramArgs(Structure):
    """A layer's hashed n-grams."""


@CPP.struct("RouteArgs")
class RouteArgs(Structure):
    """A mixture's norm and router."""


@CPP.struct("Expert")
class ExpertParts(Structure):
    """An expert of a table; one without parts is not there."""


@CPP.struct("ExpertArgs")
class ExpertArgs(Structure):
    """Experts of a layer, and the rows that chose them."""


@CPP.struct("CombineArgs")
class CombineArgs(Structure):
    """The sum of experts' results."""


@CPP.struct("NormArgs")
class NormArgs(Structure):
    """A norm in place."""


@CPP.struct("SharedLayer")
class SharedLayer(Structure):
    """A layer whose experts a GPU computes too."""


@CPP.struct("SearchArgs")
class SearchArgs(Structure):
    """A search for the scales of groups."""


@CPP.struct("HeadArgs")
class HeadArgs(Structure):
    """The final norm and vocabulary projection."""


@CPP.struct("VisionArgs")
class VisionArgs(Structure):
    """A step of a vision encoder."""


@CPP.struct("Step")
class Step(Structure):
    """A step of a list that ``lrt_run`` runs: a kernel's arguments, or two rows that are added."""


def _parameter(declaration: str) -> object:
    """A parameter's type: where a pointer to a struct is declared, the struct itself is passed."""
    struct = CPP.structs.get(declaration.replace("const ", "").strip().partition("*")[0])
    return POINTER(struct) if struct else CPP.declared(declaration)[0][1]


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
        for result, name, parameters in _FUNCTION.findall(CPP.text):
            function = getattr(library, name)
            function.restype = CPP.declared(f"{result} result")[0][1]
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
    if not handle:  # a checkout's own kernels, on another processor
        return None
    name: bytes = library.lrt_isa(handle)
    library.lrt_destroy(handle)
    return name.decode()
