"""What every campaign shares: its options, and a record of its tries and figures.

A campaign tries one kind of harm many times: a table of cases, whose random choices come from
``Run.random``. It is a module of this package that calls ``campaign`` when it is run.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.command import ROOT
from benchmarks.common.record import Record, save

_SAVED_EVERY_S = 5.0


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
        """Seconds that this run has taken."""
        return time.monotonic() - self._started

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


def campaign(
    name: str,
    body: Callable[[Run], None],
    *,
    count: int,
    child: Callable[..., None] = lambda *_: None,
) -> None:
    """Run ``body`` as the command of campaign ``name``, of ``count`` tries a case by default.

    A child process has the argument ``child``, and calls ``child`` with those that follow.
    Exits with status 1 if anything was found. What was counted, found and measured is in
    ``build/campaigns/NAME.json``.
    """
    if sys.argv[1:2] == ["child"]:
        return child(*sys.argv[2:])
    parser = argparse.ArgumentParser(prog=f"scripts/campaign {name}", description=body.__doc__)
    parser.add_argument("--count", type=int, default=count, help="tries a case (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder = ROOT / "build" / "campaigns"
    run = Run(name, folder, seed=given.seed, seconds=given.seconds, count=given.count)
    try:
        body(run)
    finally:
        run.save()
    total = sum(row["count"] for row in run.record["cases"].values())
    print(f"{name}: {total} tries in {run.elapsed:.0f} s, {len(run.failures)} found")
    raise SystemExit(bool(run.failures))
