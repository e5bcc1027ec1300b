"""Rewrites README's tables from the results committed under ``benchmarks/results``.

    .venv/bin/python benchmarks/readme_tables.py [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is the JSON file's.
``--check`` changes nothing and fails when a table is not what its JSON says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from localrt.formatting import format_bytes, format_rate, format_seconds

ROOT = Path(__file__).resolve().parent.parent
_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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


def _rated(result: dict[str, Any], peers: list[dict[str, Any]], key: str) -> str:
    return f"{format_rate(result[key])} ({result[key] / max(peer[key] for peer in peers):.2f}x)"


def main() -> int:
    parser = argparse.ArgumentParser(description="README tables from committed results")
    parser.add_argument("--check", action="store_true", help="fail when a table is out of date")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")

    def fill(match: re.Match[str]) -> str:
        record = json.loads((ROOT / "benchmarks/results" / f"{match[2]}.json").read_text())
        return f"{match[1]}{bench_table(record)}\n{match[3]}"

    new = _TABLE.sub(fill, old)
    if args.check:
        if new != old:
            print("README's tables are out of date: run benchmarks/readme_tables.py")
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
