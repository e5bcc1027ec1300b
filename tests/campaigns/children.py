"""Tries in child processes: one that crashes or hangs ends neither the campaign nor other tries."""

from __future__ import annotations

import faulthandler
import os
import random
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from benchmarks.common.command import ROOT
from tests.campaigns.campaign import Run

_TOLD = re.compile(r"ERROR: |WARNING: Thread|runtime error:|Timeout|Error: ")


def in_children(run: Run, case: str, *, at_once: int, **environment: str) -> None:
    """Try ``case`` until ``run`` is over: ``at_once`` tries for each child of its module."""
    while run.goes_on(case):
        first = run.done(case)
        count = min(at_once, run.count - first)
        command = [sys.executable, "-m", f"tests.campaigns.{run.name}", "child", case]
        command += [f"{number}" for number in (run.seed, first, count)]
        child = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True)
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
    cases: Mapping[str, Callable[[random.Random], None]], arguments: Sequence[str], patience_s: int
) -> None:
    """Be such a child. A try that takes longer than ``patience_s`` shows its stacks and ends it."""
    case, seed, first, count = arguments
    for number in range(int(first), int(first) + int(count)):
        faulthandler.dump_traceback_later(patience_s, exit=True)
        try:
            cases[case](random.Random(f"{seed} {case} {number}"))
        except Exception as error:  # noqa: BLE001 - it is noted, and the next try begins
            traceback.print_exc()
            print(f"found {type(error).__name__}: {' '.join(f'{error}'.split())[:200]}")
        print("tried", flush=True)
