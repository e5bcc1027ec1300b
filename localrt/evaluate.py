"""How well a model predicts a text: its perplexity, and its distance from another model.

Windows are llama.cpp's: ``ctx`` tokens each, the first one replaced by BOS if the model wants it,
and only the second half scored, so that every scored token has half a window before it. It knows
models and texts, and neither files nor printing.

``Tally`` computes the numbers from log-probabilities, and knows neither models nor texts.

Every figure comes with its standard error over positions, and a change of perplexity with that of
the paired differences, which is far smaller than either perplexity's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.api import Model
from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.common.progress import Progress, ProgressCallback
from localrt.quant.formats.packed import Floats


class Tally:
    """Sums over scored positions. A comparison needs the reference at every position."""

    def __init__(self) -> None:
        self._nll: list[float] = []
        self._reference_nll: list[float] = []
        self._kl: list[float] = []
        self._same = 0

    def add(
        self, log_p: Floats, targets: npt.NDArray[np.integer], reference: Floats | None = None
    ) -> None:
        """Count (n, vocab) log-probabilities and the n actual tokens, optionally with a reference.

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
        """The number of positions counted."""
        return len(self._nll)

    @property
    def nats(self) -> float:
        """The mean negative log-likelihood."""
        return float(np.mean(self._nll))

    def perplexity(self) -> tuple[float, float]:
        """The exponential of ``nats``, or infinity if it overflows, and its standard error."""
        perplexity = _exp(self.nats)
        return perplexity, perplexity * _standard_error(self._nll)

    def comparison(self) -> dict[str, Any]:
        """Return the figures of a ``Comparison``; paired differences give the change's error."""
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
    """Turn (n, vocab) logits into natural-log probabilities, in place."""
    logits -= logits.max(axis=1, keepdims=True)
    total = np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)
    logits -= np.log(total).astype(np.float32)
    return logits


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _standard_error(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    return float(np.std(values) / math.sqrt(max(len(values) - 1, 1)))


_DEFAULT_CTX = 2048
_SMALLEST_CTX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model compared with a reference, over the same scored tokens.

    ``perplexity`` is the reference's, ``perplexity_change`` the model's over it, minus one.
    ``kl_divergence`` is the mean of KL(reference || model) in nats, ``top1_agreement`` the share of
    positions at which both find the same token most likely. An ``..._error`` is one standard error.
    """

    model: str
    engine: str
    format: str
    perplexity: float
    perplexity_change: float
    perplexity_change_error: float
    kl_divergence: float
    kl_divergence_error: float
    top1_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The measurements. ``perplexity_error`` is one standard error, ``tok_s`` of the model alone.

    ``tokens`` were read, of which ``scored_tokens``, standing for ``scored_bytes``, were predicted.
    """

    model: str
    engine: str
    format: str
    tokens: int
    ctx: int
    stride: int
    windows: int
    scored_tokens: int
    scored_bytes: int
    perplexity: float
    perplexity_error: float
    bits_per_byte: float
    tok_s: float
    against: Comparison | None = None

    def to_dict(self) -> dict[str, object]:
        """The same names and values as a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Windows:
    """Tokens cut into windows, of which the tokens after index ``first`` are scored."""

    windows: tuple[tuple[int, ...], ...]
    first: int

    def targets(self) -> list[int]:
        """All scored tokens, in order."""
        return [token for window in self.windows for token in window[self.first + 1 :]]


def evaluate(
    model: Model,
    text: str,
    *,
    ctx: int | None = None,
    stride: int | None = None,
    limit_tokens: int | None = None,
    against: Model | None = None,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Perplexity of ``text`` under ``model``, compared with the reference ``against`` if given.

    Args:
        model: a model with a tokenizer, on any engine.
        text: at least one window of it.
        ctx: tokens of a window; None takes 2048, or the model's context where that is less.
        stride: tokens from one window to the next; None takes ``ctx``. A window scores its last
            ``stride`` tokens, at most its second half.
        limit_tokens: use the beginning of the text only.
        against: a model of the same vocabulary; the same one on another engine or in another
            format says what the engine or the format does.
        progress: called with ``Progress`` after each window.

    Raises:
        OptionError: sizes that cannot be, a text shorter than a window, or other vocabularies.
        TokenizerError: the model has no tokenizer.
    """
    ctx, stride = _window_sizes(model, against, ctx, stride)
    tokens, bos = _tokens(model, text)
    if against is not None:
        _require_same_vocabulary(model, against, tokens, text)
    if limit_tokens is not None:
        if limit_tokens < 1:
            raise OptionError(f"{option('limit_tokens')} must be at least 1, is {limit_tokens}")
        tokens = tokens[:limit_tokens]
    cut = _cut(tokens, ctx, stride, bos)
    tally, seconds = Tally(), 0.0
    for number, window in enumerate(cut.windows, 1):
        targets = np.array(window[cut.first + 1 :])
        pieces = model.logits(window[:-1], first=cut.first)
        others = None if against is None else against.logits(window[:-1], first=cut.first)
        row = 0
        while row < len(targets):
            start = time.perf_counter()
            piece = next(pieces)
            seconds += time.perf_counter() - start
            reference = None if others is None else log_softmax(next(others))
            tally.add(log_softmax(piece), targets[row : row + len(piece)], reference)
            row += len(piece)
        if progress is not None:
            progress(Progress("eval", number, len(cut.windows), "windows"))
    scored_bytes = sum(len(model.tokenizer.token_bytes(token)) for token in cut.targets())
    perplexity, perplexity_error = tally.perplexity()
    return Evaluation(
        **_identity(model),
        tokens=len(tokens),
        ctx=ctx,
        stride=stride,
        windows=len(cut.windows),
        scored_tokens=tally.count,
        scored_bytes=scored_bytes,
        perplexity=perplexity,
        perplexity_error=perplexity_error,
        bits_per_byte=tally.nats * tally.count / math.log(2) / max(scored_bytes, 1),
        tok_s=len(cut.windows) * (ctx - 1) / max(seconds, 1e-9),
        against=None if against is None else Comparison(**_identity(against), **tally.comparison()),
    )


def _identity(model: Model) -> dict[str, Any]:
    return {"model": model.name, "engine": model.info.engine, "format": model.info.format}


def _window_sizes(
    model: Model, against: Model | None, ctx: int | None, stride: int | None
) -> tuple[int, int]:
    room = min(m.info.ctx for m in (model, against) if m is not None)
    if ctx is None:
        ctx = min(_DEFAULT_CTX, room)
    if not _SMALLEST_CTX <= ctx <= room:
        raise OptionError(
            f"{option('ctx')} must be from {_SMALLEST_CTX} to the model's {room}, is {ctx}"
        )
    if stride is None:
        stride = ctx
    if not 1 <= stride <= ctx:
        raise OptionError(f"{option('stride')} must be from 1 to the window's {ctx}, is {stride}")
    return ctx, stride


def _tokens(model: Model, text: str) -> tuple[list[int], int | None]:
    """Return the text's tokens, after BOS if the model begins every text with it."""
    tokenizer = model.tokenizer
    bos = tokenizer.bos_id
    if bos is not None and tokenizer.encode("a")[0] != bos:
        bos = None
    tokens = tokenizer.encode(text, add_special=False)
    return ([bos, *tokens] if bos is not None else tokens), bos


def _require_same_vocabulary(
    model: Model, against: Model, tokens: Sequence[int], text: str
) -> None:
    if (
        model.info.vocab_size != against.info.vocab_size
        or list(tokens) != _tokens(against, text)[0]
    ):
        raise OptionError(
            f"{model.name} and {against.name} have different vocabularies: only models that read a "
            "text as the same tokens can be compared"
        )


def _cut(tokens: Sequence[int], ctx: int, stride: int, bos: int | None) -> Windows:
    if len(tokens) < ctx:
        raise OptionError(
            f"{len(tokens)} tokens of the text are fewer than one window of {ctx}: use more of it "
            f"({option('limit_tokens')}), a longer text or a smaller {option('ctx')}"
        )
    windows = []
    for start in range(0, len(tokens) - ctx + 1, stride):
        window = tuple(tokens[start : start + ctx])
        windows.append(window if bos is None else (bos, *window[1:]))
    return Windows(tuple(windows), max(ctx // 2, ctx - 1 - stride))
