"""The quality table: formats and methods, against float32 and against other libraries.

    .venv/bin/python benchmarks/quality.py --text prose.txt [--models smollm2,./model.gguf]
        [--formats mxfp4,nvfp4] [--methods rtn,gptq,mr-gptq] [--peers bnb-nf4] [--tokens 8192]
    .venv/bin/python benchmarks/quality.py --text prose.txt --speeds

The reference of a model is its published weights, unpacked, in float32. Rows are printed and saved
as they are done, and those that are saved are not made again: stop it and start it at will. Decode
speeds (``--speeds``) are measured on a quiet machine, all of a model's rows by turns. The JSON
(``--out``) is what ``benchmarks/readme_tables.py`` reads.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this folder: its kernels.py would hide a package of that name

from benchmarks.quality_bench import Bench, Row, jobs  # noqa: E402
from benchmarks.quality_claims import check_claims  # noqa: E402
from benchmarks.quality_peers import PEERS, peer_package  # noqa: E402
from benchmarks.quality_rows import Measure  # noqa: E402
from benchmarks.quality_speeds import measure_speeds  # noqa: E402
from benchmarks.quality_texts import (  # noqa: E402
    Corpus,
    calibration_file,
    prose,
    python_source,
)
from localrt.errors import LocalrtError, OptionError  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.quant.formats import CODECS  # noqa: E402
from localrt.quant.methods import METHODS  # noqa: E402
from localrt.quantizing.quantize import CALIBRATION_TOKENS  # noqa: E402
from localrt.version import __version__  # noqa: E402

MODELS = ("smollm2", "qwen0.5b", "qwen1.5b")
FORMATS = ("int4-g32", "int4-g64", "int4-g32m", "nf4", "mxfp4", "nvfp4", "int5-g32", "int6-g32")


class Results:
    """The JSON file: finished rows, saved one by one. Skipped ones are tried again.

    Raises:
        OptionError: the file holds rows that were measured otherwise.
    """

    def __init__(self, path: Path, settings: dict[str, Any], command: str) -> None:
        self._path = path
        self.record: dict[str, Any] = {"references": [], "rows": []}
        if path.exists():
            self.record = json.loads(path.read_text(encoding="utf-8"))
            if self.record["settings"] != settings:
                theirs = self.record["settings"]
                other = [key for key in settings if theirs.get(key) != settings[key]]
                raise OptionError(
                    f"{path.name} was made with other {', '.join(other)}: choose another --out"
                )
        self.record.update(
            machine=hardware.probe().to_dict(),
            versions=_versions(),
            command=command,
            settings=settings,
        )

    def __contains__(self, key: tuple[str, str]) -> bool:
        return any(_key(row) == key and not row.get("skipped") for row in self.record["rows"])

    def add(self, row: Row) -> None:
        """Save a row in place of an older attempt."""
        kept = [other for other in self.record["rows"] if _key(other) != _key(row)]
        self.record["rows"] = [*kept, row]
        self.save()

    def add_reference(self, row: Row) -> None:
        """Save a model's reference."""
        known = [other for other in self.record["references"] if other["model"] != row["model"]]
        self.record["references"] = [*known, row]
        self.save()

    def add_speeds(self, speeds: Sequence[Row]) -> None:
        """Save the speeds of a model in place of all that it had."""
        models = {one["model"] for one in speeds}
        kept = [one for one in self.record.get("speeds", []) if one["model"] not in models]
        self.record["speeds"] = [*kept, *speeds]
        self.save()

    def save(self) -> None:
        """Write the file whole, with the claims that its rows bear out."""
        self.record["claims"] = [claim.to_dict() for claim in check_claims(self.record["rows"])]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._path)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        corpora = [prose(options.text)] if options.text else []
        corpora += [python_source()] if options.python_source else []
        if not corpora:
            raise OptionError("there is no text: give --text or --python-source")
        own = calibration_file(options.calibration, corpora) if options.calibration else None
        measure = Measure(
            ctx=options.ctx,
            tokens=options.tokens,
            reference_format=options.reference,
            float_format=options.float_format,
        )
        results = Results(options.out, _settings(options, corpora), _command(options))
        if options.speeds:
            return _speeds(options, corpora[0], results)
        todo = list(jobs(options.formats, options.methods, options.peers))
        for name in options.models:
            bench = Bench(
                _source(name),
                corpora,
                measure,
                calibration=own,
                calibration_tokens=options.calibration_tokens,
                cache=options.cache,
                work=options.work,
            )
            missing = [job for job in todo if (bench.name, job.name) not in results]
            if missing:
                results.add_reference(bench.reference_row())
            for job in missing:
                results.add(bench.row(job))
                print(describe(results.record["rows"][-1]), flush=True)
        results.save()
    except LocalrtError as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    print("\nclaims")
    for claim in results.record["claims"]:
        verdict = {True: "holds", False: "FAILS", None: "not measured"}[claim["holds"]]
        print(f"{claim['model']}: {claim['claim']}: {verdict}\n    {claim['numbers']}")
    return 0


