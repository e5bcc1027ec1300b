"""The texts for measuring quality, and one row of the table: a model in one format against float32.

Evaluation and calibration texts are disjoint: prose is a file of passages, code is this machine's
Python standard library.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import localrt
from localrt.common.errors import OptionError
from localrt.evaluate import Evaluation, evaluate
from localrt.models.checkpoints import open_checkpoint

_PIECE = 8000  # characters per source file: many files, so that no single style dominates
_ENOUGH = 600_000  # characters of code for each of evaluation and calibration


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text to evaluate on and a disjoint one to calibrate on; ``source`` describes them."""

    name: str
    evaluation: str
    calibration: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """The corpus's identity, without the texts."""
        return {
            "name": self.name,
            "source": self.source,
            "evaluation_sha256": _digest(self.evaluation),
            "calibration_sha256": _digest(self.calibration),
        }


def prose(path: Path) -> Corpus:
    """The passages of a UTF-8 file, separated by blank lines.

    Raises:
        OptionError: fewer than four passages.
    """
    passages = [part for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    cut = len(passages) * 3 // 4
    if len(passages) < 4:
        raise OptionError(f"{path.name} has {len(passages)} passages between blank lines, not 4")
    source = f"{path.name}, passages 1-{cut} of {len(passages)}; calibration on the others"
    return Corpus("prose", "\n\n".join(passages[:cut]), "\n\n".join(passages[cut:]), source)


def python_source(folder: Path | None = None) -> Corpus:
    """Pieces from the middle of the standard library's modules, ordered by name hash."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: _digest(path.name))
    sides: tuple[list[str], list[str]] = ([], [])
    for path in files:
        side = sides[int(_digest(path.name)[:2], 16) % 2]
        if sum(map(len, side)) < _ENOUGH:
            side.append(_middle(path.read_text(encoding="utf-8", errors="replace")))
    if not all(sides):
        raise OptionError(f"{folder} holds too few Python files to evaluate and calibrate on")
    source = (
        f"standard library of Python {platform.python_version()}, pieces of {len(sides[0])} "
        f"modules; calibration on {len(sides[1])} others"
    )
    return Corpus("code", "\n".join(sides[0]), "\n".join(sides[1]), source)


def interleaved(parts: Sequence[Sequence[int]], *, total: int, length: int = 512) -> list[int]:
    """At most ``total`` tokens: ``length`` from each part in turn, until one is used up.

    Raises:
        OptionError: a part is shorter than one stretch.
    """
    whole = min(len(part) for part in parts) // length
    if not whole:
        raise OptionError(f"the calibration text has fewer than {length} tokens")
    turns = [part[i * length : (i + 1) * length] for i in range(whole) for part in parts]
    return [token for turn in turns for token in turn][:total]


def _middle(text: str) -> str:
    """At most ``_PIECE`` characters in whole lines, from a quarter of the text on."""
    start = text.find("\n", len(text) // 4) + 1
    piece = text[start : start + _PIECE]
    return piece[: piece.rfind("\n") + 1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def scores(
    store: Path, source: Path, corpora: Sequence[Corpus], *, ctx: int, tokens: int
) -> list[dict[str, Any]]:
    """Compare the model in ``store`` with its ``source`` on ``tokens`` tokens of each text, in
    windows of ``ctx``: torch computes both, with weights unpacked to float32.
    """
    options: dict[str, Any] = {"ctx": ctx, "engine": "native", "device": "cpu", "format": "f32"}
    with localrt.load(source, **options) as reference, localrt.load(store, **options) as model:
        return [
            _score(
                corpus.name,
                evaluate(model, corpus.evaluation, ctx=ctx, limit_tokens=tokens, against=reference),
            )
            for corpus in corpora
        ]


def _score(text: str, found: Evaluation) -> dict[str, Any]:
    against = found.against
    assert against is not None, "it was compared"
    return {
        "text": text,
        "reference": against.perplexity,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "change": against.perplexity_change,
        "change_error": against.perplexity_change_error,
        "kl": against.kl_divergence,
        "kl_error": against.kl_divergence_error,
        "top1": against.top1_agreement,
    }


def bits_per_weight(source: Path) -> float:
    """Bits per weight of the layers' matrices, scales included, without embedding and head."""
    with closing(open_checkpoint(source)) as checkpoint:
        infos = [
            info
            for name, info in checkpoint.tensors.items()
            if ".layers." in name and len(info.shape) == 2
        ]
    weights = sum(info.shape[0] * info.shape[1] for info in infos)
    return 8 * sum(info.nbytes for info in infos) / weights
