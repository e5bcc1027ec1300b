"""The texts for measuring quality, and one row of the table: a model in one format against float32.

Evaluation and calibration texts are disjoint: prose is a file of passages, code is this machine's
Python standard library. The reference runs once per model and text; its log-probabilities are on
disk in half precision. Every row is then one pass over the same windows, in floating point.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import localrt
from localrt.common.errors import OptionError
from localrt.engine.protocol import Logits
from localrt.evaluate import Tally, Windows, log_softmax, text_windows
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps

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


Pieces = Callable[[Sequence[int], int], Iterator[Logits]]
_ROWS = 256  # rows of logits at a time: 156 MB with a vocabulary of 151,936


@dataclass(frozen=True, slots=True)
class Reference:
    """A text's windows, and the reference's log-probabilities at every scored position."""

    corpus: Corpus
    windows: Windows
    log_p: npt.NDArray[np.float16]  # (scored, vocab), mapped from disk
    perplexity: float
    perplexity_error: float

    def score(self, pieces_of: Pieces) -> dict[str, Any]:
        """Compare the logits of ``pieces_of(tokens, first)`` with the reference."""
        tally, row = Tally(), 0
        for window in self.windows.windows:
            targets = np.array(window[self.windows.first + 1 :])
            done = 0
            pieces = pieces_of(window[:-1], self.windows.first)
            while done < len(targets):
                piece = next(pieces)
                n = len(piece)
                log_p = self.log_p[row : row + n].astype(np.float32)
                tally.add(log_softmax(piece), targets[done : done + n], log_p)
                done, row = done + n, row + n
        (perplexity, perplexity_error), found = tally.perplexity(), tally.comparison()
        return {
            "text": self.corpus.name,
            "perplexity": perplexity,
            "perplexity_error": perplexity_error,
            "change": found["perplexity_change"],
            "change_error": found["perplexity_change_error"],
            "kl": found["kl_divergence"],
            "kl_error": found["kl_divergence_error"],
            "top1": found["top1_agreement"],
        }


def make_reference(
    source: Path, corpus: Corpus, cache: Path, *, ctx: int, tokens: int
) -> Reference:
    """Compute the reference of one text, or read it from ``cache``.

    It covers ``tokens`` tokens in windows of ``ctx``.
    """
    with localrt.load(source, ctx=ctx, engine="native") as model:
        windows = text_windows(model, corpus.evaluation, ctx=ctx, limit_tokens=tokens)
        vocab = model.info.vocab_size
    targets = np.array(windows.targets())
    path = cache / f"{_key(source, windows)}.npy"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".partial.npy")
        shape = (len(targets), vocab)
        out = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float16, shape=shape)
        row = 0
        decoder = _decoder(source, ctx)
        for window in windows.windows:
            for piece in _logits(decoder, window[:-1], windows.first):
                out[row : row + len(piece)] = log_softmax(piece)
                row += len(piece)
        out.flush()
        del out
        unfinished.replace(path)
    log_p = np.load(path, mmap_mode="r")
    tally, step = Tally(), 64
    for row in range(0, len(targets), step):
        tally.add(log_p[row : row + step].astype(np.float32), targets[row : row + step])
    return Reference(corpus, windows, log_p, *tally.perplexity())


def scores(source: Path, references: Sequence[Reference], ctx: int) -> list[dict[str, Any]]:
    """Scores of a model's weights, unpacked, in the plain torch implementation."""
    decoder = _decoder(source, ctx)
    return [reference.score(partial(_logits, decoder)) for reference in references]


def _decoder(source: Path, ctx: int) -> Any:
    """The model in torch, its weights unpacked to float32."""
    with closing(open_checkpoint(source)) as checkpoint:
        config = read_config(checkpoint, context=ctx)
        return load_decoder(checkpoint, TorchOps(compute_format="f32"), config)


def _logits(decoder: Any, tokens: Sequence[int], first: int) -> Iterator[Logits]:
    """Logits after each of ``tokens`` from index ``first`` on, in pieces."""
    cache = decoder.cache(len(tokens))
    for start in range(0, first, 2 * _ROWS):
        chunk = tokens[start : min(start + 2 * _ROWS, first)]
        decoder.forward(Batch.extend([(cache, chunk)]), rows=[])
    for start in range(first, len(tokens), _ROWS):
        yield decoder.forward(Batch.extend([(cache, tokens[start : start + _ROWS])]))


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


def _key(source: Path, windows: Windows) -> str:
    """A cache key for everything the reference depends on, without reading the whole model."""
    digest = hashlib.sha256(repr(("f32", windows)).encode())
    for path in sorted(source.iterdir()) if source.is_dir() else [source]:
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 20))
    return digest.hexdigest()[:32]
