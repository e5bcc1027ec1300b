"""Other libraries' 4-bit weights, as the float32 values that their own dequantizers give.

bitsandbytes (NF4 and FP4, blocks of 64; ``-dq`` quantizes the scales too) and hqq (affine, a scale
and a zero per group). None of them calibrates. It knows one matrix at a time, and no model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import MissingExtraError

__all__ = ["PEERS", "Restored", "peer_package"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Restored:
    """What is left of a weight, and the bytes that it takes, scales included."""

    values: Floats
    nbytes: int


def peer_package(name: str) -> str:
    """The package that makes a peer's weights."""
    return "bitsandbytes" if name.startswith("bnb-") else "hqq"


def _bitsandbytes(kind: str, nested: bool) -> Callable[[Floats], Restored]:
    def restore(values: Floats) -> Restored:
        torch, functional = _import("bitsandbytes.functional")
        packed, state = functional.quantize_4bit(
            torch.from_numpy(values), blocksize=64, quant_type=kind, compress_statistics=nested
        )
        parts = [packed, state.absmax]
        if nested:  # 8-bit scales, one float32 per 256 of them
            parts.append(state.state2.absmax)
        nbytes = sum(part.numel() * part.element_size() for part in parts)
        return Restored(functional.dequantize_4bit(packed, state).float().numpy(), nbytes)

    return restore


def _hqq(group: int) -> Callable[[Floats], Restored]:
    def restore(values: Floats) -> Restored:
        torch, quantize = _import("hqq.core.quantize")
        options = {"nbits": 4, "group_size": group, "axis": 1, "device": "cpu"}
        packed, meta = quantize.Quantizer.quantize(torch.from_numpy(values.copy()), **options)
        for part in ("scale", "zero"):  # it stores both in half precision
            meta[part] = meta[part].half().float()
        meta["compute_dtype"] = torch.float32
        restored = quantize.Quantizer.dequantize(packed, meta)
        nbytes = packed.numel() + 2 * (meta["scale"].numel() + meta["zero"].numel())
        return Restored(restored.numpy(), nbytes)

    return restore


def _import(name: str) -> tuple[Any, Any]:
    from importlib import import_module

    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # what it misses is for GPUs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of imports that are not ours
            return import_module("torch"), import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"{name.partition('.')[0]} cannot be imported: {error}") from error


PEERS: Mapping[str, Callable[[Floats], Restored]] = MappingProxyType(
    {
        "bnb-nf4": _bitsandbytes("nf4", False),
        "bnb-nf4-dq": _bitsandbytes("nf4", True),
        "bnb-fp4": _bitsandbytes("fp4", False),
        "hqq-g64": _hqq(64),
        "hqq-g32": _hqq(32),
    }
)
"""By name: a matrix (out, in), float32, to what the library leaves of it."""
