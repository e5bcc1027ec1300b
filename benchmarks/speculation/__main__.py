"""Speculation in numbers: every row of its table by one command.

    python -m benchmarks.speculation --humaneval FILE --mtbench FILE [--only WORDS] [--again WORDS]

Rows are saved as they are done, and a row that is there is not measured again unless ``--again``
names it. Rows under a memory limit need a memory control group (root, or a delegated one). Every
generation is compared with plain decoding, token by token. ``python -m benchmarks.tables`` makes
the tables.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import Record, load, pending, save_row, setting
from benchmarks.speculation import rows
from benchmarks.speculation.run import Setup
from benchmarks.speculation.tables import speculation_table
from localrt.errors import LocalrtError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: how it is made, of how many prompts and tokens, and how often each."""

    name: str
    measure: Callable[[Setup, int, int, int], dict[str, Any]]
    prompts: int
    tokens: int = 128
    rounds: int = 1


ROWS = (
    Row(name="tokens per pass", measure=rows.tokens_per_pass, prompts=6),
    Row(name="resident, 0.5B draft", measure=rows.resident_draft, prompts=8, rounds=3),
    Row(name="n-gram, repeated text", measure=rows.ngram, prompts=24, tokens=160),
    Row(name="850 MB, draft besides", measure=rows.own_limit, prompts=4),
    Row(name="1000 MB in all", measure=rows.in_all, prompts=4),
)


def measure(row: Row, setup: Setup) -> Record:
    """Run a row; what could not be done stands in ``skipped``."""
    sizes = {"prompts": row.prompts, "tokens": row.tokens, "rounds": row.rounds}
    started = time.perf_counter()
    try:
        measured = row.measure(setup, **sizes)
    except LocalrtError as error:
        measured = {"results": [], "skipped": str(error)}
    seconds = round(time.perf_counter() - started, 1)
    made = {"name": row.name, **sizes, "seconds": seconds, "skipped": None, **measured}
    cleaned: dict[str, Any] = without_folders(made, setup)
    return cleaned


def without_folders(value: Any, setup: Setup) -> Any:
    """``value`` with models named by their files alone: messages have what was given to load."""
    if isinstance(value, dict):
        return {key: without_folders(each, setup) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each, setup) for each in value]
    if isinstance(value, str):
        for path in (setup.target, setup.draft):
            value = value.replace(str(path), path.name)
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, row by row."""
    parser = make_parser(__doc__, results="speculation")
    parser.add_argument("--target", default="qwen1.5b", metavar="MODEL")
    parser.add_argument("--draft", default="qwen0.5b", metavar="MODEL")
    parser.add_argument("--humaneval", type=Path, required=True, help="JSON lines with a prompt")
    parser.add_argument("--mtbench", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this")
    parser.add_argument("--again", action="append", default=[], help="measure these anew")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    setup = Setup(
        target=find_model(args.target),
        draft=find_model(args.draft),
        humaneval=args.humaneval,
        mtbench=args.mtbench,
        threads=args.threads,
    )
    record = load(args.json, rows=[])
    where = setting(cited_command("speculation", arguments), "numpy")
    where |= {"target": setup.target.name, "draft": setup.draft.name}
    todo = pending(ROWS, record, args.only, args.again)
    for number, row in enumerate(todo, 1):
        print(f"{row.name} ({number} of {len(todo)})", flush=True)
        made = measure(row, setup)
        for result in made["results"]:
            print(f"  {result['what']}: {result['value']:.3g} {result['unit']}")
        print(f"  {made['skipped'] or made['checked']} in {made['seconds']} s", flush=True)
        record = save_row(args.json, record, made, [row.name for row in ROWS], **where)
    if record["rows"]:
        print(speculation_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
