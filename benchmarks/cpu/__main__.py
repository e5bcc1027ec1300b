"""Compare whole models on one instruction set with peers that were built for the same one.

    python -m benchmarks.cpu [--isa avx2] [--ik LLAMA_BENCH] [--llamacpp LLAMA_BENCH]
        [--models smollm2 FILE.gguf] [--only prompt-512,decode] [--runs 5] [--json FILE]
    python -m benchmarks.cpu --shape qwen3-30b-a3b [qwen3.5-4b ...] [--layers 8] ...

With ``--shape``, models are random weights of shapes in ``localrt/hub/known_configs.json``, packed
as they are published: as many layers as 6 GB hold, each written before it is measured and removed
behind it.

A peer is a ``llama-bench`` executable. For AVX2 build it with cmake's -DGGML_NATIVE=OFF
-DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON. For each row, every peer first runs once in each
setting (weights repacked or not, flash attention or not); its fastest setting then alternates with
localrt. Each run is a separate process that warms up first; ratios are of runs in the same turn.
All contestants start with an empty context and use no sampler. Other files of a model come from
llama.cpp's ``llama-quantize --allow-requantize MODEL.gguf FILE.gguf IQ4_XS`` (or Q6_K).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import command
from benchmarks.common.record import Record, Results, captioned, markdown_table
from benchmarks.common.turns import by_turns, ratios, summary
from localrt.bench.llama_bench import PeerFailedError, run_llama_bench
from localrt.common.cores import default_threads
from localrt.common.formatting import format_rate

MODELS = {
    "smollm2": "SmolLM2-135M Q4_1",
    "qwen0.5b": "Qwen2.5-0.5B Q4_K_M",
    "qwen1.5b": "Qwen2.5-1.5B Q4_K_M",
    "gemma270m": "Gemma-3-270M Q4_K_M",
}
FILE = "any other file"
SHAPE = "random weights"
PEERS = {
    "ik_llama.cpp": ("-rtr", "-w 0", "-n 0 -gp {behind},{tokens}"),
    "llama.cpp": ("--repack", "--no-warmup", "-n {tokens} -d {behind}"),
}
"""A peer's options: to repack weights, to skip the warm-up, and to decode behind a prompt."""
CHILD = ["-m", "benchmarks.cpu.child"]


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of ``models``: ``prompt`` or ``decode`` of ``tokens``, ``behind`` others."""

    title: str
    kind: str
    tokens: int
    models: Collection[str]
    repeats: int = 1
    behind: int = 0


ROWS = {
    "prompt-128": Row("prompt of 128", "prompt", 128, (SHAPE,), 2),
    "prompt-512": Row("prompt of 512", "prompt", 512, (*MODELS, FILE, SHAPE), 2),
    "prompt-4096": Row("prompt of 4,096", "prompt", 4096, (SHAPE,)),
    "decode": Row("decode", "decode", 128, (*MODELS, FILE)),
    "decode-16": Row("decode behind 16", "decode", 64, (SHAPE,), behind=16),
    "decode-4096": Row("decode behind 4,096", "decode", 64, (SHAPE,), behind=4096),
    "prompt-8192": Row("prompt of 8,192", "prompt", 8192, ("qwen0.5b",)),
    "pass-64": Row("pass of 64 rows", "prompt", 64, ("qwen1.5b",), 5),
}
"""Rows by their names for ``--only``."""


def run_peer(peer: str, program: Path, setting: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of the best of ``repeats``; see ``child`` for ``job``.

    Raises:
        PeerFailedError: it failed.
    """
    prompt = job["tokens"] if job["kind"] == "prompt" else 0
    decode = PEERS[peer][2].format_map(job) if job.get("behind") else f"-n {job['tokens'] - prompt}"
    words = f"{setting} -p {prompt} {decode}{' -ctk q8_0 -ctv q8_0' if job.get('kv') else ''}"
    if prompt > 4096:  # llama.cpp's warm-up would process the whole prompt
        words += f" {PEERS[peer][1]}"
    try:
        words += f" -r {job['repeats']} -t {job['threads']}"
        found = run_llama_bench(program, job["model"], words)
    except PeerFailedError as error:
        raise PeerFailedError(f"{peer} {setting}: {error}") from None
    return {"value": max(found["samples_ts"]), "setting": setting, "build": found["build_commit"]}


def fastest(peer: str, program: Path, job: Mapping[str, Any]) -> Callable[[], Any] | None:
    """A function that runs the fastest setting; None if all fail. Failures are printed."""
    found: dict[float, Callable[[], Any]] = {}
    for repack, flash in ("11", "10", "01", "00"):
        setting = f"{PEERS[peer][0]} {repack} -fa {flash}"
        call = partial(run_peer, peer, program, setting, job)
        try:
            found.setdefault(call()["value"], call)
        except PeerFailedError as error:
            print(error, flush=True)
    return found[max(found)] if found else None


