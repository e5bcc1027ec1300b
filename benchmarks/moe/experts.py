"""Mixture-of-experts models in RAM, compared with llama.cpp: real shapes, random weights.

    python -m benchmarks.moe.experts [--shapes qwen3-30b-a3b] [--runs 7] [--json FILE]

Every shape gets about 2 GB of layers, so experts are read from memory, not from a CPU cache. Runs
of 1 and 512 tokens alternate with llama.cpp at its best setting on the same file. Medians leave out
the first run; a ratio is the median of each run's ratio. The file keeps other shapes' results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import cited_command, listed, make_parser
from benchmarks.common.record import Record, Results, captioned, markdown_table
from benchmarks.common.turns import against_llamacpp, open_sessions
from benchmarks.moe.random_mixture import SHAPES, VOCABULARY, MixtureShape, write_mixture
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

    def rates(found: Record, count: int) -> Record:
        theirs = {name: count / seconds for name, seconds in found.pop("llamacpp_s").items()}
        ours = count / found.pop("native_s")
        return {"native_tokens_s": ours, "llamacpp_tokens_s": theirs, **found}

    threads = hardware.probe().cpu.cores.threads
    with tempfile.TemporaryDirectory() as folder:
        path = write_mixture(shape, layers, Path(folder) / "mixture.gguf")
        with open_sessions(path, PROMPT + TOKENS + 8, threads=threads) as sessions:
            prompts = against_llamacpp(sessions, prefill, runs)
            steps = against_llamacpp(sessions, decode, 2 * runs)
    about = {"layers": layers, "format": shape.experts}
    return {**about, "decode": rates(steps, TOKENS), "prefill": rates(prompts, PROMPT)}


def experts_table(record: Mapping[str, Any]) -> str:
    """One row for each shape."""
    rows = [
        [
            row["name"],
            row["format"],
            str(row["layers"]),
            *(
                f"{row[kind]['native_tokens_s']:.0f} ({row[kind]['times_llamacpp']:.2f}x)"
                for kind in ("decode", "prefill")
            ),
        ]
        for row in record["rows"]
    ]
    headers = ["shape", "format", "layers", "decode tok/s", "prefill 512 tok/s"]
    about = "random weights, all in RAM; in brackets, times llama.cpp at its best on the same file;"
    return captioned(record, markdown_table(headers, rows), about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure shape by shape, save, print."""
    parser = make_parser(__doc__, results="experts", runs=7)
    known = ",".join(SHAPES)
    parser.add_argument("--shapes", type=listed(SHAPES), default=list(SHAPES), help=known)
    args = parser.parse_args(arguments)
    results = Results(args.json, cited_command("moe.experts", arguments), "llama-cpp-python")
    for name in args.shapes:
        results.put({"name": name, **measure(SHAPES[name], args.runs)}, SHAPES)
    print(experts_table(results.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
