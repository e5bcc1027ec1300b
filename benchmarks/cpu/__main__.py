"""Compare whole models on one instruction set with peers that were built for the same one.

    python -m benchmarks.cpu [--isa avx2] [--ik LLAMA_BENCH] [--llamacpp LLAMA_BENCH]
        [--models smollm2 qwen1.5b FILE.gguf] [--runs 5] [--only WORDS] [--json FILE]

A peer is a ``llama-bench`` executable. For AVX2 build it with cmake's -DGGML_NATIVE=OFF
-DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON. A row first runs each peer once in every setting
(weights repacked or not, flash attention or not); the fastest then takes turns with localrt. Each
turn of each contestant is a process of its own that warms up first; a ratio is of one turn.

Prompts, passes of 64 rows and decoding start with an empty context and have no sampler, in all
contestants (``-p`` and ``-n`` of llama-bench). Peers have nothing to compare with a verified tree
or with plain reading. Other files of a model come from llama.cpp's
``llama-quantize --allow-requantize MODEL.gguf FILE.gguf IQ4_XS`` (or Q6_K).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.command import (
    RESULTS,
    ROOT,
    cited_command,
    find_model,
    isa_name,
    make_parser,
)
from benchmarks.common.record import Record, load, save_row, setting
from benchmarks.compare.__main__ import summary
from benchmarks.cpu.llama_bench import Peer, PeerFailedError
from benchmarks.cpu.tables import cpu_table
from localrt.common.cores import default_threads

MODELS = {
    "smollm2": "SmolLM2-135M Q4_1",
    "qwen0.5b": "Qwen2.5-0.5B Q4_K_M",
    "qwen1.5b": "Qwen2.5-1.5B Q4_K_M",
    "gemma270m": "Gemma-3-270M Q4_K_M",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of one file: ``tokens`` are read, decoded, or are the rows of a tree.

    ``llama-bench`` measures the kinds ``prompt`` and ``decode`` too.
    """

    name: str
    model: str
    kind: str
    tokens: int
    repeats: int = 1


def rows_of(model: str) -> list[Row]:
    """What is measured of a test model, or of a file."""
    name = MODELS.get(model, Path(model).stem)
    rows = [
        Row(f"{name}, prompt of 512", model, "prompt", 512, 2),
        Row(f"{name}, decode", model, "decode", 128),
        Row(f"{name}, 4 rows at once", model, "tree", 4),
    ]
    if model == "qwen0.5b":
        rows.append(Row(f"{name}, prompt of 8,192", model, "prompt", 8192))
    if model == "qwen1.5b":
        rows.append(Row(f"{name}, pass of 64 rows", model, "prompt", 64, 5))
    if model == "smollm2":
        rows.append(Row(f"{name}, outside the kernels", model, "outside", 1))
    return rows


def run_ours(row: Row, path: Path, isa: str, threads: int) -> Record:
    """One process of ours; see ``child``."""
    job = {**asdict(row), "model": str(path), "isa": isa, "threads": threads}
    command = [sys.executable, "-m", "benchmarks.cpu.child", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{row.name} failed: see above")
    found: Record = json.loads(done.stdout.splitlines()[-1])
    assert found["isa"] == isa, "the child forces the set"
    return found


def fastest(peer: Peer, row: Row, path: Path, threads: int) -> Callable[[], Record] | None:
    """A run in the best setting of the peer, or None if it fails in all; failures are printed."""
    prompt, answer = (row.tokens, 0) if row.kind == "prompt" else (0, row.tokens)
    test = {"prompt": prompt, "answer": answer, "repeats": row.repeats, "threads": threads}
    found: list[tuple[float, Callable[[], Record]]] = []
    for words in peer.settings():
        call = partial(peer.run, path, words, test)
        try:
            found.append((call()["value"], call))
        except PeerFailedError as error:
            print(f"{row.name}: {error}", flush=True)
    return max(found, key=lambda each: each[0])[1] if found else None


def compare(row: Row, contestants: dict[str, Callable[[], Record]], runs: int) -> Record:
    """By turns, each time in another order; medians and quartiles."""
    turns: dict[str, list[Record]] = {name: [] for name in contestants}
    names = list(contestants)
    for _ in range(runs):
        for name in names:
            turns[name].append(contestants[name]())
        names.append(names.pop(0))
    ours = turns.pop("localrt")
    result = {**asdict(row), "localrt": summary([one["value"] for one in ours]), "peers": {}}
    result["model"] = Path(row.model).name
    if "of_floor" in ours[0]:
        result["of_floor"] = summary([one["of_floor"] for one in ours])
    for name, theirs in turns.items():
        pairs = zip(ours, theirs, strict=True)
        result["peers"][name] = {
            "setting": theirs[0]["setting"],
            "build": theirs[0]["build"],
            "tok_s": summary([one["value"] for one in theirs]),
            "ratio": summary([one["value"] / other["value"] for one, other in pairs]),
        }
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure row by row, save, print."""
    parser = make_parser(__doc__)
    parser.add_argument("--isa", type=isa_name, default="", help="default: this machine's best")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names or files")
    parser.add_argument("--ik", type=Path, metavar="LLAMA_BENCH", help="of ik_llama.cpp")
    parser.add_argument("--llamacpp", type=Path, metavar="LLAMA_BENCH", help="of llama.cpp")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this")
    args = parser.parse_args(arguments)
    programs = {"ik_llama.cpp": args.ik, "llama.cpp": args.llamacpp}
    peers = [Peer(name, program) for name, program in programs.items() if program]
    for peer in peers:
        if not peer.program.is_file():
            parser.error(f"{peer.program} is not a file")
    file = args.json or RESULTS / f"cpu-{args.isa}.json"
    threads = default_threads()
    about: dict[str, Any] = setting(cited_command("cpu", arguments), "numpy")
    about |= {"isa": args.isa, "threads": threads, "runs": args.runs}
    record = load(file, rows=[])
    paths = {model: find_model(model) for model in args.models}
    for row in [row for model in args.models for row in rows_of(model)]:
        if args.only and not any(word in row.name for word in args.only):
            continue
        path = paths[row.model]
        contestants: dict[str, Callable[[], Record]]
        contestants = {"localrt": partial(run_ours, row, path, args.isa, threads)}
        for peer in peers if row.kind in ("prompt", "decode") else ():
            call = fastest(peer, row, path, threads)
            if call is not None:
                contestants[peer.name] = call
        result = compare(row, contestants, args.runs)
        order = dict.fromkeys([*(old["name"] for old in record["rows"]), row.name])
        record = save_row(file, record, result, list(order), **about)
        print(f"{row.name} is done", flush=True)
    print(cpu_table(record) if record["rows"] else "No row has such a name.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
