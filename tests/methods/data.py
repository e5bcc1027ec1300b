"""Weights, and activations with the two troubles of real ones: correlation and large channels."""

from __future__ import annotations

from functools import cache

import numpy as np

from localrt.quant.methods import HessianSum


def weight(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05
    return values.astype(np.float32)


def activations(count: int, columns: int, seed: int = 1) -> np.ndarray:
    return _activations(count, columns, seed).copy()


@cache
def _activations(count: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * np.exp(rng.standard_normal(columns))
    return (rng.standard_normal((count, columns)) @ mix / columns**0.5).astype(np.float32)


def hessian_of(inputs: np.ndarray) -> np.ndarray:
    total = HessianSum(inputs.shape[1])
    total.add(inputs)
    return total.matrix()


def output_error(inputs: np.ndarray, values: np.ndarray, rounded: np.ndarray) -> float:
    """|X (W - Q)^T|, relative."""
    wrong = inputs @ (values - rounded).T
    return float(np.linalg.norm(wrong) / np.linalg.norm(inputs @ values.T))
