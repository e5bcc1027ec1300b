"""The quality table: what formats and methods of quantizing cost, against the published weights.

    python -m benchmarks.quality --text prose.txt [--models smollm2,./model.gguf]
        [--formats mxfp4,nvfp4] [--methods rtn,gptq,mr-gptq]
        [--tokens 8192] [--again WORD ...]

The reference is the model's published weights, unpacked to float32, and so are those that are
compared with it: what kernels round is not part of it (``localrt eval`` measures that). Rows are
saved as they are done and not made again, unless their names contain a word of ``--again``: a run
may be stopped and restarted at any time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
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
    bits_per_weight,
    interleaved,
    prose,
    python_source,
    scores,
)
from localrt.common.errors import LocalrtError, OptionError
from localrt.quant.formats import CODECS
from localrt.quant.methods import METHODS
from localrt.quantize.quantize import CALIBRATION_TOKENS, Recipe, quantize_model

MODELS = ("smollm2", "qwen0.5b", "qwen1.5b")
FORMATS = ("int4-g32", "nf4", "mxfp4", "nvfp4")
_MOST_CALIBRATED_BITS = 5.1  # with more bits, rounding to nearest loses next to nothing


@dataclass(frozen=True, slots=True)
class Job:
    """A row to make: a format by a method."""

    weights: str
    format: str
    method: str


def jobs(formats: Sequence[str], methods: Sequence[str]) -> Iterator[Job]:
    """All rows of a model. Formats wider than four bits are only rounded to nearest."""
    for name in formats:
        for method in methods:
            if method == "rtn" or CODECS[name].format.bits_per_weight <= _MOST_CALIBRATED_BITS:
                yield Job(f"{name} {method}", name, method)


class Bench:
    """One model and its rows."""

    def __init__(
        self, source: Path, corpora: Sequence[Corpus], options: argparse.Namespace
    ) -> None:
        self.source, self.name = source, source.stem
        self._corpora, self._options = corpora, options

    def row(self, job: Job) -> Record:
        """Make one row; if that fails, the row says why."""
        row: Record = {"name": f"{self.name}, {job.weights}", "model": self.name}
        row |= {"weights": job.weights, "bits_per_weight": None, "scores": []}
        try:
            # The data folder that loading a model writes to is temporary, too.
            with (
                tempfile.TemporaryDirectory() as folder,
                patch.dict(os.environ, {"XDG_DATA_HOME": folder}),
            ):
                store = Path(folder) / "store"
                self._quantize(job, store)
                row["bits_per_weight"] = bits_per_weight(store)
                sizes = {name: getattr(self._options, name) for name in ("ctx", "tokens")}
                row["scores"] = scores(store, self.source, self._corpora, **sizes)
        except LocalrtError as error:
            row["skipped"] = str(error)
        return row

    def _quantize(self, job: Job, store: Path) -> None:
        recipe = Recipe(
            job.format,
            method=job.method,
            calibration=None if job.method == "rtn" else self._calibration_ids,
            calibration_tokens=self._options.calibration_tokens,
        )
        quantize_model(self.source, store, recipe)

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
        results = Results(options.json, command, "torch", "numpy", settings=settings)
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
    todo = jobs(options.formats, options.methods)
    named = {f"{bench.name}, {job.weights}": job for job in todo}
    for name in results.pending(named, again=options.again):
        row = bench.row(named[name])
        if plain := {score["text"]: score.pop("reference") for score in row["scores"]}:
            known = results.record.get("references", {})
            results.record["references"] = {**known, bench.name: plain}
        results.put(row)


def quality_table(record: Mapping[str, Any]) -> str:
    """Perplexity change due to the weights alone, by model and text."""
    references = record.get("references", {})
    columns = [(model, text) for model, texts in references.items() for text in texts]
    found = {
        (row["weights"], row["model"], score["text"]): (row["bits_per_weight"], score["change"])
        for row in record["rows"]
        for score in row["scores"]
    }
    lines = [["reference (perplexity)", "", *(f"{references[m][text]:.2f}" for m, text in columns)]]
    for weights in dict.fromkeys(key[0] for key in found):
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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, results="quality")
    parser.add_argument("--models", type=listed(), default=list(MODELS))
    parser.add_argument("--formats", type=listed(CODECS), default=list(FORMATS))
    parser.add_argument("--methods", type=listed(METHODS), default=list(METHODS))
    parser.add_argument("--text", type=Path, required=True, help="passages between blank lines")
    parser.add_argument("--python-source", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of each text")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--again", nargs="+", default=[], metavar="WORD", help="rows to make anew")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
