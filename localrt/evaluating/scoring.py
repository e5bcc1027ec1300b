"""Numbers from log-probabilities: perplexity, and how far a model is from a reference.

Every figure comes with its standard error over positions, and a change of perplexity with that of
the paired differences, which is far smaller than either perplexity's own. It knows neither models
nor texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Tally", "log_softmax"]

Floats = npt.NDArray[np.float32]


class Tally:
    """Sums over scored positions. With a reference, every position needs its log-probabilities."""

    def __init__(self) -> None:
        self._nll: list[float] = []
        self._reference_nll: list[float] = []
        self._kl: list[float] = []
        self._same = 0

    def add(
        self, log_p: Floats, targets: npt.NDArray[np.integer], reference: Floats | None = None
    ) -> None:
        """Count (n, vocab) log-probabilities and the n tokens that came, maybe beside a reference.

        ``reference`` has the same shape; it may be half precision.
        """
        rows = np.arange(len(targets))
        self._nll += (-log_p[rows, targets]).tolist()
        if reference is None:
            return
        reference = reference.astype(np.float32, copy=False)
        self._reference_nll += (-reference[rows, targets]).tolist()
        self._same += int((reference.argmax(axis=1) == log_p.argmax(axis=1)).sum())
        difference = reference - log_p
        difference *= np.exp(reference)
        self._kl += difference.sum(axis=1, dtype=np.float64).tolist()

    @property
    def count(self) -> int:
        """Positions counted."""
        return len(self._nll)

    @property
    def nats(self) -> float:
        """The mean negative log-likelihood."""
        return float(np.mean(self._nll))

    def perplexity(self) -> tuple[float, float]:
        """The exponential of ``nats``, infinite where that is no number, and its standard error."""
        perplexity = _exp(self.nats)
        return perplexity, perplexity * _standard_error(self._nll)

    def comparison(self) -> dict[str, Any]:
        """The numbers of a ``Comparison``; the change's error is of the paired differences."""
        differences = np.subtract(self._nll, self._reference_nll)
        change = math.expm1(min(float(np.mean(differences)), 700.0))
        return {
            "perplexity": _exp(float(np.mean(self._reference_nll))),
            "perplexity_change": change,
            "perplexity_change_error": (1 + change) * _standard_error(differences),
            "kl_divergence": float(np.mean(self._kl)),
            "kl_divergence_error": _standard_error(self._kl),
            "top1_agreement": self._same / len(self._reference_nll),
        }


def log_softmax(logits: Floats) -> Floats:
    """In place: (n, vocab) logits become natural-log probabilities."""
    logits -= logits.max(axis=1, keepdims=True)
    total = np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)
    logits -= np.log(total).astype(np.float32)
    return logits


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _standard_error(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    return float(np.std(values) / math.sqrt(max(len(values) - 1, 1)))