def _speeds(options: argparse.Namespace, corpus: Corpus, results: Results) -> int:
    """Measure the speeds of every model's rows, each model's in one run."""
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for name in options.models:
            speeds = measure_speeds(
                _source(name),
                options.formats,
                options.methods,
                corpus.calibration,
                work,
                runs=options.runs,
            )
            results.add_speeds(speeds)
            for one in speeds:
                print(f"{one['model']}  {one['name']:16s} {one['decode_tok_s']:.1f} tok/s")
    return 0


def describe(row: Row) -> str:
    """A row as one line."""
    head = f"{row['model']}  {row['name']:16s}"
    if row.get("skipped"):
        return f"{head} skipped: {row['skipped']}"
    parts = [head, f"{row['bits_per_weight']:.3f} bits"]
    parts += [
        f"{s['text']}/{s['path']} {s['perplexity']:.3f} ({100 * s['change']:+.2f} ± "
        f"{100 * s['change_error']:.2f} %), KL {max(s['kl'], 0):.4f}, top-1 {100 * s['top1']:.1f} %"
        for s in row["scores"]
    ]
    if row.get("no_kernel"):
        parts.append(f"no kernel: {row['no_kernel']}")
    return "; ".join(parts)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def listed(known: Sequence[str] | None) -> Any:
        def parse(text: str) -> list[str]:
            names = [name for name in text.split(",") if name]
            wrong = [name for name in names if known is not None and name not in known]
            if wrong:
                raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
            return names

        return parse

    peers = (*PEERS, "llamacpp")
    cache = Path(tempfile.gettempdir()) / "localrt-quality"
    parser = argparse.ArgumentParser(description="the quality table")
    parser.add_argument("--models", type=listed(None), default=list(MODELS))
    parser.add_argument("--formats", type=listed(tuple(CODECS)), default=list(FORMATS))
    parser.add_argument("--methods", type=listed(METHODS), default=list(METHODS))
    parser.add_argument("--peers", type=listed(peers), default=list(peers), help="may be empty")
    parser.add_argument("--text", type=Path, help="prose: passages between blank lines")
    parser.add_argument("--python-source", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--calibration", type=Path, help="default: what is not evaluated on")
    parser.add_argument("--tokens", type=int, default=8192, help="of each text")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--speeds", action="store_true", help="the rows' decode speeds, and no row")
    parser.add_argument("--runs", type=int, default=5, help="turns of --speeds")
    parser.add_argument("--reference", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--float-format", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--cache", type=Path, default=cache, help="for the reference's logits")
    parser.add_argument("--work", type=Path, help="where quantized models lie for a while")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/quality.json")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """All that a row's numbers depend on beside the model: rows of one table share it."""
    own = options.calibration
    return {
        "ctx": options.ctx,
        "tokens": options.tokens,
        "reference": options.reference,
        "float_format": options.float_format,
        "calibration": own.name if own else "the rest of the texts, in turn",
        "calibration_tokens": options.calibration_tokens,
        "texts": [corpus.to_dict() for corpus in corpora],
    }


def _command(options: argparse.Namespace) -> str:
    """The command without this machine's paths and without the rows that it made this time."""
    parts = ["benchmarks/quality.py"]
    if options.text:
        parts.append(f"--text {options.text.name}")
    if not options.python_source:
        parts.append("--no-python-source")
    if options.calibration:
        parts.append(f"--calibration {options.calibration.name}")
    parts.append(f"--tokens {options.tokens} --ctx {options.ctx}")
    parts.append(f"--calibration-tokens {options.calibration_tokens}")
    return " ".join(parts)


def _source(name: str) -> Path:
    """The file of a test model's short name, or of any MODEL."""
    from localrt.hub import resolve
    from localrt.settings import Settings
    from tests.real_models import FILES, find_real_model

    found = find_real_model(name) if name in FILES else None
    return found or resolve(name, settings=Settings.from_environment()).path


def _versions() -> dict[str, str]:
    versions = {"localrt": __version__}
    for package in ("torch", "llama-cpp-python", *dict.fromkeys(map(peer_package, PEERS)), "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _key(row: Row) -> tuple[str, str]:
    return row["model"], row["name"]


if __name__ == "__main__":
    sys.exit(main())
