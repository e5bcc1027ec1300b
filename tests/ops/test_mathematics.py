"""Functions that are written here because libraries' differ from machine to machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from localrt.quant.ops.attention import Rope
from localrt.quant.ops.mathematics import exp, log, power, product, turns

GRID = np.linspace(-700, 700, 4001)
ANGLES = np.arange(0, 1 << 20, 37, dtype=np.float32) * np.float32(0.7)


def ulps(found: np.ndarray, wanted: list[float]) -> float:
    """The largest error in units of the last place."""
    return float((np.abs(found - wanted) / np.spacing(np.abs(wanted))).max())


def test_accuracy() -> None:
    assert ulps(exp(GRID), [math.exp(x) for x in GRID]) < 4
    assert ulps(exp(GRID / 700), [math.exp(x) for x in GRID / 700]) < 4
    positive = exp(GRID)
    assert ulps(log(positive), [math.log(x) for x in positive]) < 4
    assert np.abs(power(5e5, -GRID / 700) / np.power(5e5, -GRID / 700) - 1).max() < 1e-14
    cos, sin = turns(ANGLES)
    angles = ANGLES.astype(np.float64)
    assert np.abs(cos - np.cos(angles)).max() < 2**-24
    assert np.abs(sin - np.sin(angles)).max() < 2**-24


def test_edges() -> None:
    with np.errstate(all="raise"):
        found = exp([math.nan, -math.inf, -800.0, 0.0, 800.0, math.inf])
    np.testing.assert_array_equal(found, [math.nan, 0, 0, 1, math.inf, math.inf])
    assert log(1.0) == 0
    assert power(7.0, 0.0) == 1
    np.testing.assert_array_equal(turns(0.0), (1, 0))


def test_bits() -> None:
    """The same on every machine."""
    values = [exp(GRID), log(exp(GRID)), power(1e6, GRID / 700), *turns(ANGLES)]
    digest = hashlib.sha256(b"".join(each.tobytes() for each in values)).hexdigest()
    assert digest[:16] == "d8703ab224a4b80c"


def test_product() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 7), np.float32) * (rng.random((5, 7)) < 0.5)
    b = rng.standard_normal((7, 3, 2), np.float32)
    np.testing.assert_allclose(product(a, b), np.tensordot(a, b, 1), atol=1e-5)


def test_turns_of_any_rows() -> None:
    """A position's turns do not depend on the positions beside it."""
    rope = Rope(tuple(1e4 ** (-n / 8) for n in range(8)), scale=1.1)
    positions = np.arange(1000)
    whole = rope.turns(positions)
    for rows in (positions[127:128], positions[60:130], positions[[3, 900]], positions[64:128]):
        for some, all_ in zip(rope.turns(rows), whole, strict=True):
            np.testing.assert_array_equal(some, all_[rows])
    np.testing.assert_array_equal(rope.turns(positions[:3] - 2)[1][:2], -whole[1][2:0:-1])
