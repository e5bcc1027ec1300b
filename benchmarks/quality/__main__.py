"""The quality table: formats and methods, against float32 and against other libraries.

    python -m benchmarks.quality --text prose.txt [--models smollm2,./model.gguf]
        [--formats mxfp4,nvfp4] [--methods rtn,gptq,mr-gptq] [--mixes 3.5] [--llamacpp]
        [--tokens 8192] [--again]

The reference of a model is its published weights, unpacked, in float32. Rows are printed and saved
as they are done, and those that are saved are not made again: stop it and start it at will. With
``--again`` those of our quantizer are, for the formats and methods that are given. Rows of other
libraries, and speeds, were measured once and stay as they are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import find_model, listed, make_parser
from benchmarks.common.record import Record, load, save, setting
from benchmarks.quality.bench import Bench, Row, jobs
from benchmarks.quality.rows import Corpus, Measure, prose, python_source
from localrt.common.errors import LocalrtError, OptionError
from localrt.quant.formats import CODECS
from localrt.quant.methods import METHODS
from localrt.quantize.quantize import CALIBRATION_TOKENS

MODELS = ("smollm2", "qwen0.5b", "qwen1.5b")
FORMATS = ("int4-g32", "int4-g64", "int4-g32m", "nf4", "mxfp4", "nvfp4", "int5-g32", "int6-g32")


PACKAGES = ("torch", "llama-cpp-python", "numpy")


class Results:
    """The JSON file: finished rows, saved one by one. Skipped ones are tried again.

    Raises:
        OptionError: the file holds rows that were measured otherwise.
    """

    def __init__(self, path: Path, settings: dict[str, Any], command: str) -> None:
        self._path = path
        self.record: Record = load(path, references=[], rows=[], settings=settings)
        theirs = self.record["settings"]
        if other := [key for key in settings if theirs.get(key) != settings[key]]:
            raise OptionError(
                f"{path.name} was made with other {', '.join(other)}: choose another --json"
            )
        self.record |= {**setting(command, *PACKAGES), "settings": settings}

    def __contains__(self, key: tuple[str, str]) -> bool:
        rows = self.record["rows"]
        return any((row["model"], row["name"]) == key and not row.get("skipped") for row in rows)

    def put(self, kind: str, rows: Sequence[Row], *keys: str) -> None:
        """Save ``rows`` in place of all that have the same ``keys``."""
        new = [tuple(row[key] for key in keys) for row in rows]
        old = self.record.get(kind, [])
        kept = [row for row in old if tuple(row[key] for key in keys) not in new]
        self.record[kind] = [*kept, *rows]
        save(self._path, self.record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, row by row."""
    options = _parse(arguments)
    try:
        corpora = [prose(options.text), *([python_source()] if options.python_source else [])]
        sizes = {name: getattr(options, name) for name in ("tokens", "ctx", "calibration_tokens")}
        # Without this machine's paths, and without the rows that it makes this time.
        words = [f"--{name.replace('_', '-')} {size}" for name, size in sizes.items()]
        command = " ".join(["python -m benchmarks.quality --text", options.text.name, *words])
        texts = [corpus.to_dict() for corpus in corpora]
        results = Results(options.json, {**sizes, "texts": texts}, command)
        for name in options.models:
            _rows(options, name, corpora, results)
    except LocalrtError as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    return 0


def _rows(
    options: argparse.Namespace, name: str, corpora: Sequence[Corpus], results: Results
) -> None:
    """A model's rows that are missing."""
    bench = Bench(
        find_model(name),
        corpora,
        Measure(ctx=options.ctx, tokens=options.tokens),
        calibration_tokens=options.calibration_tokens,
        cache=options.cache,
        work=options.work,
    )
    todo = jobs(options.formats, options.methods, options.mixes, llamacpp=options.llamacpp)
    missing = [
        job
        for job in todo
        if (bench.name, job.name) not in results or (options.again and job.method is not None)
    ]
    if missing:
        results.put("references", [bench.reference_row()], "model")
    for job in missing:
        results.put("rows", [bench.row(job)], "model", "name")
        print(describe(results.record["rows"][-1]), flush=True)


def describe(row: Row) -> str:
    """A row as one line."""
    scores = [
        f"{s['text']}/{s['path']} {100 * s['change']:+.2f} ± {100 * s['change_error']:.2f} %"
        for s in row["scores"]
    ]
    if row.get("skipped"):
        scores = [f"skipped: {row['skipped']}"]
    return f"{row['model']}  {row['name']:16s} {'; '.join(scores)}"


def _bits(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(tempfile.gettempdir()) / "localrt-quality"
    parser = make_parser(__doc__, results="quality")
    parser.add_argument("--models", type=listed(), default=list(MODELS))
    parser.add_argument("--formats", type=listed(CODECS), default=list(FORMATS))
    parser.add_argument("--methods", type=listed(METHODS), default=list(METHODS))
    parser.add_argument("--mixes", type=_bits, default=[], help="bits per weight, like 3.44,4")
    parser.add_argument("--llamacpp", action="store_true", help="a row of its engine, too")
    parser.add_argument("--text", type=Path, required=True, help="passages between blank lines")
    parser.add_argument("--python-source", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of each text")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--again", action="store_true", help="make saved rows of formats anew")
    parser.add_argument("--cache", type=Path, default=cache, help="for the reference's logits")
    parser.add_argument("--work", type=Path, help="where quantized models lie for a while")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
