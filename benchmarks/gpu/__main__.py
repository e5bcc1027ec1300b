"""Speeds on a CUDA GPU: of copies, waits and kernels, and of a model larger than its budget.

No card has run this yet.

    python -m benchmarks.gpu facts|kernels|14B|30B-A3B [--json FILE]

Weights are random, and nothing is downloaded. ``scripts/gpu_check`` runs each part as a process of
its own; a row is saved as soon as it is measured. That kernels and pipeline
are right is shown by ``pytest -m gpu``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import Record, Results
from benchmarks.gpu.facts import facts
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.model import MODELS, model
from localrt.quant.cuda.driver import count_gpus, device_of

PARTS: dict[str, Callable[[], Iterator[tuple[str, Record]]]] = {
    "facts": facts,
    "kernels": kernels,
    **{name: partial(model, name) for name in MODELS},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one part, print and save its rows; 1 if an answer was wrong or took too much."""
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    args = parser.parse_args(arguments)
    if not count_gpus():
        print("gpu: there is no CUDA GPU", file=sys.stderr)
        return 1
    command = cited_command("gpu", arguments)
    results = Results(args.json, command, "torch", gpu=device_of("cuda").name)
    for name, values in PARTS[args.part]():
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        print(f"{name}: {', '.join(shown)}", flush=True)
        results.put({"name": name, **values})
    return int(any(row.get("failed") for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
