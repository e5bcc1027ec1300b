"""Experts on the CPU: bytes of those that are used per second, and whole models beside llama.cpp.

    .venv/bin/python benchmarks/experts.py [--shapes qwen3-30b-a3b] [--json FILE]

Every shape gets as many layers as take about 2 GB, so that experts come from memory. Kernels: a
token's experts in one call, and the whole step from norm to sum, by turns with plain reading; and
the same for 512 rows. Models: the same layers with their attention in a GGUF file, one token and
512, by turns with llama.cpp, whose weights are repacked or plain, its attention flash or not; its
best counts. Medians of all but the first run; ratios are medians of each run's own. What FILE has
of other shapes stays in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "benchmarks"))

import numpy as np  # noqa: E402
from experts_gguf import SHAPES, VOCABULARY, MixtureShape, write_mixture  # noqa: E402
from experts_layers import Layers  # noqa: E402

import localrt  # noqa: E402
from localrt.engine.llamacpp.engine import LlamaCppEngine, LlamaCppSettings  # noqa: E402
from localrt.formatting import format_rate, table  # noqa: E402
from localrt.loading.parts import LoadOptions, load_parts  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.quant.ops.native.ops import NativeOps  # noqa: E402

PROMPT, TOKENS = 512, 24
THEIRS = {
    f"{'repacked' if repack else 'plain'}{', flash attention' if flash else ''}": (repack, flash)
    for repack in (True, False)
    for flash in (False, True)
}


def by_turns(calls: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    """Seconds of each in every run but the first."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 1):
        for name, call in calls.items():
            time.sleep(0.03)  # the other's threads spin for a while
            start = time.perf_counter()
            call()
            if run:
                samples[name].append(time.perf_counter() - start)
    return samples


def median_ratio(over: list[float], under: list[float]) -> float:
    """Of the two in one run: memory's rate is not always the same."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def kernels(ops: NativeOps, shape: MixtureShape, nbytes: int, runs: int) -> dict[str, Any]:
    """Rates of the experts alone and of the whole step, beside plain reading."""
    count = shape.layers_of(nbytes)
    layers = Layers(ops, shape, count)
    one, many = layers.choose(1, TOKENS), layers.choose(PROMPT, 1)
    read = count * TOKENS * shape.used * shape.expert_nbytes
    memory = np.ones(512 << 20, np.uint8)
    seconds = by_turns(
        {
            "experts": lambda: layers.run_experts(one),
            "step": lambda: layers.run_steps(one),
            "floor": lambda: ops.read_all(memory),
        },
        4 * runs,
    )
    rates = {"experts": read, "step": read, "floor": memory.nbytes}
    median = {name: value / statistics.median(seconds[name]) for name, value in rates.items()}
    share = memory.nbytes / read
    prefill = by_turns(
        {
            "experts": lambda: layers.run_experts(many),
            "step": lambda: layers.run_steps(many),
        },
        max(5, runs),
    )
    operations = 6 * PROMPT * shape.used * shape.hidden * shape.inner * count
    return {
        "layers": count,
        "format": shape.experts,
        "active_bytes": shape.used * shape.expert_nbytes,
        **{f"{name}_bytes_s": value for name, value in median.items()},
        "of_floor": median_ratio(seconds["floor"], seconds["experts"]) / share,
        "step_of_floor": median_ratio(seconds["floor"], seconds["step"]) / share,
        "prefill_rows": PROMPT,
        "prefill_experts_operations_s": operations / statistics.median(prefill["experts"]),
        "prefill_step_operations_s": operations / statistics.median(prefill["step"]),
    }


def models(shape: MixtureShape, nbytes: int, runs: int, folder: Path) -> dict[str, Any]:
    """Tokens per second of whole models, beside llama.cpp's."""
    layers = shape.layers_of(nbytes)
    path = write_mixture(shape, layers, folder / "mixture.gguf")
    machine = hardware.probe()
    threads, capacity = machine.cpu.usable_cores, PROMPT + TOKENS + 8
    options = LoadOptions(engine="native", ctx=capacity, threads=threads)
    engines: dict[str, Any] = {"native": load_parts(path, options).engine}
    for name, (repack, flash) in THEIRS.items():
        settings = LlamaCppSettings(repack=repack, flash_attention=flash)
        engines[name] = LlamaCppEngine.load(path, threads=threads, settings=settings)
    sessions = {name: engine.session(capacity) for name, engine in engines.items()}
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

    prompts = by_turns({n: lambda s=s: prefill(s) for n, s in sessions.items()}, runs)
    steps = by_turns({n: lambda s=s: decode(s) for n, s in sessions.items()}, 2 * runs)
    for engine in engines.values():
        engine.close()
    path.unlink()

    def compared(seconds: dict[str, list[float]], count: int) -> dict[str, Any]:
        rates = {name: count / statistics.median(value) for name, value in seconds.items()}
        ours = rates.pop("native")
        best = max(rates, key=lambda name: rates[name])
        return {
            "native_tokens_s": ours,
            "llamacpp_tokens_s": rates,
            "best_setting": best,
            "times_llamacpp": median_ratio(seconds[best], seconds["native"]),
        }

    return {
        "layers": layers,
        "decode": compared(steps, TOKENS),
        "prefill": compared(prompts, PROMPT),
    }


def describe(results: dict[str, Any]) -> str:
    """The table for people."""
    cells = []
    for name, result in results.items():
        k = result["kernels"]
        line = [
            name,
            k["format"],
            f"{k['active_bytes'] / 1e6:.1f}",
            format_rate(k["experts_bytes_s"] / 1e9),
            f"{100 * k['of_floor']:.0f} %",
            f"{100 * k['step_of_floor']:.0f} %",
            format_rate(k["prefill_experts_operations_s"] / 1e9),
        ]
        for part in ("decode", "prefill"):
            m = result.get("models", {}).get(part)
            line += [
                format_rate(m["native_tokens_s"]) if m else "",
                f"{m['times_llamacpp']:.2f}x" if m else "",
            ]
        cells.append(line)
    headers = ["shapes", "format", "MB", "GB/s", "of floor", "step", "GOP/s at 512"]
    return table(cells, [*headers, "tok/s", "", "prefill", ""], "llrrrrrrrrr")


def main() -> int:
    parser = argparse.ArgumentParser(description="experts on the CPU, beside llama.cpp")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--bytes", type=float, default=2e9, help="of a model's experts")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--isa", default="")
    parser.add_argument("--models", default=",".join(SHAPES), help="shapes to run beside llama.cpp")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.shapes.split(","):
            if name not in SHAPES:
                parser.error(f"unknown shapes {name}: known are {', '.join(SHAPES)}")
            ops = NativeOps(isa=args.isa)
            nbytes = int(args.bytes)
            results[name] = {"kernels": kernels(ops, SHAPES[name], nbytes, args.runs)}
            gc.collect()
            if name in args.models.split(","):
                results[name]["models"] = models(SHAPES[name], nbytes, args.runs, Path(folder))
                gc.collect()
            print(describe({name: results[name]}).splitlines()[-1], flush=True)
    print(describe(results))
    if args.json:
        before = json.loads(args.json.read_text())["results"] if args.json.exists() else {}
        results = {name: (before | results)[name] for name in SHAPES if name in before | results}
        record = {
            "machine": hardware.probe().to_dict(),
            "command": f"benchmarks/experts.py --runs {args.runs}",
            "isa": ops.isa,
            "versions": {
                "localrt": localrt.__version__,
                "llama-cpp-python": version("llama-cpp-python"),
            },
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
