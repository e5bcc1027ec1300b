"""Every check that needs a CUDA GPU, from a bare checkout with torch, CUDA's compiler and numpy.

    scripts/gpu_check [--out FILE] [--device cpu] [--only NAME,...]

It makes its own weights, prints one line per check, and writes one JSON after each of them. Exit
status 1 when a check fails, or when there is no GPU; speeds never fail. ``--device cpu`` tries the
script itself: the kernels are compiled for the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.timing import Result, guarded
from localrt.files import write_text
from localrt.quant.ops.cuda.kernels.launch import emulate

ROOT = Path(__file__).resolve().parents[2]

# Module and function. They are imported as they are needed.
CHECKS = {
    "copy": ("kernels", "check_copy"),
    "rates": ("rates", "check_rates"),
    "logits": ("models", "check_logits"),
    "decode": ("models", "check_decode"),
    "products": ("kernels", "check_products"),
    "one-row": ("kernels", "check_one_row"),
    "batches": ("kernels", "check_batches"),
    "unpacking": ("kernels", "check_unpacking"),
    "attention": ("attention", "check_attention"),
    "packed-logits": ("models", "check_packed_logits"),
    "packed": ("models", "check_packed"),
    "loaded": ("loaded", "check_loaded"),
    "offload": ("offload", "check_offload"),
    "experts": ("experts", "check_experts"),
}


def check(name: str, device: str) -> list[Result]:
    """What a check finds."""
    module, function = CHECKS[name]
    found: list[Result] = getattr(import_module(f"benchmarks.gpu.{module}"), function)(device)
    return found


def main() -> int:
    """Run the checks, save after each."""
    parser = argparse.ArgumentParser(description="checks that need a CUDA GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_check.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(CHECKS), help="(default: all, %(default)s)")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    names = args.only.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check is called {unknown[0]}: choose from {', '.join(CHECKS)}")
    if cuda and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA GPU", file=sys.stderr)
        return 1
    if not cuda:
        from tests.ops.cuda.emulator import Emulator

        emulate(Emulator())
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
        found = guarded(name, lambda name=name: check(name, args.device))
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
    """Of a package that may be missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
