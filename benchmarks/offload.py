"""Models larger than memory, measured: every number of the offloading pipeline by one command.

    .venv/bin/python benchmarks/offload.py [MODEL] [--only WORDS] [--again WORDS]

Each engine runs in a memory control group (root, or a delegated one), the page cache dropped
before it. Rows are written to ``benchmarks/results/offload.json`` as they are done, and a row that
is there is not measured again unless ``--again`` names it. ``benchmarks/readme_tables.py`` makes
the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder: its kernels.py would hide a package of that name

import localrt  # noqa: E402
from localrt.bench.outcome import BenchOptions, Outcome  # noqa: E402
from localrt.bench.report import to_json, to_table  # noqa: E402
from localrt.bench.runner import run_bench  # noqa: E402
from localrt.bench.workload import Workload  # noqa: E402
from localrt.errors import LocalrtError  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.settings import Settings  # noqa: E402

RESULTS = ROOT / "benchmarks/results/offload.json"
PACKAGES = ("localrt", "llama-cpp-python", "torch", "transformers", "accelerate", "numpy")
MB = 1_000_000

LIMITS = tuple(size * MB for size in (1000, 850, 700, 500))
STREAMERS_LIMIT = 2500 * MB  # what Accelerate and AirLLM need
LLAMACPP = ("plain", "repacked")  # both mapped
# Just below what the resident engine asks for, and more than the pipeline needs: all is resident.
PIPELINE_RAM = 1190 * MB

# A card scaled to a model of 1.1 GB, as 8 GB are to a model of 30 GB.
CARD = "virtual:300MB@12GB/s,256GB/s,20TFLOPS"
CARD_RAM = 600 * MB


class Named(Protocol):
    """A row of any benchmark that goes on where it stopped."""

    @property
    def name(self) -> str:
        """What ``--only`` and ``--again`` look for."""


AnyRow = TypeVar("AnyRow", bound=Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: an engine under a limit, or several that take turns."""

    name: str
    engines: tuple[str, ...]
    workload: Workload
    memory_limit: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def options(self, path: Path, threads: int, settings: Settings) -> BenchOptions:
        """As the runner takes them."""
        return BenchOptions(
            path=path,
            engines=self.engines,
            workload=self.workload,
            memory_limit=self.memory_limit,
            threads=threads,
            settings={"llamacpp": LLAMACPP} if self.memory_limit is not None else None,
            cache=settings.cache_dir / "bench",
            stores=settings.data_dir / "stores",
            **self.more,
        )


def all_rows() -> Iterator[Row]:
    """In the order they are measured: what matters most first, the slow peers last."""
    for limit in LIMITS:
        name = f"{limit // MB} MB"
        yield Row(
            name=f"{name} native",
            engines=("native",),
            workload=Workload(prompt_tokens=32, tokens=64, runs=5),
            memory_limit=limit,
        )
    yield Row(
        name="no limit native",  # alone: both fit at once and take turns
        engines=("native",),
        workload=Workload(prompt_tokens=32, tokens=64, runs=7),
        more={"variants": {"resident": {}, "pipeline": {"ram": PIPELINE_RAM}}},
    )
    yield Row(
        name="virtual card",
        engines=("native",),
        workload=Workload(prompt_tokens=32, tokens=32, runs=5),
        more={"device": CARD, "ram": CARD_RAM},
    )
    yield Row(
        name="no limit llamacpp",
        engines=("llamacpp",),
        workload=Workload(prompt_tokens=32, tokens=64, runs=5),
    )
    for limit in LIMITS:
        yield Row(
            name=f"{limit // MB} MB llamacpp",
            engines=("llamacpp",),
            workload=Workload(prompt_tokens=8, tokens=16, runs=5),
            memory_limit=limit,
        )
    # Tens of seconds a token.
    for engine, tokens in (("accelerate", 4), ("airllm", 3)):
        yield Row(
            name=f"{STREAMERS_LIMIT // MB} MB {engine}",
            engines=(engine,),
            workload=Workload(prompt_tokens=8, tokens=tokens, runs=5),
            memory_limit=STREAMERS_LIMIT,
        )


def measure(row: Row, path: Path, threads: int, machine: hardware.Machine) -> dict[str, Any]:
    """Run a row; what an engine could not do stands in ``skipped``."""
    options = row.options(path, threads, Settings.from_environment())
    try:
        outcome = run_bench(options, notify=lambda line: print(f"  {line}", flush=True))
    except LocalrtError as error:
        return {"name": row.name, "results": [], "skipped": [{"reason": str(error)}]}
    print(to_table(outcome, options, name=path.name, machine=machine), flush=True)
    return row_record(row, options, outcome, machine)


def row_record(
    row: Row, options: BenchOptions, outcome: Outcome, machine: hardware.Machine
) -> dict[str, Any]:
    """What of a row is kept: the names of ``localrt bench --json``."""
    report = to_json(outcome, options, name="", machine=machine, versions={}, command="")
    for name in ("machine", "versions", "command", "model"):
        del report[name]
    return {"name": row.name, **report}


def load_record(path: Path) -> dict[str, Any]:
    """The results so far; empty when there are none."""
    if not path.exists():
        return {"rows": []}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def save_record(path: Path, record: Mapping[str, Any]) -> None:
    """Whole or not at all: a run may be stopped at any time."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def pending(
    rows: Sequence[AnyRow], record: Mapping[str, Any], only: Sequence[str], again: Sequence[str]
) -> list[AnyRow]:
    """Rows to measure: without results yet, or named by ``again``; of those named by ``only``."""
    done = {row["name"] for row in record["rows"] if row["results"]}

    def named(row: AnyRow, words: Sequence[str]) -> bool:
        return any(word in row.name for word in words)

    wanted = [row for row in rows if not only or named(row, only)]
    return [row for row in wanted if row.name not in done or named(row, again)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="models larger than memory, measured")
    parser.add_argument("model", nargs="?", default="qwen1.5b", metavar="MODEL")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this")
    parser.add_argument("--again", action="append", default=[], help="measure these anew")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    path = _source(args.model)
    machine = hardware.probe()
    record = load_record(args.json)
    rows = list(all_rows())
    todo = pending(rows, record, args.only, args.again)
    for number, row in enumerate(todo, 1):
        print(f"{row.name} ({number} of {len(todo)})", flush=True)
        made = {row.name: measure(row, path, args.threads, machine)}
        kept = {old["name"]: old for old in record["rows"]}
        order = [row.name for row in rows]
        record = {
            "command": f"benchmarks/offload.py {path.name} --threads {args.threads}",
            "model": path.name,
            "machine": machine.to_dict(),
            "versions": dict(_versions()),
            "rows": [both[name] for name in order if name in (both := {**kept, **made})],
        }
        save_record(args.json, record)
    from benchmarks.offload_tables import offload_table

    print(offload_table(record))
    return 0


def _source(name: str) -> Path:
    """The file of a test model's short name, or of any MODEL."""
    from localrt.hub import resolve
    from tests.real_models import FILES, find_real_model

    found = find_real_model(name) if name in FILES else None
    return found or resolve(name, settings=Settings.from_environment()).path


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, localrt.__version__ if package == "localrt" else version(package)
        except PackageNotFoundError:
            continue


if __name__ == "__main__":
    sys.exit(main())
