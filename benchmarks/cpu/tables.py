"""A table of ``benchmarks.cpu``'s results, and their rows for README's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.command import ISAS
from benchmarks.common.record import machine_of, markdown_table, versions_of
from benchmarks.cpu.llama_bench import PEERS
from localrt.common.formatting import format_rate


def cpu_table(record: Mapping[str, Any]) -> str:
    """Ours and the peers' tokens per second; ratios are medians of turns."""
    rows = []
    for row in record["rows"]:
        cells = [row["name"], _ours(row, record["threads"])]
        for name in PEERS:
            peer = row["peers"].get(name)
            rate = peer and f"{format_rate(peer['tok_s']['median'])} ({_setting(peer)})"
            cells += [rate or "", times(row, name)]
        share = row.get("of_floor")
        rows.append([*cells, f"{100 * share['median']:.0f} %" if share else ""])
    headers = ["", "localrt, tok/s", "ik_llama.cpp", "ratio", "llama.cpp", "ratio", "of reading"]
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`: "
        f"{ISAS[record['isa']]} on {machine_of(record)}; medians of "
        f"{record['runs']} turns. {versions_of(record)}{_builds(record)}."
    )


def times(row: Mapping[str, Any], peer: str) -> str:
    """How many times as fast as ``peer``; empty if that was not measured."""
    found = row["peers"].get(peer)
    return f"{found['ratio']['median']:.2f}x" if found else ""


def fair_share(threads: int) -> float:
    """The share of its speed that a program keeps if it loses half of one of its cores."""
    return (threads - 0.5) / threads


def _ours(row: Mapping[str, Any], threads: int) -> str:
    value = row["localrt"]["median"]
    if row["kind"] == "tree":
        return f"{value:.2f} passes"
    if row["kind"] == "neighbour":
        return f"{value:.0%} (fair share {fair_share(threads):.0%})".replace("%", " %")
    return f"{100 * value:.1f} %" if row["kind"] == "outside" else format_rate(value)


def _setting(peer: Mapping[str, Any]) -> str:
    _, repacked, _, attention = peer["setting"].split()
    kept = "repacked" if repacked == "1" else "plain"
    return f"{kept}, flash attention" if attention == "1" else kept


def _builds(record: Mapping[str, Any]) -> str:
    """The peers' commits, where their builds know them."""
    found = {
        f", {name} {peer['build']}"
        for row in record["rows"]
        for name, peer in row["peers"].items()
        if peer["build"] != "unknown"
    }
    return "".join(sorted(found))
