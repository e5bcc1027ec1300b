"""What the compiler makes of the products' kernels, on every generation of GPUs.

    python -m benchmarks.gpu.compiled [--formats q4_k,nvfp4] [--json FILE]

It depends on the sources and the compiler alone, on no machine. A run that was stopped continues;
rows of other sources are made again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.command import cited_command, listed, make_parser
from benchmarks.common.record import Record, load, save
from benchmarks.gpu.machine_code import (
    TARGETS,
    Build,
    ManyBuild,
    build,
    build_experts,
    build_many,
)
from localrt.quant.cuda.formats import TYPES
from localrt.quant.cuda.programs import toolchain

VARIANTS: Mapping[str, Callable[[str, int], Build | ManyBuild]] = {
    "one row": lambda format_, target: build(format_, 1, target),
    "experts, one row": lambda format_, target: build_experts(format_, 1, target, gate=True),
    "many rows": build_many,
}
_COUNTS = ("registers", "spilled_bytes", "shared_bytes", "per_byte", "per_product")


def compiled_row(format_: str, variant: str) -> Record:
    """The counts of a variant, each a list by ``TARGETS``; see ``Build`` and ``ManyBuild``.
    ``unpacking`` is counted on compute capability 8.9 alone.
    """
    made = [asdict(VARIANTS[variant](format_, target)) for target in TARGETS]
    counts = {key: [each[key] for each in made] for key in _COUNTS if key in made[0]}
    ada = made[TARGETS.index(89)]
    unpacking = {"unpacking": ada["unpacking"]} if "unpacking" in ada else {}
    return {"name": _name(format_, variant), **counts, **unpacking}


def _name(format_: str, variant: str) -> str:
    return f"{format_}, {variant}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count, save."""
    parser = make_parser(__doc__, results="compiled")
    parser.add_argument("--formats", type=listed(TYPES), default=sorted(TYPES), metavar="NAMES")
    args = parser.parse_args(arguments)
    path: Path | None = args.json
    nvrtc, sources = toolchain()
    before: Record = {} if path is None else load(path)
    same = (before.get("nvrtc"), before.get("sources")) == (nvrtc, sources)
    done = {row["name"]: row for row in before["rows"]} if same else {}
    for format_ in args.formats:
        for variant in VARIANTS:
            if _name(format_, variant) in done:
                continue
            row = done[_name(format_, variant)] = compiled_row(format_, variant)
            print(", ".join(f"{key} {row[key]}" for key in row), flush=True)
            record: Record = {
                "command": cited_command("gpu.compiled", arguments),
                "nvrtc": nvrtc,
                "sources": sources,
                "capabilities": [f"{target / 10}" for target in TARGETS],
                "rows": [done[name] for name in sorted(done)],
            }
            save(path, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
