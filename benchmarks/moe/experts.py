"""Experts on the CPU: bytes of those that are used per second, and whole models beside llama.cpp.

    python -m benchmarks.moe.experts [--shapes qwen3-30b-a3b] [--runs 7]

Every shape gets as many layers as take about 2 GB, so that experts come from memory. Kernels: a
token's experts in one call, and the whole step from norm to sum, by turns with plain reading; and
the same for 512 rows. Models: the same layers with their attention in a GGUF file, one token and
512, by turns with llama.cpp at its best setting. Medians of all but the first run; ratios are
medians of each run's own. Other shapes' results stay in the file.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import cited_command, listed, make_parser
from benchmarks.common.record import load, save, setting
from benchmarks.common.sessions import against_llamacpp, open_sessions
from benchmarks.common.timing import by_turns, median_ratio, medians
from benchmarks.moe.shapes import SHAPES, VOCABULARY, Layers, MixtureShape, write_mixture
from benchmarks.moe.tables import experts_table
from localrt.machine import hardware
from localrt.quant.ops.native.ops import NativeOps

PROMPT, TOKENS = 512, 24


def kernels(ops: NativeOps, shape: MixtureShape, nbytes: int, runs: int) -> dict[str, Any]:
    """Rates of the experts alone and of the whole step, beside plain reading."""
    count = shape.layers_of(nbytes)
    layers = Layers(ops, shape, count)
    one, many = layers.choose(1, TOKENS), layers.choose(PROMPT, 1)
    read = count * TOKENS * shape.used * shape.expert_nbytes
    memory = np.ones(512 << 20, np.uint8)
    calls = {
        "experts": lambda: layers.run_experts(one),
        "step": lambda: layers.run_steps(one),
        "floor": lambda: ops.read_all(memory),
    }
    samples = by_turns(calls, 4 * runs)
    seconds = medians(samples)
    calls = {
        "experts": lambda: layers.run_experts(many),
        "step": lambda: layers.run_steps(many),
    }
    prefill = medians(by_turns(calls, max(5, runs)))
    operations = 6 * PROMPT * shape.used * shape.hidden * shape.inner * count
    share = memory.nbytes / read
    return {
        "layers": count,
        "format": shape.experts,
        "active_bytes": shape.used * shape.expert_nbytes,
        "experts_bytes_s": read / seconds["experts"],
        "step_bytes_s": read / seconds["step"],
        "floor_bytes_s": memory.nbytes / seconds["floor"],
        "of_floor": median_ratio(samples["floor"], samples["experts"]) / share,
        "step_of_floor": median_ratio(samples["floor"], samples["step"]) / share,
        "prefill_rows": PROMPT,
        "prefill_experts_operations_s": operations / prefill["experts"],
        "prefill_step_operations_s": operations / prefill["step"],
    }


def models(shape: MixtureShape, nbytes: int, runs: int) -> dict[str, Any]:
    """Tokens per second of whole models, beside llama.cpp's."""
    layers = shape.layers_of(nbytes)
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

    def compared(samples: dict[str, list[float]], count: int) -> dict[str, Any]:
        found = against_llamacpp(samples)
        theirs = {name: count / seconds for name, seconds in found.pop("llamacpp_s").items()}
        return {
            "native_tokens_s": count / found.pop("native_s"),
            "llamacpp_tokens_s": theirs,
            **found,
        }

    threads = hardware.probe().cpu.usable_cores
    with tempfile.TemporaryDirectory() as folder:
        path = write_mixture(shape, layers, Path(folder) / "mixture.gguf")
        with open_sessions(path, PROMPT + TOKENS + 8, threads=threads) as sessions:
            prompts = by_turns({n: lambda s=s: prefill(s) for n, s in sessions.items()}, runs)
            steps = by_turns({n: lambda s=s: decode(s) for n, s in sessions.items()}, 2 * runs)
    return {
        "layers": layers,
        "decode": compared(steps, TOKENS),
        "prefill": compared(prompts, PROMPT),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure shape by shape, save, print."""
    parser = make_parser(__doc__)
    known = ",".join(SHAPES)
    parser.add_argument("--shapes", type=listed(SHAPES), default=list(SHAPES), help=known)
    parser.add_argument("--bytes", type=float, default=2e9, help="of a model's experts")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--isa", default="")
    parser.add_argument(
        "--models", type=listed(SHAPES), default=list(SHAPES), help="shapes to run beside llama.cpp"
    )
    args = parser.parse_args(arguments)
    ops, nbytes = NativeOps(isa=args.isa), int(args.bytes)
    record = load(args.json, results={}) if args.json else {"results": {}}
    found = record["results"]
    for name in args.shapes:
        found[name] = {"kernels": kernels(ops, SHAPES[name], nbytes, args.runs)}
        gc.collect()
        if name in args.models:
            found[name]["models"] = models(SHAPES[name], nbytes, args.runs)
            gc.collect()
        record = {
            **setting(cited_command("moe.experts", arguments), "llama-cpp-python"),
            "isa": ops.isa,
            "results": {name: found[name] for name in SHAPES if name in found},
        }
        save(args.json, record)
        print(f"{name} is done", flush=True)
    print(experts_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
