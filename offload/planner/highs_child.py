"""The solver's own process: programmes as JSON on stdin, counts as JSON on stdout.

SciPy costs a process 60 MB that never come back; here they go when the process does. It knows
classes and places by number only. Run as a program.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Solve what stdin holds."""
    request = json.load(sys.stdin)
    answers = [solve_one(each, request["time_limit"]) for each in request["problems"]]
    json.dump(answers, sys.stdout)


def solve_one(problem: dict[str, Any], time_limit: float) -> list[int] | None:
    """Counts of every variable, or None where there is no solution.

    A variable is a class at a place, with its bytes of ``ram`` and ``vram``, the seconds of
    ``read``, ``copy`` and ``chain`` that one unit adds, and its ``group``. Minimized is the longest
    of the three sums; a hair of their total settles ties, so that nothing is moved for nothing.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    variables, counts = problem["variables"], problem["counts"]
    size = len(variables)
    sums = {
        key: np.array([each[key] for each in variables], float)
        for key in ("read", "copy", "chain", "ram", "vram")
    }
    scale = max(1e-9, float(sum(sums[key].sum() for key in ("read", "copy", "chain"))) / size)
    rows, low, high = [], [], []
    for group, count in enumerate(counts):
        member = [float(each["group"] == group) for each in variables]
        rows.append([*member, 0.0])
        low.append(count)
        high.append(count)
    for key in ("ram", "vram"):
        # In units of the budget: HiGHS is exact to a millionth, not to a byte of a terabyte.
        whole = max(1.0, float(problem[key]))
        rows.append([*(sums[key] / whole), 0.0])
        low.append(-np.inf)
        high.append(problem[key] / whole)
    for key, fixed in (("read", 0.0), ("copy", 0.0), ("chain", problem["fixed"])):
        rows.append([*(sums[key] / scale), -1.0])
        low.append(-np.inf)
        high.append(-fixed / scale)
    tie = 1e-4 * (sums["read"] + sums["copy"] + 0.1 * sums["chain"]) / scale
    upper = np.array([*(counts[each["group"]] for each in variables), np.inf])
    result = milp(
        np.array([*tie, 1.0]),
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        bounds=Bounds(np.zeros(size + 1), upper),
        integrality=np.array([*[1] * size, 0]),
        options={"time_limit": time_limit, "mip_rel_gap": 2e-4},
    )
    if result.x is None:
        return None
    return [round(value) for value in result.x[:size]]


if __name__ == "__main__":
    main()
