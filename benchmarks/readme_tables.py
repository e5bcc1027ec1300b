"""Rewrites the tables of README and docs from the results committed under ``benchmarks/results``.

    .venv/bin/python benchmarks/readme_tables.py [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``bench-...`` names a JSON
file of ``localrt bench``, ``kernels`` and ``passes-...`` those of the benchmarks of that name;
``quality`` (short), ``quality-full`` and ``quality-claims`` are made from ``quality.json``,
``speculation`` and ``speculation-short`` from ``speculation.json``, ``offload`` from
``offload.json``; ``gpu_check``, ``experts`` and ``moe_cache`` from the files of their names;
``app`` from those of the app, the server and conversations.
``--check`` changes nothing and fails when a table is not what its JSON says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this folder: its kernels.py would hide a package of that name

from benchmarks.app_tables import app_table  # noqa: E402
from benchmarks.expert_tables import (  # noqa: E402
    experts_ssd_table,
    experts_table,
    plans_table,
    prefetch_table,
)
from benchmarks.gpu_tables import gpu_tables  # noqa: E402
from benchmarks.kernel_tables import kernels_table, passes_table  # noqa: E402
from benchmarks.moe_cache_tables import tables as moe_cache_tables  # noqa: E402
from benchmarks.offload_tables import offload_table  # noqa: E402
from benchmarks.quality_tables import claims_list, full_tables, short_table  # noqa: E402
from benchmarks.speculation_tables import speculation_short, speculation_table  # noqa: E402
from localrt.formatting import format_bytes, format_rate, format_seconds  # noqa: E402

PAGES = ("README.md", "docs/gpu.md", "docs/mixtures.md", "docs/quality.md", "docs/speculation.md")
_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Several tables of one JSON file, which is that of the benchmark of its name.
_OF_FILE = {
    "quality": {"quality": short_table, "quality-full": full_tables, "quality-claims": claims_list},
    "speculation": {"speculation": speculation_table, "speculation-short": speculation_short},
    "experts_prefetch": {"experts_prefetch": prefetch_table},
}


def bench_table(record: dict[str, Any]) -> str:
    """The best setting of each engine of a ``localrt bench --json``.

    Ratios are to llama.cpp's best figure of the column, whichever setting reached it.
    """
    best = [result for result in record["results"] if result["best"]]
    peers = [r for r in record["results"] if r["engine"] == "llamacpp"] or best
    lines = [
        "| engine | prefill tok/s | decode tok/s | first token | peak RAM |",
        "|---|---|---|---|---|",
    ]
    for result in best:
        cells = [
            f"{result['engine']} ({result['setting'] or result['info'].get('format', '')})",
            _rated(result, peers, "prefill_tok_s"),
            _rated(result, peers, "decode_tok_s"),
            format_seconds(result["ttft_s"]),
            format_bytes(result["peak_ram_bytes"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    machine, versions = record["machine"], record["versions"]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += [
        "",
        f"`{record['command'].removesuffix(' --json')}`: {record['prompt_tokens']} prompt and "
        f"{record['tokens']} answer tokens, median of {record['runs']}, on "
        f"{machine['cpu']['name']}, {machine['cpu']['usable_cores']} cores. {installed}.",
    ]
    return "\n".join(lines)


_KINDS = {
    "bench": bench_table,
    "kernels": kernels_table,
    "passes": passes_table,
    "offload": offload_table,
    "gpu_check": gpu_tables,
    "experts": experts_table,
    "experts_ssd": experts_ssd_table,
    "moe_cache": moe_cache_tables,
    "plans": plans_table,
}


def _rated(result: dict[str, Any], peers: list[dict[str, Any]], key: str) -> str:
    return f"{format_rate(result[key])} ({result[key] / max(peer[key] for peer in peers):.2f}x)"


def filled(text: str) -> str:
    """``text`` with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name == "app":
            return f"{match[1]}{app_table(ROOT / 'benchmarks/results')}\n{match[3]}"
        kind = name.partition("-")[0]
        tables = _OF_FILE.get(kind, {})
        path = ROOT / "benchmarks/results" / f"{kind if name in tables else name}.json"
        if name in tables and not path.exists():
            return f"{match[1]}Not measured yet: run benchmarks/{kind}.py.\n{match[3]}"
        record = json.loads(path.read_text(encoding="utf-8"))
        make = tables.get(name) or _KINDS[kind]
        return f"{match[1]}{make(record)}\n{match[3]}"

    return _TABLE.sub(fill, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="tables from committed results")
    parser.add_argument("--check", action="store_true", help="fail when a table is out of date")
    check = parser.parse_args(arguments).check
    stale = False
    for name in PAGES:
        page = ROOT / name
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if check and new != old:
            print(f"the tables of {name} are out of date: run benchmarks/readme_tables.py")
            stale = True
        elif not check:
            page.write_text(new, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
