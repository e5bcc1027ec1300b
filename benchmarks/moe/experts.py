"""Mixture-of-experts models in RAM, compared with llama.cpp: real shapes, random weights.

    python -m benchmarks.moe.experts [--shapes qwen3-30b-a3b] [--runs 7] [--json FILE]

Every shape gets about 2 GB of layers, so experts are read from memory, not from a CPU cache. Runs
of 1 and 512 tokens alternate with llama.cpp at its best setting on the same file. Medians leave out
the first run; a ratio is the median of each run's ratio. The file keeps other shapes' results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import cited_command, listed, make_parser
from benchmarks.common.record import Record, load, save, setting
from benchmarks.common.sessions import against_llamacpp, by_turns, open_sessions
from benchmarks.moe.random_mixture import SHAPES, VOCABULARY, MixtureShape, write_mixture
from benchmarks.moe.tables import experts_table
from localrt.offload import hardware

NBYTES = 2_000_000_000  # of a model's experts
PROMPT, TOKENS = 512, 24


def measure(shape: MixtureShape, runs: int) -> Record:
    """Tokens per second of a whole model and of llama.cpp."""
    layers = shape.layers_of(NBYTES)
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, VOCABULARY, PROMPT).tolist()
    tokens = rng.integers(0, VOCABULARY, TOKENS).tolist()

    def prefill(session: Any) -> None:
        session.trim(0)
        session.extend(prompt)

    def decode(session: Any) -> None:
        session.trim(8)
        for token in tokens:
            session.extend([token])

    def compared(samples: dict[str, list[float]], count: int) -> Record:
        found = against_llamacpp(samples)
        theirs = {name: count / seconds for name, seconds in found.pop("llamacpp_s").items()}
        return {
            "native_tokens_s": count / found.pop("native_s"),
            "llamacpp_tokens_s": theirs,
            **found,
        }

    threads = hardware.probe().cpu.cores.threads
    with tempfile.TemporaryDirectory() as folder:
        path = write_mixture(shape, layers, Path(folder) / "mixture.gguf")
        with open_sessions(path, PROMPT + TOKENS + 8, threads=threads) as sessions:
            prompts = by_turns({n: lambda s=s: prefill(s) for n, s in sessions.items()}, runs)
            steps = by_turns({n: lambda s=s: decode(s) for n, s in sessions.items()}, 2 * runs)
    return {
        "layers": layers,
        "format": shape.experts,
        "decode": compared(steps, TOKENS),
        "prefill": compared(prompts, PROMPT),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure shape by shape, save, print."""
    parser = make_parser(__doc__, results="experts")
    known = ",".join(SHAPES)
    parser.add_argument("--shapes", type=listed(SHAPES), default=list(SHAPES), help=known)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args(arguments)
    found = load(args.json, results={})["results"]
    record: Record = {"results": found}
    for name in args.shapes:
        found[name] = measure(SHAPES[name], args.runs)
        record = {
            **setting(cited_command("moe.experts", arguments), "llama-cpp-python"),
            "results": {name: found[name] for name in SHAPES if name in found},
        }
        save(args.json, record)
        print(f"{name} is done", flush=True)
    print(experts_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
