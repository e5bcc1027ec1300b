"""How well a model predicts a text: perplexity, and how far it is from another model.

Windows are llama.cpp's: ``ctx`` tokens each, the first one replaced by BOS where the model wants
it, and only the second half scored, so that every scored token has half a window before it. It
knows the public API only, and neither files nor printing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localrt.engine.types import Progress, ProgressCallback
from localrt.errors import OptionError

if TYPE_CHECKING:
    from localrt.api import Model

__all__ = ["Comparison", "Evaluation", "evaluate"]

_DEFAULT_CTX = 2048
_SMALLEST_CTX = 4

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model beside a reference, over the same scored tokens.

    ``kl_divergence`` is the mean of KL(reference || model) in nats, ``top1_agreement`` the share of
    positions at which both find the same token most likely.
    """

    model: str
    perplexity: float
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured. ``perplexity_error`` is one standard error, ``tok_s`` of the model alone.

    ``tokens`` were read, of which ``scored_tokens``, standing for ``scored_bytes``, were predicted.
    """

    model: str
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

    def to_dict(self) -> dict[str, Any]:
        """The same names and values as a plain dictionary."""
        return asdict(self)


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
        model: a model with a tokenizer, on the native engine.
        text: at least one window of it.
        ctx: tokens of a window; None takes 2048, or the model's context where that is less.
        stride: tokens from one window to the next; None takes ``ctx``. A window scores its last
            ``stride`` tokens, at most its second half.
        limit_tokens: use the beginning of the text only.
        against: a model of the same vocabulary.
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
            raise OptionError(f"limit_tokens must be at least 1, is {limit_tokens}")
        tokens = tokens[:limit_tokens]
    if len(tokens) < ctx:
        raise OptionError(
            f"the text has {len(tokens)} tokens, fewer than one window of {ctx}: use a longer text "
            "or a smaller --ctx"
        )
    windows = list(_windows(tokens, ctx, stride, bos))
    first = max(ctx // 2, ctx - 1 - stride)
    score, reference = _Score(), _Score()
    apart = _Distance()
    targets: list[int] = []
    for number, window in enumerate(windows, 1):
        wanted = np.array(window[first + 1 :])
        targets += window[first + 1 :]
        pieces = score.timed(model.logits(window[:-1], first=first))
        others = against.logits(window[:-1], first=first) if against is not None else None
        for row, piece in _numbered(pieces):
            target = wanted[row : row + len(piece)]
            log_p = _log_softmax(piece)
            score.add(log_p, target)
            if others is not None:
                log_q = _log_softmax(next(others))
                reference.add(log_q, target)
                apart.add(log_q, log_p)
        if progress is not None:
            progress(Progress("eval", number, len(windows), "windows"))
    nats = float(np.mean(score.nll))
    scored_bytes = sum(len(model.tokenizer.token_bytes(token)) for token in targets)
    return Evaluation(
        model=model.name,
        tokens=len(tokens),
        ctx=ctx,
        stride=stride,
        windows=len(windows),
        scored_tokens=len(targets),
        scored_bytes=scored_bytes,
        perplexity=score.perplexity,
        perplexity_error=score.perplexity * score.standard_error,
        bits_per_byte=nats * len(targets) / math.log(2) / max(scored_bytes, 1),
        tok_s=len(windows) * (ctx - 1) / max(score.seconds, 1e-9),
        against=None
        if against is None
        else Comparison(
            model=against.name,
            perplexity=reference.perplexity,
            kl_divergence=apart.kl / apart.count,
            top1_agreement=apart.same / apart.count,
        ),
    )


class _Score:
    """Negative log-likelihoods, and the time that the model took for its logits."""

    def __init__(self) -> None:
        self.nll: list[float] = []
        self.seconds = 0.0

    def add(self, log_p: Floats, targets: npt.NDArray[np.int64]) -> None:
        self.nll += (-log_p[np.arange(len(targets)), targets]).tolist()

    def timed(self, pieces: Iterator[Floats]) -> Iterator[Floats]:
        while True:
            start = time.perf_counter()
            piece = next(pieces, None)
            self.seconds += time.perf_counter() - start
            if piece is None:
                return
            yield piece

    @property
    def perplexity(self) -> float:
        mean = float(np.mean(self.nll))
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def standard_error(self) -> float:
        """Of the mean negative log-likelihood."""
        return float(np.std(self.nll) / math.sqrt(max(len(self.nll) - 1, 1)))


class _Distance:
    """Sums over positions of how far a model is from its reference."""

    def __init__(self) -> None:
        self.kl = 0.0
        self.same = 0
        self.count = 0

    def add(self, log_reference: Floats, log_model: Floats) -> None:
        self.same += int((log_reference.argmax(axis=1) == log_model.argmax(axis=1)).sum())
        self.count += len(log_model)
        difference = log_reference - log_model
        difference *= np.exp(log_reference)
        self.kl += float(difference.sum(dtype=np.float64))


def _window_sizes(
    model: Model, against: Model | None, ctx: int | None, stride: int | None
) -> tuple[int, int]:
    room = min(m.info.ctx for m in (model, against) if m is not None)
    if ctx is None:
        ctx = min(_DEFAULT_CTX, room)
    if not _SMALLEST_CTX <= ctx <= room:
        raise OptionError(f"ctx must be from {_SMALLEST_CTX} to the model's {room}, is {ctx}")
    if stride is None:
        stride = ctx
    if not 1 <= stride <= ctx:
        raise OptionError(f"stride must be from 1 to the window's {ctx}, is {stride}")
    return ctx, stride


def _tokens(model: Model, text: str) -> tuple[list[int], int | None]:
    """The text's tokens, and BOS where the model begins every text with it."""
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


def _windows(tokens: Sequence[int], ctx: int, stride: int, bos: int | None) -> Iterator[list[int]]:
    for start in range(0, len(tokens) - ctx + 1, stride):
        window = list(tokens[start : start + ctx])
        if bos is not None:
            window[0] = bos
        yield window


def _numbered(pieces: Iterator[Floats]) -> Iterator[tuple[int, Floats]]:
    """Each piece with the number of its first row."""
    row = 0
    for piece in pieces:
        yield row, piece
        row += len(piece)


def _log_softmax(logits: Floats) -> Floats:
    """In place: (n, vocab) logits become natural-log probabilities."""
    logits -= logits.max(axis=1, keepdims=True)
    total = np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)
    logits -= np.log(total).astype(np.float32)
    return logits
