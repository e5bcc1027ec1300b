"""What every campaign shares: its options, a state that survives a stop, and its figures.

A campaign tries one kind of harm many times: a table of cases, whose random choices come from
``Run.random``. It is a module of this package that calls ``campaign`` when it is run. Tries that
may crash or hang are made by child processes (``in_children``), which run the same module.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.common.command import RESULTS, ROOT
from benchmarks.common.record import Record, load, save, setting

_SAVED_EVERY_S = 5.0
_TOLD = re.compile(r"ERROR: |WARNING: Thread|runtime error:|Timeout|Error: ")


class Run:
    """One run of a campaign: how much of it, and what it has done and found so far.

    ``cases`` maps the name of a case to how often it was tried and what was found; ``figures`` are
    measurements by name. Both are saved as the run goes on.
    """

    def __init__(self, name: str, folder: Path, *, seed: int, seconds: float, count: int) -> None:
        self.name, self.folder = name, folder
        self.seed, self.seconds, self.count = seed, seconds, count
        self.record: Record = {"seed": seed, "seconds": 0.0, "cases": {}, "figures": {}}
        self._started = self._saved = time.monotonic()
        self._before = 0.0

    def resume(self) -> None:
        """Go on from what an earlier run with this seed saved, if there is one."""
        if (saved := load(self._file)) and saved["seed"] == self.seed:
            self.record, self._before = saved, saved["seconds"]

    def done(self, case: str) -> int:
        """How often ``case`` was tried."""
        return int(self._case(case)["count"])

    def random(self, case: str) -> random.Random:
        """The random choices of the next try of ``case``, the same for the same seed."""
        return random.Random(f"{self.seed} {case} {self.done(case)}")

    def tried(self, case: str, times: int = 1) -> None:
        """Count ``times`` more tries of ``case``."""
        self._case(case)["count"] += times
        if time.monotonic() - self._saved > _SAVED_EVERY_S:
            self.save()

    def found(self, case: str, what: str, data: bytes | None = None) -> None:
        """Note that a try of ``case`` failed, and keep ``data``, its input."""
        self._case(case)["found"].append(what)
        print(f"{self.name} {case} {self.done(case)}: {what}", flush=True)
        if data is not None:
            kept = self.folder / self.name / hashlib.sha256(data).hexdigest()[:16]
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(data)
        self.save()

    def figure(self, name: str, value: Any) -> None:
        """Keep a measurement."""
        self.record["figures"][name] = value

    def goes_on(self, case: str, share: float = 1.0) -> bool:
        """Whether ``case`` has tries left, of its ``share`` of the count, and the run has time."""
        return self.done(case) < self.count * share and self.elapsed < self.seconds

    @property
    def elapsed(self) -> float:
        """Seconds that this run and those it goes on from have taken."""
        return self._before + time.monotonic() - self._started

    @property
    def failures(self) -> list[str]:
        """What all cases found."""
        return [
            f"{name}: {what}" for name, row in self.record["cases"].items() for what in row["found"]
        ]

    def save(self) -> None:
        """Save the state."""
        self._saved = time.monotonic()
        self.record["seconds"] = self.elapsed
        save(self._file, self.record)

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def _case(self, name: str) -> dict[str, Any]:
        case: dict[str, Any] = self.record["cases"].setdefault(name, {"count": 0, "found": []})
        return case


def in_children(run: Run, cases: Iterable[str], *, at_once: int, **environment: str) -> None:
    """Try all ``cases`` until ``run`` is over: ``at_once`` tries for each child of its module."""
    for case in cases:
        while run.goes_on(case):
            first = run.done(case)
            count = min(at_once, run.count - first)
            command = [sys.executable, "-m", f"tests.campaigns.{run.name}", "child", case]
            command += [f"{number}" for number in (run.seed, first, count)]
            given = os.environ | environment
            child = subprocess.run(command, cwd=ROOT, env=given, capture_output=True)
            output, told = (text.decode(errors="replace") for text in (child.stdout, child.stderr))
            for line in output.splitlines():
                if line.startswith("found "):
                    run.found(case, line[6:], child.stderr)
                run.tried(case, line == "tried")
            if child.returncode:
                why = next(filter(_TOLD.search, told.splitlines()), told[-200:])
                run.found(case, f"exit status {child.returncode}: {why}", child.stderr)
                run.tried(case, run.done(case) < first + count)


def try_here(
    attempt: Callable[[random.Random], None], patience_s: int, case: str, *numbers: str
) -> None:
    """Be such a child. A try that takes longer than ``patience_s`` shows its stacks and ends it."""
    seed, first, count = map(int, numbers)
    for number in range(first, first + count):
        faulthandler.dump_traceback_later(patience_s, exit=True)
        try:
            attempt(random.Random(f"{seed} {case} {number}"))
        except Exception as error:  # noqa: BLE001 - it is noted, and the next try begins
            traceback.print_exc()
            print(f"found {type(error).__name__}: {' '.join(f'{error}'.split())[:200]}")
        print("tried", flush=True)


def campaign(
    name: str,
    body: Callable[[Run], None],
    *,
    count: int,
    child: Callable[..., None] = lambda *_: None,
) -> None:
    """Run ``body`` as the command of campaign ``name``, of ``count`` tries a case by default.

    A child process has the argument ``child``, and calls ``child`` with those that follow.
    Exits with status 1 if anything was found. ``--publish`` saves the figures as
    ``benchmarks/results/reliability-NAME.json``, of which a table of the docs is made.
    """
    if sys.argv[1:2] == ["child"]:
        return child(*sys.argv[2:])
    parser = argparse.ArgumentParser(prog=f"scripts/campaign {name}", description=body.__doc__)
    parser.add_argument("--count", type=int, default=count, help="tries a case (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    parser.add_argument("--publish", action="store_true", help="put the figures into the docs")
    given = parser.parse_args()
    folder = ROOT / "build" / "campaigns"
    run = Run(name, folder, seed=given.seed, seconds=given.seconds, count=given.count)
    if given.resume:
        run.resume()
    try:
        body(run)
    finally:
        run.save()
    if given.publish:
        cases = {
            case: {"count": row["count"], "found": len(row["found"])}
            for case, row in run.record["cases"].items()
        }
        about = setting(f"scripts/campaign {name} --count {given.count} --seed {given.seed}")
        save(RESULTS / f"reliability-{name}.json", {**run.record, "cases": cases, **about})
    total = sum(row["count"] for row in run.record["cases"].values())
    print(f"{name}: {total} tries in {run.elapsed:.0f} s, {len(run.failures)} found")
    raise SystemExit(bool(run.failures))
