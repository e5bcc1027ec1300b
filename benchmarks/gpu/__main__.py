"""Runs every check that needs a CUDA GPU, from a bare checkout with numpy, torch (to compare with),
and NVIDIA's bindings and compiler.

    scripts/gpu_check [--list] [--only NAME,...] [--out FOLDER]

Checks are grouped in calls, for machines with a time limit: those of ``--only``, or all in turn. A
call makes its own weights, prints one line per result, saves its own JSON after each result, and
ends after ``--minutes``. The exit status is 1 if a check fails or there is no GPU; speeds never
fail. ``scripts/gpu_check --device cpu`` is a rehearsal with tiny models on the tests' stand-in
driver: kernels are compiled for the CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.common.record import Record, save, setting
from benchmarks.gpu.phases import found_apart, module_of
from benchmarks.gpu.timing import Result, Values, result_of
from localrt.quant.cpu.abi import find_library
from localrt.quant.cuda.programs import NO_COMPILER, has_compiler

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"

# Modules that also compute on the CPU.
_BESIDE = frozenset({"facts", "loaded", "heads", "encoders"})
# Modules that can run on the stand-in driver.
_ON_DRIVER = frozenset({"facts", "loaded"})
_BUILD_S = 240


@dataclass(frozen=True)
class Call:
    """Phases that run together: about ``minutes`` on an H100 with 16 cores, and GB of disk."""

    tells: str
    minutes: int
    disk_gb: int
    phases: str


CALLS = {
    "overlap": Call("14B within 8 GB: work at once, right tokens", 5, 11, "facts dense-14B"),
    "forecasts": Call(
        "forecasts of a 14B, 30B-A3B within 8 GB", 5, 23, "forecasts-14B mixture-30B-A3B"
    ),
    "large": Call("32B within 8 GB", 7, 24, "dense-32B"),
    "routing": Call("30B-A3B, choosing as a trained mixture", 4, 23, "routed-30B-A3B"),
    "prompts": Call("first tokens", 5, 24, "prompts-14B prompts-32B prompts-30B-A3B"),
    "budgets": Call("forecasts of a 32B", 3, 24, "forecasts-32B"),
    "kernels": Call("all formats beside float64 and cuBLAS", 3, 0, "products batches"),
    "layers": Call("layers", 2, 0, "attention experts recurrent pictures towers"),
    "resident": Call("models on the GPU alone", 4, 0, "models adapters heads"),
}
"""All calls, most important first."""


def build_kernels() -> Values:
    """Compile the CPU's kernels unless they exist."""
    if find_library() is not None:
        return {"built": False}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_BUILD_S, check=False
    )
    if find_library() is None:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise RuntimeError(f"{' '.join(command[1:])} made none: {' '.join(words)}")
    return {"built": True}


@dataclass
class Run:
    """A call's results so far, saved to a new file in ``folder``."""

    folder: Path
    call: str
    about: Record
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        names = (f"gpu_check-{self.call}{n}.json" for n in ("", *(f"-{n}" for n in range(2, 1000))))
        self.out = next(each for each in map(self.folder.joinpath, names) if not each.exists())

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self.started

    def keep(self, result: Result) -> None:
        """Add and save one result."""
        result.seconds = self.seconds - sum(each.seconds for each in self.results)
        print(result.line(), flush=True)
        self.results.append(result)
        found = {"seconds": self.seconds, "results": [asdict(each) for each in self.results]}
        save(self.out, {**self.about, "call": self.call, **found})


