"""Every check that needs a CUDA GPU, from a bare checkout: torch and numpy are all it needs.

    scripts/gpu_check [--out FILE] [--device cpu] [--only NAME,...]

It makes its own weights, prints one line per check, and writes one JSON after each of them. Exit
status 1 when a check fails, or when there is no GPU; speeds never fail. ``--device cpu`` tries the
script itself, the Triton kernels in Triton's interpreter. Checks that need Triton are imported when
they run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.random_weights import RandomCheckpoint
from benchmarks.gpu.configs import (
    ARCHITECTURES,
    QWEN_1_5B,
    TINY,
    largest_error,
    logits,
    random_ids,
    random_model,
)
from benchmarks.gpu.timing import RUNS, Result, copy_bandwidth, guarded, timed
from localrt.files import write_text
from localrt.quant.ops.protocol import Batch
from localrt.quant.ops.torch.ops import TorchOps

ROOT = Path(__file__).resolve().parents[2]

# Largest difference over largest magnitude. float32 differs by the order of sums alone (TF32 is
# off); bf16 keeps 8 bits, through 4 layers.
BOUND_F32, BOUND_BF16 = 1e-4, 0.05


def check_logits(device: str) -> list[Result]:
    """CUDA against the CPU's float32, for every architecture."""
    ids = random_ids(TINY, 100)
    results = []
    for architecture, extra in ARCHITECTURES.items():

        def run(format: str, device: str, name: str = architecture, extra: Any = extra) -> Any:
            ops = TorchOps(compute_format=format, device=device)
            return logits(random_model(name, {**TINY, **extra}, ops), ids, 8)

        expected = run("f32", "cpu")
        for format, bound in (("f32", BOUND_F32), ("bf16", BOUND_BF16)):
            got = run(format, device)
            error = largest_error(got, expected)
            same = float((got.argmax(1) == expected.argmax(1)).mean())
            values = {"relative_error": error, "bound": bound, "top1_agreement": same}
            results.append(Result(f"logits {architecture} {format}", error < bound, values=values))
    return results


def check_decode(device: str) -> list[Result]:
    """Resident decode and prefill of a 1.5B in bf16; peak memory against the estimate."""
    cuda = device.startswith("cuda")
    config = QWEN_1_5B if cuda else {**TINY, "num_hidden_layers": 2}
    ops: Any = TorchOps(compute_format="bf16", device=device)
    model = random_model("Qwen2ForCausalLM", config, ops)
    spec = model.config.attention
    checkpoint = RandomCheckpoint("Qwen2ForCausalLM", config)
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) == 2]
    weights = sum(ops.weight_nbytes(info.shape, info.format) for info in matrices)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    cache = model.cache(1024)
    prompt = random_ids(config, 512, seed=1)

    def prefill() -> None:
        cache.trim(0)
        model.forward(Batch.extend([(cache, prompt)]), rows=[511])

    def decode() -> None:
        for token in prompt[:32]:
            model.forward(Batch.extend([(cache, [token])]), rows=[0])

    prefill_s, decode_s = [], []
    for _ in range(RUNS + 1):
        prefill_s.append(timed(prefill))
        decode_s.append(timed(decode))
    values: dict[str, Any] = {
        "prefill_tok_s": 512 / statistics.median(prefill_s[1:]),
        "decode_tok_s": 32 / statistics.median(decode_s[1:]),
        "weight_bytes": weights,
    }
    ok = True
    if cuda:
        estimate = weights + ops.kv_nbytes(spec, 1024) + (256 << 20)
        values |= {"peak_vram_bytes": torch.cuda.max_memory_allocated(), "estimate_bytes": estimate}
        ok = values["peak_vram_bytes"] <= estimate
    return [Result("resident 1.5B bf16", ok, values=values)]


def check_copy(device: str) -> list[Result]:
    """The ceiling: device copy bandwidth, bytes read and written counted."""
    return [Result("copy bandwidth", True, values={"gb_s": copy_bandwidth(device) / 1e9})]


def from_module(module: str, check: str) -> Callable[[str], list[Result]]:
    """A check of a module that needs Triton, which is imported when it runs."""

    def run(device: str) -> list[Result]:
        if find_spec("triton") is None:
            return [Result(check, True, values={"skipped": "Triton is not installed"})]
        found: list[Result] = getattr(import_module(f"benchmarks.gpu.{module}"), check)(device)
        return found

    return run


CHECKS: dict[str, Callable[[str], list[Result]]] = {
    "copy": check_copy,
    "logits": check_logits,
    "decode": check_decode,
    "products": from_module("kernels", "check_products"),
    "one-row": from_module("kernels", "check_one_row"),
    "batches": from_module("kernels", "check_batches"),
    "unpacking": from_module("kernels", "check_unpacking"),
    "attention": from_module("kernels", "check_attention"),
    "triton-logits": from_module("models", "check_logits"),
    "packed": from_module("models", "check_packed"),
    "offload": from_module("offload", "check_offload"),
    "experts": from_module("experts", "check_experts"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="checks that need a CUDA GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_check.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(CHECKS), help="(default: all, %(default)s)")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA GPU here", file=sys.stderr)
        return 1
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"
    names = args.only.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check is called {unknown[0]}: choose from {', '.join(CHECKS)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "bitsandbytes": version_of("bitsandbytes"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    started = time.perf_counter()
    for name in names:
        start = time.perf_counter()
        found = guarded(name, lambda name=name: CHECKS[name](args.device))
        for result in found:
            result.seconds = (time.perf_counter() - start) / len(found)
            print(result.line(), flush=True)
        results += found
        record = {
            "machine": machine,
            "command": "scripts/gpu_check",
            "seconds": time.perf_counter() - started,
            "results": [asdict(result) for result in results],
        }
        write_text(args.out, json.dumps(record, indent=2) + "\n")
    failed = [result.name for result in results if not result.ok]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
