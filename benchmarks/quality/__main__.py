"""The quality table: formats and methods, against float32 and against other libraries.

    python -m benchmarks.quality --text prose.txt [--models smollm2,./model.gguf]
        [--formats mxfp4,nvfp4] [--methods rtn,gptq,mr-gptq] [--llamacpp]
        [--tokens 8192] [--again WORD ...]

The reference is the model's published weights, unpacked to float32. Rows are saved as they are done
and not made again, unless their names contain a word of ``--again``: a run may be stopped and
restarted at any time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import localrt
from benchmarks.common.command import find_model, listed, make_parser
from benchmarks.common.record import Record, Results, captioned, markdown_table
from benchmarks.quality.rows import (
    Corpus,
    Reference,
    bits_per_weight,
    float_scores,
    interleaved,
    kernel_scores,
    make_reference,
    prose,
    python_source,
)
from localrt.common.errors import LocalrtError, OptionError
from localrt.quant.formats import CODECS
from localrt.quant.methods import METHODS, default_method
from localrt.quantize.quantize import CALIBRATION_TOKENS, Recipe, quantize_model

MODELS = ("smollm2", "qwen0.5b", "qwen1.5b")
FORMATS = ("int4-g32", "int4-g64", "int4-g32m", "nf4", "mxfp4", "nvfp4", "int5-g32", "int6-g32")
PACKAGES = ("torch", "llama-cpp-python", "numpy")
_MOST_CALIBRATED_BITS = 5.1  # with more bits, rounding to nearest loses next to nothing


@dataclass(frozen=True, slots=True)
class Job:
    """A row to make: a format by a method, or the published weights on an engine."""

    weights: str
    format: str | None = None
    method: str | None = None
    engine: str = "native"


def jobs(
    formats: Sequence[str], methods: Sequence[str], *, llamacpp: bool = False
) -> Iterator[Job]:
    """All rows of a model. Formats wider than four bits are only rounded to nearest."""
    yield Job("published")
    if llamacpp:
        yield Job("llamacpp", engine="llamacpp")
    for name in formats:
        format_ = CODECS[name].format
        for method in methods:
            if method == "rtn" or format_.bits_per_weight <= _MOST_CALIBRATED_BITS:
                yield Job(f"{name} {method}", format=name, method=method)


class Bench:
    """One model: its references, created on first use, and its rows."""

    def __init__(
        self, source: Path, corpora: Sequence[Corpus], options: argparse.Namespace
    ) -> None:
        self.source, self.name = source, source.stem
        self._corpora, self._options = corpora, options

    @cached_property
    def references(self) -> list[Reference]:
        """Log-probabilities of every text, from the cache if present."""
        of = self._options
        return [
            make_reference(self.source, each, of.cache, ctx=of.ctx, tokens=of.tokens)
            for each in self._corpora
        ]

    def row(self, job: Job) -> Record:
        """Make one row; if that fails, the row says why."""
        row: Record = {"name": f"{self.name}, {job.weights}", "model": self.name}
        row |= {"weights": job.weights, "format": job.format, "method": job.method}
        row |= {"bits_per_weight": None, "quantize_s": None, "scores": []}
        try:
            if job.format is None:
                self._run(row, self.source, job.engine)
            else:
                # The data folder that loading a model writes to is temporary, too.
                with (
                    tempfile.TemporaryDirectory(dir=self._options.work) as folder,
                    patch.dict(os.environ, {"XDG_DATA_HOME": folder}),
                ):
                    store = Path(folder) / "store"
                    start = time.perf_counter()
                    row |= self._quantize(job.format, job.method, store)
                    row["quantize_s"] = time.perf_counter() - start
                    self._run(row, store, "native")
        except LocalrtError as error:
            row |= {"scores": [], "skipped": str(error)}
        return row

    def _run(self, row: Record, source: Path, engine: str) -> None:
        """Fill in the row: with the engine's kernels, and for native also in floating point."""
        references, ctx = self.references, self._options.ctx
        row["bits_per_weight"] = bits_per_weight(source)
        try:
            row["scores"] = kernel_scores(source, references, ctx, engine=engine)
        except LocalrtError as error:
            if engine != "native":
                raise
            row["no_kernel"] = str(error)
        if engine == "native":
            row["scores"] += float_scores(source, references, ctx)

    def _quantize(self, format_: str, method: str | None, store: Path) -> Record:
        """Write the store; returns facts about it."""
        recipe = Recipe(
            format_,
            method=method,
            calibration=None if method == "rtn" else self._calibration_ids,
            calibration_tokens=self._options.calibration_tokens,
        )
        report = quantize_model(self.source, store, recipe)
        return {
            "default": method == default_method(CODECS[format_].format, calibrated=True),
            "calibration_tokens": report.calibration_tokens,
            "head_format": report.head_format,
            "fallbacks": dict(Counter(report.fallbacks.values())),
            "formats": dict(report.formats),
            "loss": report.loss,
        }

    @cached_property
    def _calibration_ids(self) -> list[int]:
        with localrt.load(self.source, ctx=self._options.ctx, engine="native") as model:
            encode = model.tokenizer.encode
            parts = [encode(corpus.calibration, add_special=False) for corpus in self._corpora]
        return interleaved(parts, total=self._options.calibration_tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure missing rows, one by one."""
    options = _parse(arguments)
    sizes = {name: getattr(options, name) for name in ("tokens", "ctx", "calibration_tokens")}
    # Omit this machine's paths and the choice of rows.
    words = [f"--{name.replace('_', '-')} {size}" for name, size in sizes.items()]
    command = " ".join(["python -m benchmarks.quality --text", options.text.name, *words])
    try:
        corpora = [prose(options.text), *([python_source()] if options.python_source else [])]
        settings = {**sizes, "texts": [corpus.to_dict() for corpus in corpora]}
        results = Results(options.json, command, *PACKAGES, settings=settings)
        theirs = results.record.get("settings", settings)
        if other := [key for key in settings if theirs.get(key) != settings[key]]:
            raise OptionError(
                f"{options.json.name} was made with other {', '.join(other)}: choose another --json"
            )
        for name in options.models:
            _rows(options, Bench(find_model(name), corpora, options), results)
    except LocalrtError as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    if results.rows:
        print(quality_table(results.record))
    return 0


def _rows(options: argparse.Namespace, bench: Bench, results: Results) -> None:
    """Make a model's missing rows."""
    todo = jobs(options.formats, options.methods, llamacpp=options.llamacpp)
    named = {f"{bench.name}, {job.weights}": job for job in todo}
    for name in results.pending(named, again=options.again):
        plain = {each.corpus.name: each.perplexity for each in bench.references}
        results.record["references"] = {**results.record.get("references", {}), bench.name: plain}
        results.put(bench.row(named[name]))


_SHOWN = ("int4-g32", "nf4", "mxfp4", "nvfp4", "q3_k", "q2_k")


def quality_table(record: Mapping[str, Any]) -> str:
    """Perplexity change due to the weights alone, by model and text: formats by default method and
    by rounding.
    """
    references = record["references"]
    columns = [(model, text) for model, texts in references.items() for text in texts]
    found = {
        (row["weights"], row["model"], score["text"]): (row["bits_per_weight"], score["change"])
        for row in record["rows"]
        for score in row["scores"]
        if score["path"] == "float" and _is_shown(row)
    }
    lines = [["reference (perplexity)", "", *(f"{references[m][text]:.2f}" for m, text in columns)]]
    for weights in sorted(dict.fromkeys(key[0] for key in found), key=_order):
        bits = [bits for key, (bits, _) in found.items() if key[0] == weights]
        low, high = f"{min(bits):.2f}", f"{max(bits):.2f}"
        cells = [found.get((weights, *column)) for column in columns]
        changes = [f"{100 * cell[1]:+.1f} %" if cell else "" for cell in cells]
        lines.append([weights, low if low == high else f"{low}-{high}", *changes])
    heads = [f"{re.sub('-[Ii]nstruct', '', model)}, {text}" for model, text in columns]
    settings = record["settings"]
    sources = "; ".join(f"{text['name']}: {text['source']}" for text in settings["texts"])
    about = (
        f"{settings['tokens']} tokens of each text in windows of {settings['ctx']}, of which the "
        f"second half is scored ({sources})"
    )
    return captioned(record, markdown_table(["weights", "bits", *heads], lines), about)


def _is_shown(row: Mapping[str, Any]) -> bool:
    few = row["format"] in ("q3_k", "q2_k")  # too few bits for rounding to nearest
    return row["format"] in _SHOWN and (row["default"] or (row["method"] == "rtn" and not few))


def _order(weights: str) -> tuple[int, bool]:
    format_, _, method = weights.partition(" ")
    return _SHOWN.index(format_), method != "rtn"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(tempfile.gettempdir()) / "localrt-quality"
    parser = make_parser(__doc__, results="quality")
    parser.add_argument("--models", type=listed(), default=list(MODELS))
    parser.add_argument("--formats", type=listed(CODECS), default=list(FORMATS))
    parser.add_argument("--methods", type=listed(METHODS), default=list(METHODS))
    parser.add_argument("--llamacpp", action="store_true", help="a row of its engine, too")
    parser.add_argument("--text", type=Path, required=True, help="passages between blank lines")
    parser.add_argument("--python-source", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of each text")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--again", nargs="+", default=[], metavar="WORD", help="rows to make anew")
    parser.add_argument("--cache", type=Path, default=cache, help="for the reference's logits")
    parser.add_argument("--work", type=Path, help="where quantized models lie for a while")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