def main(rehearse: Callable[[], bool] | None = None) -> int:
    """Run the calls, saving after each result.

    ``rehearse`` sets up the CPU as a stand-in GPU, and returns whether models can be loaded there
    too.
    """
    parser = argparse.ArgumentParser(description="checks that need a CUDA GPU")
    default = Path(os.environ.get("OUT") or RESULTS)
    text = "for the calls' JSON (default: $OUT, else benchmarks/results)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=default, help=text)
    parser.add_argument("--device", default="cuda", help="(default: cuda; cpu: a rehearsal)")
    text = "end a call on a GPU after so many minutes (default: 8)"
    parser.add_argument("--minutes", type=float, default=8, help=text)
    text = "calls or phases, see --list (default: all)"
    parser.add_argument("--only", metavar="NAME,...", default=",".join(CALLS), help=text)
    parser.add_argument("--list", action="store_true", help="list calls, in order, and phases")
    args = parser.parse_args()
    if args.list:
        for name, call in CALLS.items():
            room = f", {call.disk_gb} GB of a disk" if call.disk_gb else ""
            print(f"{name}: {call.minutes} minutes{room}. {call.tells} ({call.phases})")
        return 0
    names = args.only.split(",")
    known = [*CALLS, *" ".join(call.phases for call in CALLS.values()).split()]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no call or phase is called {unknown[0]}: see --list")
    cuda = args.device.startswith("cuda")
    if cuda and not (torch.cuda.is_available() and has_compiler()):
        missing = NO_COMPILER if torch.cuda.is_available() else "torch finds no CUDA GPU"
        print(f"gpu_check: {missing}", file=sys.stderr)
        return 1
    if not cuda and rehearse is None:
        parser.error("a rehearsal is started by scripts/gpu_check --device cpu")
    driver = not cuda and rehearse is not None and rehearse()
    pool = ThreadPoolExecutor(1)  # meanwhile, since it takes a minute
    kernels: Future[Values] | None = pool.submit(build_kernels)
    pool.shutdown(wait=False)
    end_s = 60 * args.minutes if cuda else float("inf")
    late = {"not run": f"{args.minutes:g} minutes were up"}
    results: list[Result] = []
    for name, call in CALLS.items():
        phases = [each for each in call.phases.split() if {each, name} & {*names}]
        if not phases:
            continue
        only = name if name in names else ",".join(phases)
        run = Run(args.out, name, described(f"scripts/gpu_check --only {only}", cuda=cuda))
        print(f"{name}: {call.tells}, {call.minutes} minutes; {run.out}", flush=True)
        for phase in phases:
            module = module_of(phase)
            if kernels is not None and module in _BESIDE:
                run.keep(result_of("CPU kernels", kernels.result))
                kernels = None
            on = "cuda" if driver and module in _ON_DRIVER else args.device
            if run.seconds < end_s:
                start = "spawn" if cuda else "fork"
                with closing(found_apart(phase, on, end_s - run.seconds, start=start)) as found:
                    for result in found:
                        run.keep(result)
            if run.seconds >= end_s:
                run.keep(Result(f"{phase}, or the rest of it", True, values=late))
        results += run.results
    failed = [result.name for result in results if not result.ok]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def described(command: str, *, cuda: bool) -> Record:
    """The date, the machine with its GPU, and the versions of driver and libraries."""
    about = setting(command, "torch", "cuda-bindings")

    def smi(field: str) -> str | None:  # one by one: an unknown field is an error
        return first_line("nvidia-smi", "--format=csv,noheader", f"--query-gpu={field}")

    shown = ("pcie.link.gen.max", "pcie.link.width.max", "clocks.max.sm", "power.limit")
    about["machine"] |= {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "cuda": torch.version.cuda,
        "driver": smi("driver_version") if cuda else None,
        "gpu": {field: smi(field) for field in shown} if cuda else None,
        "commit": os.environ.get("COMMIT")
        or first_line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }
    return {"date": datetime.now(UTC).date().isoformat(), **about}


def first_line(*command: str) -> str | None:
    """The first line that a program prints; None if it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def interruptible(run: Callable[[], int]) -> None:
    """Exit with what ``run`` returns; temporary files are deleted even if a signal ends it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run())


if __name__ == "__main__":
    interruptible(main)
