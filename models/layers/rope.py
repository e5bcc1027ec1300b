"""Rotary frequencies of every scaling that the known architectures use, in float64.

Formulas: RoPE (Su et al. 2021), position interpolation (Chen et al. 2023), NTK-aware "dynamic",
YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3.1's and Gemma 4's proportional one;
parameters as Hugging Face configs name them. It does not know how the rotation is computed
(``quant/ops``).

Scalings that depend on length use the context size, not the current length, so that keys in the
cache stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.raw_config import RawConfig, positive_number
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.mathematics import log, power

Frequencies = npt.NDArray[np.float64]


def read_rope(
    raw: RawConfig,
    head_dim: int,
    *,
    parameters: Mapping[str, object] | None = None,
    default_theta: float = 10_000.0,
) -> Rope:
    """Read a config's rotary embedding.

    ``parameters`` replaces the config's own ``rope_scaling`` (and may have ``rope_theta``) where
    layers differ. LongRoPE and dynamic scaling follow ``raw.context``.
    """
    if parameters is None:
        parameters = raw.mapping("rope_scaling")
    theta = scaling_number(parameters, "rope_theta", raw.number("rope_theta", default_theta))
    if theta <= 1:
        raise CheckpointError(f"rope_theta must be above 1, is {theta}")
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    share = scaling_number(
        parameters, "partial_rotary_factor", raw.number("partial_rotary_factor", 1.0)
    )
    if kind == "proportional":
        return _proportional(head_dim, theta, share)
    dim = raw.optional_integer("rope_dim") or int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise CheckpointError(f"rotary size must be even and at most {head_dim}, is {dim}")
    with np.errstate(all="ignore"):  # the results are checked below
        inv_freq, scale = _scaled(raw, parameters, kind, theta, dim)
        # float32, as in Hugging Face, which models were trained with
        rounded = inv_freq.astype(np.float32)
    if not (np.isfinite(rounded).all() and math.isfinite(scale)):
        raise CheckpointError(
            f"rotary scaling {kind!r} has numbers that are too large or too small"
        )
    sections = _sections(raw, parameters, len(rounded))
    return Rope(tuple(float(f) for f in rounded), scale, sections)


def read_kind(
    raw: RawConfig, head_dim: int, kind: str, defaults: Mapping[str, Mapping[str, object]]
) -> Rope:
    """Read the rotary embedding of one kind of layers, which ``rope_parameters`` name."""
    given = raw.mapping("rope_parameters").get(kind)
    parameters = given if isinstance(given, Mapping) else defaults[kind]
    return read_rope(raw, head_dim, parameters={"partial_rotary_factor": 1.0, **parameters})


def _sections(raw: RawConfig, parameters: Mapping[str, object], pairs: int) -> tuple[int, ...]:
    """The axis of each of the ``pairs``, if they have any.

    They are three parts; in Qwen3-VL and later they take turns as far as height's and width's go.
    """
    counts = parameters.get("mrope_section")
    if counts is None:
        return ()
    if not isinstance(counts, list) or len(counts) != 3 or any(type(n) is not int for n in counts):
        raise CheckpointError(f"mrope_section must be three integers, is {counts!r:.60}")
    if raw.architecture.lower().startswith(("qwen2", "paddleocr", "glm")):
        if sum(counts) != pairs or min(counts) < 0:
            raise CheckpointError(f"mrope_section must add up to {pairs}, is {counts}")
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    return tuple(n % 3 if n < 3 * counts[n % 3] else 0 for n in range(pairs))


def _proportional(head_dim: int, theta: float, share: float) -> Rope:
    """A share of all pairs rotates, with unchanged frequencies; the others do not rotate."""
    if not 0 < share <= 1 or head_dim % 2:
        raise CheckpointError(
            f"partial_rotary_factor must be above 0 and at most 1 of an even head size, is {share} "
            f"of {head_dim}"
        )
    turning = int(share * head_dim // 2)
    inv_freq = np.zeros(head_dim // 2)
    inv_freq[:turning] = power(theta, -2 * np.arange(turning) / head_dim)
    return Rope(tuple(float(f) for f in inv_freq.astype(np.float32)))


def _scaled(
    raw: RawConfig, parameters: Mapping[str, object], kind: str, theta: float, dim: int
) -> tuple[Frequencies, float]:
    """The frequencies of ``dim`` rotary dimensions, and the factor of queries and keys."""
    exponents = -np.arange(0, dim, 2) / dim
    plain, scale = power(theta, exponents), 1.0
    if kind in ("default", "mrope"):  # in text, M-RoPE's three positions of a token are equal
        inv_freq = plain
    elif kind == "linear":
        inv_freq = plain / scaling_number(parameters, "factor")
    elif kind == "dynamic":
        inv_freq = power(_dynamic(raw, parameters, theta, dim), exponents)
    elif kind == "llama3":
        inv_freq = _llama3(raw, parameters, plain)
    elif kind == "yarn":
        inv_freq, scale = _yarn(raw, parameters, theta, plain)
    elif kind in ("longrope", "su"):
        inv_freq, scale = _longrope(raw, parameters, plain)
    else:
        raise UnsupportedModelError(
            f"rotary scaling {kind!r} is not supported "
            "(known: default, linear, dynamic, llama3, yarn, longrope)"
        )
    factors = raw.vector("rope_freqs.weight")  # GGUF carries Llama 3's scaling as divisors
    if factors is not None and kind in ("default", "llama3"):
        if len(factors) < dim // 2:
            raise CheckpointError(f"rope_freqs.weight has {len(factors)} numbers for {dim // 2}")
        inv_freq = plain / factors[: dim // 2]
    return np.asarray(inv_freq), scale


def scaling_number(
    parameters: Mapping[str, object], key: str, default: float | None = None
) -> float:
    """A number among the parameters.

    Raises:
        CheckpointError: there is none, or it is not finite and above 0.
    """
    value = parameters.get(key)
    if value is None:
        value = default
    if (number := positive_number(value)) is None:
        raise CheckpointError(f"rotary scaling needs a number above 0 for {key}, has {value!r:.60}")
    return number


def _original_context(raw: RawConfig, parameters: Mapping[str, object]) -> float:
    key = "original_max_position_embeddings"
    if raw.optional_integer(key):  # takes precedence over the parameters' own
        parameters = {key: raw.integer(key)}
    original = scaling_number(parameters, key, raw.integer("max_position_embeddings"))
    if original < 2:  # its logarithm is a divisor
        raise CheckpointError(f"original_max_position_embeddings must be 2 or more, is {original}")
    return original


def _dynamic(raw: RawConfig, parameters: Mapping[str, object], theta: float, dim: int) -> float:
    """The base frequency, which grows with the context."""
    if dim == 2:
        raise CheckpointError("dynamic rotary scaling needs more than 2 rotary dimensions")
    trained = raw.integer("max_position_embeddings")
    used = max(raw.context or trained, trained)
    factor = scaling_number(parameters, "factor")
    return theta * float(power(factor * used / trained - (factor - 1), dim / (dim - 2)))


def _llama3(raw: RawConfig, parameters: Mapping[str, object], inv_freq: Frequencies) -> Frequencies:
    factor = scaling_number(parameters, "factor")
    low = scaling_number(parameters, "low_freq_factor", 1.0)
    high = scaling_number(parameters, "high_freq_factor", 4.0)
    original = _original_context(raw, parameters)
    wavelength = 2 * math.pi / inv_freq
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - smooth) * inv_freq / factor + smooth * inv_freq)


def _yarn(
    raw: RawConfig, parameters: Mapping[str, object], theta: float, inv_freq: Frequencies
) -> tuple[Frequencies, float]:
    dim = 2 * len(inv_freq)
    original = _original_context(raw, parameters)
    factor = scaling_number(parameters, "factor", raw.integer("max_position_embeddings") / original)
    scale = _yarn_scale(parameters, factor)

    def correction(rotations: float) -> float:
        return float(dim * log(original / (rotations * 2 * math.pi)) / (2 * log(theta)))

    low = correction(scaling_number(parameters, "beta_fast", 32.0))
    high = correction(scaling_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high > low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / span, 0.0, 1.0)
    return np.asarray(inv_freq / factor * ramp + inv_freq * (1 - ramp)), scale


def _yarn_scale(parameters: Mapping[str, object], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return scaling_number(parameters, "attention_factor")

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        every = yarn_mscale(factor, scaling_number(parameters, "mscale_all_dim"))
        return yarn_mscale(factor, scaling_number(parameters, "mscale")) / every
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's factor for a context extended by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * float(log(factor)) + 1.0


def _longrope(
    raw: RawConfig, parameters: Mapping[str, object], inv_freq: Frequencies
) -> tuple[Frequencies, float]:
    trained = raw.integer("max_position_embeddings")
    original = _original_context(raw, parameters)
    name = "long" if (raw.context or trained) > original else "short"
    factors = _listed(parameters.get(f"{name}_factor"))
    if factors is None:
        factors = raw.vector(f"rope_factors_{name}.weight")
    if factors is None or factors.shape != inv_freq.shape:
        raise CheckpointError(f"longrope needs {len(inv_freq)} numbers as {name}_factor")
    stretch = scaling_number(parameters, "factor", trained / original)
    if raw.has("original_max_position_embeddings"):
        stretch = trained / original
    if parameters.get("attention_factor") is not None:
        scale = scaling_number(parameters, "attention_factor")
    else:
        scale = 1.0 if stretch <= 1 else math.sqrt(1 + float(log(stretch) / log(original)))
    return np.asarray(inv_freq / factors), scale


def _listed(values: object) -> npt.NDArray[np.floating] | None:
    """A list of numbers as an array; None where it is anything else."""
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        return None
    return np.asarray([float(value) for value in values])
