"""Compare this checkout with another one, on two models in memory and within memory limits.

    python -m benchmarks.compare --against FOLDER [--isa avx2] [--runs 11] [--only WORD ...]
        [--json FILE]

Each run is a separate process: it loads the model and answers once, greedily, without drafts. After
a warm-up run of each, the checkouts alternate in changing order. A ratio is this checkout's value
divided by the other's in the same turn. The other checkout needs its compiled kernels. Unmeasured
rows stay in the JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.command import (
    ROOT,
    cited_command,
    find_model,
    isa_name,
    make_parser,
    run_child,
)
from benchmarks.common.record import Record, Results
from benchmarks.common.turns import by_turns, ratios, summary
from localrt.common.formatting import table

_CHILD = Path(__file__).with_name("child.py")
_MEASURES = ("decode_tok_s", "prefill_tok_s", "first_token_s", "load_s", "peak_ram_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``tokens`` after ``prompt`` tokens within ``ram``, or a resumed chat of ``prompt`` tokens."""

    name: str
    model: str
    prompt: int
    tokens: int = 1
    ram: str | None = None
    resume: bool = False


ROWS = (
    Row(name="SmolLM2-135M", model="smollm2", prompt=512, tokens=128),
    Row(name="Qwen2.5-1.5B", model="qwen1.5b", prompt=512, tokens=128),
    *(
        Row(name=f"Qwen2.5-1.5B in {ram}", model="qwen1.5b", prompt=32, tokens=64, ram=ram)
        for ram in ("1GB", "700MB", "500MB")
    ),
    Row(name="Qwen2.5-1.5B, chat resumed", model="qwen1.5b", prompt=8000, resume=True),
)


def measure(row: Row, checkout: Path, cache: Path, isa: str | None) -> Record:
    """Run one process. Each checkout has its own ``cache`` folder, for machine measurements and a
    chat's KV cache.
    """
    load = {"ram": row.ram, "ctx": -(-(row.prompt + row.tokens + 256) // 256) * 256}
    job = {**asdict(row), "model": str(find_model(row.model)), "load": load, "isa": isa}
    env = {**os.environ, "PYTHONPATH": str(checkout), "LOCALRT_CACHE": str(cache)}
    found: Record = run_child(f"{row.name} in {checkout.name}", ["-P", str(_CHILD)], job, env=env)
    if found["checkout"] != str(checkout):
        raise SystemExit(f"localrt was imported from {found['checkout']}, not from {checkout}")
    return found


def compare(row: Row, checkouts: dict[str, Path], runs: int, isa: str | None) -> Record:
    """Return medians and quartiles of both checkouts, and of their ratio in each turn."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        caches = {name: Path(folder) / name for name in checkouts}
        found = by_turns(
            {name: partial(measure, row, checkouts[name], caches[name], isa) for name in caches},
            runs,
        )
    ours, theirs = found["this"], found["against"]
    measured = {}
    for key in _MEASURES:
        if key in ours[0]:
            values = {name: [one[key] for one in each] for name, each in found.items()}
            values["ratio"] = ratios(values["this"], values["against"])
            measured[key] = {name: summary(samples) for name, samples in values.items()}
    return {
        "name": row.name,
        "same_tokens": all(one["tokens"] == ours[0]["tokens"] for one in (*ours, *theirs)),
        "measured": measured,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure row by row, save, print; 1 if tokens differ."""
    parser = make_parser(__doc__, results="compare", runs=11, rows=True)
    parser.add_argument("--against", type=Path, required=True, help="another checkout")
    parser.add_argument("--isa", type=isa_name, help="instruction set (default: the best)")
    args = parser.parse_args(arguments)
    checkouts = {"this": ROOT, "against": args.against.resolve()}
    commits = {}
    for name, checkout in checkouts.items():
        if not any((checkout / "quant").rglob("_native.*")):
            parser.error(f"{checkout} has no compiled kernels: run setup.py build_ext --inplace")
        describe = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
        commits[name] = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    results = Results(args.json, cited_command("compare", arguments), "numpy")
    rows = {row.name: row for row in ROWS}
    # Rows compare two commits, so earlier runs' rows are measured anew.
    for name in results.pending(rows, args.only, again=[*rows]):
        found = compare(rows[name], checkouts, args.runs, args.isa)
        results.put({**found, "checkouts": commits, "runs": args.runs}, rows)
    shown = []
    for result in results.rows:
        for key, parts in result["measured"].items():
            medians = [f"{parts[name]['median']:.4g}" for name in ("this", "against")]
            ratio = [f"{parts['ratio'][name]:.3f}" for name in ("median", "low", "high")]
            shown.append([result["name"], key, *medians, *ratio])
    headers = ["", "median", "this", "against", "ratio", "lower quartile", "upper"]
    print(table(shown, headers, "llrrrrr"))
    differ = [result["name"] for result in results.rows if not result["same_tokens"]]
    print(f"THE TOKENS DIFFER: {', '.join(differ)}" if differ else "The tokens are the same.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
