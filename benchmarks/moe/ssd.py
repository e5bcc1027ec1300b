"""Experts on the SSD: a mixture under a memory limit, against llama.cpp's mapped file.

    python -m benchmarks.moe.ssd [--experts BYTES] [--shares 0.5,0.25] [--json FILE]

The trained fixture is widened until its experts take ``--experts`` bytes, which changes neither its
function nor its routing, and written as one GGUF file that both engines run. Each runs in a memory
control group (root, or a delegated one) that has room for a share of the experts, for all other
weights, and for 150 MB of process. Text that the model has not learnt is decoded token by token as
it stands: greedy text of a small model repeats itself, and its routing with it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.command import ROOT, cited_command, make_parser
from benchmarks.common.memory_limit import LimitedChild, MemoryLimit, drop_from_cache
from benchmarks.common.record import Record, save, setting
from benchmarks.moe.fixture_model import FIXTURE, held_out, widened
from benchmarks.moe.ssd_child import PROMPT
from benchmarks.moe.tables import ssd_table
from localrt.bench.process import child_command

PROCESS = 150_000_000  # what each engine's process may take beside weights
ROUNDS = 5  # and a text to warm up
DECODED = {"native": 64, "llamacpp": 16}  # tokens: a mapped file takes seconds for each


def measure(engine: str, path: Path, limit: int, texts: Sequence[list[int]]) -> Record:
    """One process: medians over its texts but the first."""
    drop_from_cache([path])
    group = MemoryLimit.create(limit)
    with LimitedChild(child_command("benchmarks.moe.ssd_child"), group) as child:
        child.ask("load", engine=engine, path=str(path))
        cut = [tokens[: PROMPT + DECODED[engine]] for tokens in texts]
        rounds = [child.ask("decode", tokens=tokens) for tokens in cut][1:]
        found: Record = {"engine": engine, "peak_cgroup_bytes": group.peak()}
    for name in rounds[0]:
        values = [each[name] for each in rounds if each[name] is not None]
        found[name] = statistics.median(values) if values else None
    return {**found, "rounds": rounds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the widened file, measure, and keep the results."""
    parser = make_parser(__doc__, results="experts_ssd")
    parser.add_argument("--experts", type=int, default=1_500_000_000, help="bytes")
    parser.add_argument("--shares", default="0.5,0.25")
    args = parser.parse_args(arguments)
    path = widened(args.experts, ROOT / "build/benchmarks")
    rest = path.stat().st_size - args.experts
    training = json.loads(FIXTURE.with_name("training.json").read_text())
    texts = held_out(ROUNDS + 1, PROMPT + max(DECODED.values()), 512)
    record: Record = {
        **setting(cited_command("moe.ssd", arguments), "llama-cpp-python", "numpy"),
        "fixture": {name: value for name, value in training.items() if name != "curve"},
        "experts_bytes": args.experts,
        "results": [],
    }
    for share in map(float, args.shares.split(",")):
        limit = int(share * args.experts) + rest + PROCESS
        for engine in DECODED:
            row = measure(engine, path, limit, texts)
            record["results"].append({"share": share, "limit_bytes": limit, **row})
        save(args.json, record)
    print(ssd_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
