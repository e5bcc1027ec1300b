"""Speculation in numbers: every row of its table by one command.

    python -m benchmarks.speculation --humaneval FILE --mtbench FILE [--head FOLDER] \\
        [--only WORDS] [--again WORDS]

Rows are saved as they are done, and a row that is there is not measured again unless ``--again``
names it. Rows under a memory limit need a memory control group (root, or a delegated one). Every
generation is compared with plain decoding, token by token. ``python -m benchmarks.tables`` makes
the tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.command import find_model, make_parser
from benchmarks.common.record import Record, load, pending, save_row, setting
from benchmarks.speculation import limited
from benchmarks.speculation import rows as resident
from benchmarks.speculation.run import Setup
from benchmarks.speculation.tables import speculation_table
from localrt.drafts.head import TRAINED
from localrt.errors import LocalrtError
from localrt.settings import Settings
from localrt.speculative.draft_head_file import is_head_folder

# An 8 GB card beside a target of 16 GB, scaled to this one: half of it, and the draft just fits.
# Its rates are those of a real card: bytes take as long, there are fewer.
CARD = "virtual:560MB@12GB/s,256GB/s,20TFLOPS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: how it is made, of how many prompts and tokens, and how often each."""

    name: str
    measure: Callable[[Setup, int, int, int], dict[str, Any]]
    prompts: int
    tokens: int = 128
    rounds: int = 1


ROWS = (
    Row(name="tokens per pass", measure=resident.tokens_per_pass, prompts=6),
    Row(name="resident, 0.5B draft", measure=resident.resident_draft, prompts=8, rounds=3),
    Row(name="resident, trained head", measure=resident.resident_head, prompts=10, rounds=3),
    Row(name="n-gram, repeated text", measure=resident.ngram, prompts=24, tokens=160),
    Row(name="llama.cpp, resident", measure=resident.llamacpp_resident, prompts=4),
    Row(name="850 MB, draft besides", measure=limited.own_limit, prompts=4),
    Row(name="1000 MB in all", measure=limited.in_all, prompts=4),
    Row(name="draft in load bubbles", measure=limited.bubbles, prompts=3, rounds=2),
    Row(name="virtual card", measure=resident.card_draft, prompts=4, tokens=64),
    Row(name="K from 1 to 512", measure=resident.curve, prompts=3),
)


def measure(row: Row, setup: Setup) -> Record:
    """Run a row; what could not be done stands in ``skipped``."""
    sizes = {
        "prompts": setup.prompts or row.prompts,
        "tokens": setup.tokens or row.tokens,
        "rounds": setup.rounds or row.rounds,
    }
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
        heads = [] if setup.head is None else [Path(setup.head)]
        for path in (setup.target, setup.draft, setup.small, *heads):
            value = value.replace(str(path), path.name)
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, row by row."""
    args = _arguments(arguments)
    setup = _setup(args)
    record = load(args.json, rows=[])
    where = setting(_command(args, setup), "llama-cpp-python", "numpy")
    where |= {name: getattr(setup, name).name for name in ("target", "draft", "small")}
    todo = pending(ROWS, record, args.only, args.again)
    for number, row in enumerate(todo, 1):
        print(f"{row.name} ({number} of {len(todo)})", flush=True)
        made = measure(row, setup)
        print(_summary(made), flush=True)
        record = save_row(args.json, record, made, [row.name for row in ROWS], **where)
    if record["rows"]:
        print(speculation_table(record))
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, results="speculation")
    parser.add_argument("--target", default="qwen1.5b", metavar="MODEL")
    parser.add_argument("--draft", default="qwen0.5b", metavar="MODEL")
    parser.add_argument("--small", default="smollm2", metavar="MODEL", help="the head's target")
    parser.add_argument("--head", metavar="FOLDER", help="a head trained for it")
    parser.add_argument("--humaneval", type=Path, required=True, help="JSON lines with a prompt")
    parser.add_argument("--mtbench", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--card", default=CARD, help="the virtual card")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this")
    parser.add_argument("--again", action="append", default=[], help="measure these anew")
    parser.add_argument("--threads", type=int, default=2)
    sizes = parser.add_argument_group("sizes", "for trying it: each row has its own")
    for name in ("prompts", "tokens", "rounds"):
        sizes.add_argument(f"--{name}", type=int, metavar="N")
    return parser.parse_args(arguments)


def _setup(args: argparse.Namespace) -> Setup:
    return Setup(
        target=find_model(args.target),
        draft=find_model(args.draft),
        small=find_model(args.small),
        head=args.head or _trained_head(),
        humaneval=args.humaneval,
        mtbench=args.mtbench,
        card=args.card,
        threads=args.threads,
        prompts=args.prompts,
        tokens=args.tokens,
        rounds=args.rounds,
    )


def _trained_head() -> str | None:
    """A head that was trained on this machine."""
    heads = sorted((Settings.from_environment().data_dir / TRAINED).glob("*"))
    return next((str(folder) for folder in heads if is_head_folder(folder)), None)


def _command(args: argparse.Namespace, setup: Setup) -> str:
    """What was run, with the names of files alone: results are made to be passed on."""
    parts = [
        f"python -m benchmarks.speculation --target {setup.target.name} --draft {setup.draft.name}",
        f"--small {setup.small.name}",
        *([f"--head {Path(setup.head).name}"] if setup.head else []),
        f"--humaneval {args.humaneval.name} --mtbench {args.mtbench.name}",
        f"--threads {args.threads}",
    ]
    for name in ("prompts", "tokens", "rounds"):
        if getattr(args, name) is not None:
            parts.append(f"--{name} {getattr(args, name)}")
    return " ".join(parts)


def _summary(made: Mapping[str, Any]) -> str:
    lines = [f"  {r['what']}: {r['value']:.3g} {r['unit']}" for r in made["results"]]
    if made["skipped"]:
        lines.append(f"  skipped: {made['skipped']}")
    return "\n".join([*lines, f"  {made.get('checked', '')} in {made['seconds']} s"])


if __name__ == "__main__":
    sys.exit(main())
