"""From a programme to counts: by HiGHS in a short-lived child process, and by a greedy stand-in.

All programmes of one plan go to one child. Where SciPy or the child is missing, late or wrong, the
greedy answer stands, and the caller is told. It knows counts, not units.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from localrt.offload.placement import Where
from localrt.offload.planner.problem import (
    Counts,
    Problem,
    compute_seconds,
    held_bytes,
    is_feasible,
)

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from localrt.offload.planner.highs_child import main; main()"
)
# Importing SciPy on a slow disk takes longer than solving.
_GRACE_S = 20.0
_TIME_LIMIT_S = 0.5  # of one programme


class SolverError(Exception):
    """Why there is no exact answer; for a plan's notes."""


def child_command() -> list[str]:
    """The command of a child of this very localrt, installed or in a checkout."""
    # Of the package that this module was imported from; a room may lie beside it or in it.
    package = sys.modules["localrt"].__file__
    assert package is not None, "localrt is no namespace package"
    return [sys.executable, "-c", _START, str(Path(package).resolve().parents[1])]


def solve_exactly(problems: Sequence[Problem]) -> list[Counts | None]:
    """Counts of each programme, None where it has no solution; at most half a second each.

    Raises:
        SolverError: the child could not run, or gave something else.
    """
    if getattr(sys, "frozen", False):
        raise SolverError("a packaged program has no interpreter to start the solver with")
    variables = [
        [
            (number, where)
            for number, group in enumerate(problem.classes)
            for where in problem.places(group)
        ]
        for problem in problems
    ]
    request = {
        "time_limit": _TIME_LIMIT_S,
        "problems": [
            _encode(problem, pairs) for problem, pairs in zip(problems, variables, strict=True)
        ],
    }
    try:
        done = subprocess.run(
            child_command(),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_GRACE_S + _TIME_LIMIT_S * len(problems),
            check=True,
        )
        answers = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no message"]
        raise SolverError(f"the solver failed: {last[0]}") from error
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SolverError(f"the solver failed: {error}") from error
    return [
        _decode(problem, pairs, answer)
        for problem, pairs, answer in zip(problems, variables, answers, strict=True)
    ]


def _encode(problem: Problem, pairs: Sequence[tuple[int, Where]]) -> dict[str, object]:
    encoded = []
    for number, where in pairs:
        group = problem.classes[number]
        ram, vram = held_bytes(group, where)
        used = group.use * group.nbytes
        encoded.append(
            {
                "group": number,
                "ram": ram,
                "vram": vram,
                "read": used / problem.ssd_bytes_s if where.read else 0.0,
                "copy": used / problem.link_bytes_s if where.copied else 0.0,
                "chain": group.use * compute_seconds(problem, group, where),
            }
        )
    return {
        "variables": encoded,
        "counts": [group.count for group in problem.classes],
        "ram": problem.ram,
        "vram": problem.vram,
        "fixed": problem.fixed_s,
    }


def _decode(
    problem: Problem, pairs: Sequence[tuple[int, Where]], answer: list[int] | None
) -> Counts | None:
    if answer is None:
        return None
    counts: list[dict[Where, int]] = [{} for _ in problem.classes]
    for (number, where), count in zip(pairs, answer, strict=True):
        if count:
            counts[number][where] = count
    # Its tolerance is a millionth of the budget, which may be more than the bytes left.
    return counts if is_feasible(problem, counts) else None
