"""All rows of one model: which there are, and how each is made.

A row's model is quantized into a folder that is removed again, measured, and described as plain
values for JSON. It knows no command line and no results file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import localrt
from benchmarks.quality.rows import (
    Corpus,
    Measure,
    Reference,
    bits_per_weight,
    float_scores,
    interleaved,
    kernel_scores,
    make_reference,
)
from localrt.common.errors import LocalrtError
from localrt.planning.mix import MIX_METHOD
from localrt.quant.formats import CODECS
from localrt.quant.methods import default_method
from localrt.quantize.quantize import Recipe, quantize_model

_VARIABLE = "XDG_DATA_HOME"


@contextmanager
def own_data_folder() -> Iterator[None]:
    """What loading a model writes into the data folder is gone when the block ends."""
    before = os.environ.get(_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before


Row = dict[str, Any]
_MOST_CALIBRATED_BITS = 5.1  # above, rounding to nearest loses next to nothing


@dataclass(frozen=True, slots=True)
class Job:
    """A row to make: a format by a method, a mix of so many bits, or the published weights on an
    engine.
    """

    name: str
    format: str | None = None
    bits: float | None = None
    method: str | None = None
    engine: str = "native"


def jobs(
    formats: Sequence[str],
    methods: Sequence[str],
    mixes: Sequence[float] = (),
    *,
    llamacpp: bool = False,
) -> Iterator[Job]:
    """All rows of a model. Wider formats than four bits are rounded to nearest only."""
    yield Job("published")
    if llamacpp:
        yield Job("llamacpp", engine="llamacpp")
    for name in formats:
        format_ = CODECS[name].format
        for method in methods:
            if method == "rtn" or format_.bits_per_weight <= _MOST_CALIBRATED_BITS:
                yield Job(f"{name} {method}", format=name, method=method)
    for bits in mixes:
        yield Job(f"mix of {bits:g} bits", bits=bits, method=MIX_METHOD)


class Bench:
    """One model: its references, made when the first row needs them, and its rows.

    Logits are kept in ``cache``, quantized models for a while in ``work``.
    """

    def __init__(
        self,
        source: Path,
        corpora: Sequence[Corpus],
        measure: Measure,
        *,
        calibration_tokens: int,
        cache: Path,
        work: Path | None,
    ) -> None:
        self.source, self.name = source, source.stem
        self._corpora, self._measure = corpora, measure
        self._calibration_tokens = calibration_tokens
        self._cache, self._work = cache, work

    @cached_property
    def references(self) -> list[Reference]:
        """Log-probabilities of every text, from the cache where they are there."""
        return [
            make_reference(self.source, corpus, self._measure, self._cache)
            for corpus in self._corpora
        ]

    def reference_row(self) -> Row:
        """The reference's own perplexities."""
        return {
            "model": self.name,
            "texts": [
                {
                    "text": reference.corpus.name,
                    "perplexity": reference.perplexity,
                    "perplexity_error": reference.perplexity_error,
                    "scored_tokens": len(reference.log_p),
                }
                for reference in self.references
            ],
        }

    def row(self, job: Job) -> Row:
        """Make one row; what cannot be made becomes a row that says why."""
        row: Row = {
            "model": self.name,
            "name": job.name,
            "format": job.format,
            "method": job.method,
            "bits_per_weight": None,
            "quantize_s": None,
            "scores": [],
        }
        try:
            if job.method is None:
                self._run(row, self.source, job.engine)
            else:
                with (
                    tempfile.TemporaryDirectory(dir=self._work) as folder,
                    own_data_folder(),
                ):
                    store = Path(folder) / "store"
                    start = time.perf_counter()
                    row.update(self._quantize(job, store))
                    row["quantize_s"] = time.perf_counter() - start
                    self._run(row, store, "native")
        except LocalrtError as error:
            row.update(scores=[], skipped=str(error))
        return row

    def _run(self, row: Row, source: Path, engine: str) -> None:
        """Fill in the row: on the engine's own kernels, and natively in floating point too."""
        references, measure = self.references, self._measure
        row["bits_per_weight"] = bits_per_weight(source)
        try:
            row["scores"] = kernel_scores(source, references, measure, engine=engine)
        except LocalrtError as error:
            if engine != "native":
                raise
            row["no_kernel"] = str(error)
        if engine == "native":
            row["scores"] += float_scores(source, references, measure)

    def _quantize(self, job: Job, store: Path) -> Row:
        """Write the store; what there is to say about it."""
        recipe = Recipe(
            job.format,
            method=job.method,
            calibration=None if job.method == "rtn" else self._calibration_ids,
            calibration_tokens=self._calibration_tokens,
            bits=job.bits,
        )
        # Of several mixes the first measures what formats cost.
        report = quantize_model(self.source, store, recipe, losses=self._cache / "losses")
        calibrated = job.format and default_method(CODECS[job.format].format, calibrated=True)
        return {
            "default": job.method == (calibrated or MIX_METHOD),
            "calibration_tokens": report.calibration_tokens,
            "head_format": report.head_format,
            "fallbacks": dict(Counter(report.fallbacks.values())),
            "formats": dict(report.formats),
            "loss": report.loss,
        }

    @cached_property
    def _calibration_ids(self) -> list[int]:
        with localrt.load(self.source, ctx=self._measure.ctx, engine="native") as model:
            encode = model.tokenizer.encode
            parts = [encode(corpus.calibration, add_special=False) for corpus in self._corpora]
        return interleaved(parts, total=self._calibration_tokens)