def compare(contestants: Mapping[str, Callable[[], Record]], runs: int) -> Record:
    """Medians and quartiles of interleaved runs; each process warms up by itself."""
    turns = by_turns(contestants, runs, warm_up=False)
    ours = turns.pop("localrt")
    rates = [one["value"] for one in ours]
    result: Record = {"localrt": summary(rates), "peers": {}}
    for key in ("of_floor", "meetings"):
        if key in ours[0]:
            result[key] = summary([one[key] for one in ours])
    for name, theirs in turns.items():
        peer = [one["value"] for one in theirs]
        result["peers"][name] = {
            "setting": theirs[0]["setting"],
            "build": theirs[0]["build"],
            "tok_s": summary(peer),
            "ratio": summary(ratios(rates, peer)),
        }
    return result


def cpu_table(record: Mapping[str, Any]) -> str:
    """Our and the peers' tokens per second; ratios are medians of turns."""
    rows = []
    for row in record["rows"]:
        cells = [row["name"], format_rate(row["localrt"]["median"])]
        for name in PEERS:
            peer = row["peers"].get(name)
            rate = peer and f"{format_rate(peer['tok_s']['median'])} ({_setting(peer)})"
            cells += [rate or "", times(row, name)]
        share = row.get("of_floor")
        rows.append([*cells, f"{100 * share['median']:.0f} %" if share else ""])
    headers = ["", "localrt, tok/s", "ik_llama.cpp", "ratio", "llama.cpp", "ratio", "of reading"]
    builds = {
        f"{name} {peer['build']}"
        for row in record["rows"]
        for name, peer in row["peers"].items()
        if peer["build"] != "unknown"
    }
    peers = f" beside {', '.join(sorted(builds))}" if builds else ""
    about = f"{command.ISAS[record['isa']]}{peers}, medians of {record['runs']} turns,"
    return captioned(record, markdown_table(headers, rows), about)


def times(row: Mapping[str, Any], peer: str) -> str:
    """How many times as fast as ``peer``; empty if that was not measured."""
    found = row["peers"].get(peer)
    return f"{found['ratio']['median']:.2f}x" if found else ""


def _setting(peer: Mapping[str, Any]) -> str:
    _, repacked, _, attention = peer["setting"].split()
    kept = "repacked" if repacked == "1" else "plain"
    return f"{kept}, flash attention" if attention == "1" else kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure row by row, save, print."""
    parser = command.make_parser(__doc__, runs=5)
    parser.add_argument("--isa", type=command.isa_name, default="", help="default: the best here")
    parser.add_argument("--models", nargs="+", help="names or files")
    parser.add_argument("--shape", nargs="+", default=[], metavar="NAME", help="random weights")
    parser.add_argument("--layers", type=int, help="of shapes (default: as many as 6 GB hold)")
    parser.add_argument("--ik", type=Path, metavar="LLAMA_BENCH", help="of ik_llama.cpp")
    parser.add_argument("--llamacpp", type=Path, metavar="LLAMA_BENCH", help="of llama.cpp")
    parser.add_argument("--int8-kv", action="store_true", help="keys and values of all in 8 bits")
    parser.add_argument("--only", type=command.listed(ROWS), default=ROWS, help=", ".join(ROWS))
    args = parser.parse_args(arguments)
    given = zip(PEERS, (args.ik, args.llamacpp), strict=True)
    programs = {peer: program for peer, program in given if program}
    for program in programs.values():
        if not program.is_file():
            parser.error(f"{program} is not a file")
    file = args.json or command.RESULTS / f"cpu-{args.isa}.json"
    about = {"isa": args.isa, "threads": default_threads(), "runs": args.runs}
    results = Results(file, command.cited_command("cpu", arguments), "numpy", **about)
    models = args.models or ([] if args.shape else list(MODELS))
    paths = {model: command.find_model(model) for model in models}
    for model in (*models, *args.shape):
        with ExitStack() as stack:
            known, path = model if model in MODELS else FILE, paths.get(model)
            title = MODELS.get(model, Path(model).stem)
            if path is None:
                path = Path(stack.enter_context(TemporaryDirectory()), "model.gguf")
                layers = command.write_shape(model, path, args.layers)
                known, title = SHAPE, f"{model}, {layers} layers"
            for row in map(ROWS.__getitem__, args.only):
                if known not in row.models:
                    continue
                name = f"{title}, {row.title}{', KV in int8' if args.int8_kv else ''}"
                test = {"kind": row.kind, "tokens": row.tokens, "repeats": row.repeats}
                test |= {"kv": "int8"} if args.int8_kv else {}
                test |= {"behind": row.behind} if row.behind else {}
                job = {**test, "model": str(path), "isa": args.isa, "threads": about["threads"]}
                contestants: dict[str, Callable[[], Record]] = {
                    "localrt": partial(command.run_child, name, CHILD, job, cwd=command.ROOT)
                }
                for peer, program in programs.items():
                    if call := fastest(peer, program, job):
                        contestants[peer] = call
                compared = compare(contestants, args.runs)
                results.put({"name": name, "model": Path(model).name, **test, **compared})
    print(cpu_table(results.record) if results.rows else "These models have no such row.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
