"""Every check that needs a CUDA GPU, from a bare checkout with numpy, torch to compare with, and
NVIDIA's bindings and compiler.

    scripts/gpu_check [--out FILE] [--device cpu] [--only NAME,...]

It makes its own weights, prints one line per check, and writes one JSON after each of them. Exit
status 1 when a check fails, or when there is no GPU; speeds never fail. ``--device cpu`` tries the
script itself: the kernels are compiled for the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.timing import Result, one_by_one
from localrt.common.files import write_text
from localrt.quant.cpu.abi import find_library
from localrt.quant.cuda.device import emulate

ROOT = Path(__file__).resolve().parents[2]

# Module and function, imported when needed; checks that need a GPU come first.
CHECKS = {
    "copy": ("kernels", "check_copy"),
    "facts": ("facts", "check_facts"),
    "products": ("kernels", "check_products"),
    "one-row": ("kernels", "check_one_row"),
    "batches": ("kernels", "check_batches"),
    "low-bit": ("kernels", "check_low_bit"),
    "published": ("kernels", "check_published"),
    "loaded": ("loaded", "check_loaded"),
    "logits": ("models", "check_logits"),
    "decode": ("models", "check_decode"),
    "adapters": ("adapters", "check_adapters"),
    "heads": ("heads", "check_heads"),
    "unpacking": ("kernels", "check_unpacking"),
    "attention": ("attention", "check_attention"),
    "pictures": ("pictures", "check_pictures"),
    "towers": ("towers", "check_towers"),
    "mixture-attention": ("attention", "check_mixture_attention"),
    "experts": ("grouped", "check_grouped"),
    "recurrent": ("recurrent", "check_recurrent"),
    "packed-logits": ("models", "check_packed_logits"),
    "packed": ("models", "check_packed"),
}
# These also compute on the CPU.
_BESIDE = frozenset({"facts", "loaded", "heads", "towers"})
_BUILD_S = 240


def build_kernels() -> Result:
    """Compile the CPU's kernels unless they exist."""
    if find_library() is not None:
        return Result("CPU kernels", True, values={"built": False})
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_BUILD_S, check=False
    )
    if find_library() is None:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise RuntimeError(f"{' '.join(command[1:])} made none: {' '.join(words)}")
    return Result("CPU kernels", True, values={"built": True})


def found_by(name: str, device: str, kernels: Future[Result] | None) -> Iterator[Result]:
    """Yield a check's results, after waiting for the CPU's ``kernels`` if it needs them."""
    if name in _BESIDE and kernels is not None:
        yield from one_by_one("CPU kernels", lambda: [kernels.result()])
    torch.manual_seed(0)
    module, function = CHECKS[name]

    def check() -> Iterable[Result]:
        found: Iterable[Result] = getattr(import_module(f"benchmarks.gpu.{module}"), function)(
            device
        )
        return found

    yield from one_by_one(name, check)


@dataclass
class Run:
    """The results so far, saved to a file."""

    out: Path
    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.started

    def keep(self, result: Result) -> None:
        """Add and save one result."""
        result.seconds = self.seconds - sum(each.seconds for each in self.results)
        print(result.line(), flush=True)
        self.results.append(result)
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": self.machine,
            "command": "scripts/gpu_check",
            "seconds": self.seconds,
            "results": [asdict(each) for each in self.results],
        }
        write_text(self.out, json.dumps(record, indent=2) + "\n")


def main() -> int:
    """Run the checks, save after each."""
    parser = argparse.ArgumentParser(description="checks that need a CUDA GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_check.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8, help="on a GPU (default: 8)")
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
        "driver": driver_version() if cuda else None,
        "cuda-bindings": version_of("cuda-bindings"),
        "bitsandbytes": version_of("bitsandbytes"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run = Run(args.out, machine)
    end_s = 60 * args.minutes if cuda else float("inf")
    late = {"not run": f"{args.minutes:g} minutes were up"}
    # Compiled during the first checks: it takes a minute.
    kernels = ThreadPoolExecutor(1).submit(build_kernels) if _BESIDE & {*names} else None
    for name in names:
        if run.seconds < end_s:
            for result in found_by(name, args.device, kernels):
                run.keep(result)
                if run.seconds > end_s:
                    break
            kernels = None if name in _BESIDE else kernels
        if run.seconds > end_s:
            run.keep(Result(f"{name}, or the rest of it", True, values=late))
    results = run.results
    failed = [result.name for result in results if not result.ok]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def driver_version() -> str | None:
    """The GPU driver's version, if nvidia-smi reports it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def version_of(package: str) -> str | None:
    """The version of a package that may be missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
