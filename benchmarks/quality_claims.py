"""What the quality table must show, checked on its rows: numbers first, then whether it holds.

A row's loss is the rise of log-perplexity over the reference, averaged over the texts, of its
weights alone where they were measured in floating point. It knows rows of ``quality.json`` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Claim", "Loss", "check_claims", "default_row", "loss_of"]

Row = dict[str, Any]

_MORE_BITS = 0.3  # that NVFP4 may take beyond NF4
_SAME_BITS = 0.01
_KERNEL_CHANGE = 0.002  # of log-perplexity
_LLAMACPP_CHANGE = 0.005


@dataclass(frozen=True, slots=True)
class Loss:
    """Nats per token over the reference with one standard error, and the KL divergence."""

    nats: float
    error: float
    kl: float

    def __str__(self) -> str:
        return f"{self.nats:.4f} ± {self.error:.4f} (KL {self.kl:.4f})"


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim on one model. ``holds`` is None where a row that it needs is missing."""

    claim: str
    model: str
    holds: bool | None
    numbers: str

    def to_dict(self) -> dict[str, Any]:
        """The same names and values as a plain dictionary."""
        return asdict(self)


def loss_of(row: Row) -> Loss | None:
    """A row's loss, or None for a row that was not measured."""
    scores = row.get("scores") or []
    scores = [s for s in scores if s["path"] == "float"] or scores
    if not scores:
        return None
    count = len(scores)
    return Loss(
        nats=sum(math.log1p(s["change"]) for s in scores) / count,
        error=math.sqrt(sum((s["change_error"] / (1 + s["change"])) ** 2 for s in scores)) / count,
        kl=sum(s["kl"] for s in scores) / count,
    )


def default_row(rows: Sequence[Row], format_: str) -> Row | None:
    """The row of a format's default method, or of the best method where none is marked."""
    found = [row for row in rows if row["format"] == format_ and loss_of(row) is not None]
    marked = [row for row in found if row.get("default")]
    return min(marked or found, key=_nats, default=None)


def check_claims(rows: Sequence[Row]) -> list[Claim]:
    """Every claim on every model that has rows."""
    checks: dict[str, Callable[[Sequence[Row]], tuple[bool | None, str]]] = {
        "MR-GPTQ closes at least half of the loss of MXFP4 rounded to nearest": _closes_half,
        "NVFP4 by its default method loses less than bitsandbytes NF4, at no more than "
        f"{_MORE_BITS} bits per weight more": _below_nf4("bnb-nf4"),
        "the same against bitsandbytes NF4 with double-quantized scales": _below_nf4("bnb-nf4-dq"),
        "int4-g32 by GPTQ loses less than anything rounded to nearest at its bits or fewer": _gptq,
        "The kernels move the published weights' perplexity by less than 0.2 %": _kernels_close,
        "It is llama.cpp's within 0.5 %": _as_llamacpp,
    }
    models = list(dict.fromkeys(row["model"] for row in rows))
    claims = []
    for model in models:
        own = [row for row in rows if row["model"] == model]
        for claim, check in checks.items():
            holds, numbers = check(own)
            claims.append(Claim(claim, model, holds, numbers))
    return claims


def _closes_half(rows: Sequence[Row]) -> tuple[bool | None, str]:
    plain, better = (_loss(rows, f"mxfp4 {method}") for method in ("rtn", "mr-gptq"))
    if plain is None or better is None:
        return None, "needs mxfp4 rtn and mxfp4 mr-gptq"
    closed = 1 - better.nats / plain.nats if plain.nats > 0 else math.nan
    by_kl = 1 - better.kl / plain.kl if plain.kl > 0 else math.nan
    numbers = f"rtn {plain}, mr-gptq {better}: {closed:.0%} closed, {by_kl:.0%} of the KL"
    return closed >= 0.5, numbers


def _below_nf4(peer: str) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    def check(rows: Sequence[Row]) -> tuple[bool | None, str]:
        ours = default_row(rows, "nvfp4")
        theirs = next((row for row in rows if row["name"] == peer), None)
        if ours is None or theirs is None:
            return None, f"needs nvfp4 and {peer}"
        our_loss, their_loss = loss_of(ours), loss_of(theirs)
        if our_loss is None or their_loss is None:
            return None, f"{peer} was not measured"
        more = ours["bits_per_weight"] - theirs["bits_per_weight"]
        numbers = (
            f"{ours['name']} {our_loss} at {ours['bits_per_weight']:.3f} bits, "
            f"{peer} {their_loss} at {theirs['bits_per_weight']:.3f}"
        )
        return our_loss.nats < their_loss.nats and more <= _MORE_BITS + 1e-9, numbers

    return check


def _gptq(rows: Sequence[Row]) -> tuple[bool | None, str]:
    ours = next((row for row in rows if row["name"] == "int4-g32 gptq"), None)
    our_loss = None if ours is None else loss_of(ours)
    if ours is None or our_loss is None:
        return None, "needs int4-g32 gptq"
    limit = ours["bits_per_weight"] + _SAME_BITS
    rounded = [
        row
        for row in rows
        if (row["method"] == "rtn" or row["name"].startswith("bnb-"))
        and row.get("bits_per_weight") is not None
        and row["bits_per_weight"] <= limit
        and loss_of(row) is not None
    ]
    if not rounded:
        return None, "needs a row that is rounded to nearest"
    best = min(rounded, key=_nats)
    numbers = f"int4-g32 gptq {our_loss}, best of {len(rounded)}: {best['name']} {loss_of(best)}"
    return our_loss.nats < _nats(best), numbers


def _kernels_close(rows: Sequence[Row]) -> tuple[bool | None, str]:
    scores = _kernel_scores(rows, "published")
    if not scores:
        return None, "needs the published weights on the kernels"
    numbers = ", ".join(
        f"{s['text']} {100 * s['change']:+.2f} ± {100 * s['change_error']:.2f} % (KL {s['kl']:.4f})"
        for s in scores.values()
    )
    mean = sum(math.log1p(s["change"]) for s in scores.values()) / len(scores)
    return abs(mean) < _KERNEL_CHANGE, f"{numbers}: {100 * mean:+.2f} % on average"


def _as_llamacpp(rows: Sequence[Row]) -> tuple[bool | None, str]:
    ours, theirs = (_kernel_scores(rows, name) for name in ("published", "llamacpp"))
    if not ours or ours.keys() != theirs.keys():
        return None, "needs the published weights on the kernels and on llama.cpp"
    apart = {text: ours[text]["perplexity"] / theirs[text]["perplexity"] - 1 for text in ours}
    numbers = ", ".join(
        f"{text} {100 * value:+.2f} % (KL from float32: {ours[text]['kl']:.4f}, "
        f"llama.cpp's {theirs[text]['kl']:.4f})"
        for text, value in apart.items()
    )
    return all(abs(value) < _LLAMACPP_CHANGE for value in apart.values()), numbers


def _kernel_scores(rows: Sequence[Row], name: str) -> dict[str, dict[str, Any]]:
    row = next((row for row in rows if row["name"] == name), None)
    scores = row["scores"] if row is not None else []
    return {score["text"]: score for score in scores if score["path"] == "kernels"}


def _loss(rows: Sequence[Row], name: str) -> Loss | None:
    row = next((row for row in rows if row["name"] == name), None)
    return None if row is None else loss_of(row)


def _nats(row: Row) -> float:
    loss = loss_of(row)
    return math.inf if loss is None else loss.nats
