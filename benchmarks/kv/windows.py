"""One window of a text under several caches of one model, compared with the first.

All caches read the same pieces in step, so that a piece of logits is held once a cache and no
longer. What a window adds is sums over its tokens: results of windows are joined by adding them.
It knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from localrt.api import Model

__all__ = ["Sums", "compare_window", "joined", "summary"]

Sums = dict[str, float]

_NAMES = ("tokens", "nats", "nats2", "change", "change2", "kl", "kl2", "same")


def compare_window(models: Mapping[str, Model], window: Sequence[int]) -> dict[str, Sums]:
    """Each model's sums over every token of ``window`` but the first; the first is the reference.

    ``change`` is a token's negative log-likelihood less the reference's, ``kl`` the divergence
    KL(reference || model), both in nats; names with a 2 are of the squares.
    """
    targets = torch.tensor(window[1:])
    pieces = {name: model.logits(window[:-1]) for name, model in models.items()}
    sums = {name: dict.fromkeys(_NAMES, 0.0) for name in models}
    row = 0
    while row < len(targets):
        logits = {name: torch.from_numpy(next(each)) for name, each in pieces.items()}
        reference, *_ = [_log_softmax(each) for each in logits.values()]
        own = targets[row : row + len(reference)]
        share = reference.exp()
        for name, each in logits.items():
            _add(sums[name], each, own, reference, share)
        row += len(own)
    return sums


def _log_softmax(logits: Tensor) -> Tensor:
    """In place: (n, vocab)."""
    return logits.sub_(logits.logsumexp(1, keepdim=True))


def _add(sums: Sums, log_p: Tensor, targets: Tensor, reference: Tensor, share: Tensor) -> None:
    """Count the n tokens ``targets``. ``share`` are the reference's probabilities (n, vocab)."""
    rows = torch.arange(len(targets))
    nats = -log_p[rows, targets].double()
    change = nats + reference[rows, targets]
    kl = (reference - log_p).mul_(share).sum(1).double()
    same = reference.argmax(1) == log_p.argmax(1)
    found = (torch.ones(len(targets)), nats, nats**2, change, change**2, kl, kl**2, same)
    for name, values in zip(_NAMES, found, strict=True):
        sums[name] += float(values.sum())


def joined(parts: Iterable[Sums]) -> Sums:
    """The sums of several windows."""
    listed = list(parts)
    return {name: sum(part[name] for part in listed) for name in _NAMES}


def summary(sums: Sums) -> dict[str, Any]:
    """Perplexity, its change and KL, each with one standard error over tokens; top-1 agreement."""
    count = sums["tokens"]

    def mean(name: str) -> tuple[float, float]:
        average = sums[name] / count
        spread = max(0.0, sums[f"{name}2"] / count - average**2)
        return average, math.sqrt(spread / max(count - 1, 1))

    (nats, nats_error), (change, change_error), (kl, kl_error) = map(mean, ("nats", "change", "kl"))
    return {
        "tokens": round(count),
        "perplexity": math.exp(nats),
        "perplexity_error": math.exp(nats) * nats_error,
        "change": math.expm1(change),
        "change_error": math.exp(change) * change_error,
        "kl": kl,
        "kl_error": kl_error,
        "top1": sums["same"] / count,
    }
