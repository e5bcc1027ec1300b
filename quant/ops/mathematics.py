"""Mathematics whose results have the same bits on every machine.

Functions of numpy and of C libraries differ in their last bits from machine to machine, and BLAS
adds in another order on each. What is here takes only steps that IEEE 754 rounds alike everywhere:
+, -, * and / of float64, one by one. Results are within a few units of the last place; callers
round them to float32. The kernels have functions of their own (``csrc/activation.h``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.packed import Floats

Doubles = npt.NDArray[np.float64]

_LOG_2, _QUARTER = 0.6931471805599453, math.pi / 2


def _in_parts(value: float, rest: float) -> tuple[float, float, float]:
    """A constant as a sum of numbers of few bits, whose products with whole numbers are exact."""
    high = float(np.float32(value))
    return high, value - high, rest


_LOG_2_PARTS = _in_parts(_LOG_2, 2.3190468138462996e-17)
_QUARTER_PARTS = _in_parts(_QUARTER, 6.123233995736766e-17)
# Taylor series, last term first, of arguments that are at most log(2) / 2 or pi / 4.
_EXP = [1 / math.factorial(n) for n in range(13, -1, -1)]
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(7, -1, -1)]
_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(7, -1, -1)]
_ATANH = [1 / n for n in range(19, 0, -2)]


def exp(x: npt.ArrayLike) -> Doubles:
    """e to the power of each number."""
    x = np.clip(np.asarray(x, np.float64), -750.0, 750.0)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):  # NaN stays NaN
        n = np.rint(x / _LOG_2)
        return np.ldexp(_series(_EXP, _rest(x, n, _LOG_2_PARTS)), n.astype(np.int32))


def log(x: npt.ArrayLike) -> Doubles:
    """The natural logarithm of each number, which is finite and above 0."""
    part, n = np.frexp(np.asarray(x, np.float64))
    small = part < math.sqrt(0.5)
    part, n = np.where(small, 2 * part, part), n - small
    s = (part - 1) / (part + 1)
    high, low, _ = _LOG_2_PARTS
    return np.asarray(n * high + (n * low + 2 * s * _series(_ATANH, s * s)))


def power(base: float, exponents: npt.ArrayLike) -> Doubles:
    """A number above 0 to the power of each exponent."""
    return exp(np.asarray(exponents, np.float64) * log(base))


def turns(angles: npt.ArrayLike) -> tuple[Floats, Floats]:
    """The cosine and the sine of each angle, rounded to float32; angles are at most 1e7 or so."""
    angles = np.asarray(angles, np.float64)
    n = np.rint(angles / _QUARTER)
    rest = _rest(angles, n, _QUARTER_PARTS)
    square = rest * rest
    cos, sin = _series(_COS, square), rest * _series(_SIN, square)
    quarter = n.astype(np.int64)
    crossed = (quarter & 1).astype(bool)
    turned_cos = np.where(crossed, sin, cos) * (1 - ((quarter + 1) & 2))
    turned_sin = np.where(crossed, cos, sin) * (1 - (quarter & 2))
    return turned_cos.astype(np.float32), turned_sin.astype(np.float32)


def product(a: Floats, b: Floats) -> Floats:
    """``a`` (R, K) times ``b`` (K, ...), summed in order in float32; zeros of ``a`` are skipped."""
    out = np.zeros((len(a), *b.shape[1:]), np.float32)
    for total, factors in zip(out, a, strict=True):
        for k in np.flatnonzero(factors):
            total += factors[k] * b[k]
    return out


def _rest(x: Doubles, n: Doubles, parts: tuple[float, float, float]) -> Doubles:
    """``x`` less ``n`` times the sum of the parts."""
    high, middle, low = parts
    return np.asarray(((x - n * high) - n * middle) - n * low)


def _series(terms: Sequence[float], x: Doubles) -> Doubles:
    total = np.full_like(x, terms[0])
    for term in terms[1:]:
        total *= x
        total += term
    return total
