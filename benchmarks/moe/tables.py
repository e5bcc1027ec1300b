"""Markdown of the results about experts: in RAM, on the SSD, in caches, prefetched, in plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from localrt.formatting import format_bytes, format_rate

__all__ = ["experts_table", "guesses_table", "hit_rates_table", "plans_table", "ssd_table"]

Record = Mapping[str, Any]


def experts_table(record: Record) -> str:
    """One row for each shape."""
    rows = []
    for name, result in record["results"].items():
        kernels, models = result["kernels"], result.get("models", {})
        rows.append(
            [
                name,
                kernels["format"],
                str(kernels["layers"]),
                _share(kernels["experts_bytes_s"], kernels["of_floor"]),
                _share(kernels["step_bytes_s"], kernels["step_of_floor"]),
                *(_against(models.get(phase)) for phase in ("decode", "prefill")),
            ]
        )
    headers = ["shape", "format", "layers", "experts, one row", "step, one row"]
    table = markdown_table([*headers, "decode tok/s", "prefill 512 tok/s"], rows)
    return (
        f"{table}\n\n`{record['command']}`: random weights, all in RAM; GB/s of the active "
        "experts' bytes, with their share of the run's own read floor; a step is router, experts "
        "and their sum; in brackets, times llama.cpp at its best on the same file. "
        f"{machine_of(record)}. {versions_of(record)}."
    )


def _share(bytes_s: float, share: float) -> str:
    return f"{bytes_s / 1e9:.1f} GB/s ({100 * share:.0f} %)"


def _against(found: Record | None) -> str:
    if found is None:
        return "-"
    return f"{found['native_tokens_s']:.0f} ({found['times_llamacpp']:.2f}x)"


def ssd_table(record: Record) -> str:
    """One row for each engine and share of the experts."""
    rows = []
    for row in record["results"]:
        peers = [
            other["tok_s"]
            for other in record["results"]
            if other["share"] == row["share"] and other["engine"] == "llamacpp"
        ]
        ahead = peers and row["engine"] == "native"
        predicted = row["predicted_tok_s"]
        rows.append(
            [
                f"{100 * row['share']:.0f} % of the experts",
                format_bytes(row["limit_bytes"]),
                f"{row['engine']} (repacked)" if row["repacked"] else row["engine"],
                format_rate(row["tok_s"])
                + (f" ({row['tok_s'] / max(peers):.1f}x)" if ahead else ""),
                "-" if predicted is None else format_rate(predicted),
                _percent(row["hit_rate"]),
                format_bytes(row["read_bytes_per_token"]),
            ]
        )
    headers = ["RAM for", "memory limit", "engine", "tok/s", "predicted", "experts in memory"]
    return (
        f"{markdown_table([*headers, 'read per token'], rows)}\n\n`{record['command']}`: the "
        f"trained fixture ({record['fixture']['tokens'] / 1e6:.1f} million tokens), widened to "
        f"{format_bytes(record['experts_bytes'])} of experts, on text that it has not learnt; "
        f"medians of five. {machine_of(record)}. {versions_of(record)}."
    )


def guesses_table(record: Record) -> str:
    """One row for each share of the experts and way to guess."""
    judged: dict[tuple[float, str], bool] = {}
    for row in record["results"]:
        for lane in row["sources"].values() if row["mode"] == "measured" else ():
            for name, each in lane["judged"].items():
                key = row["share"], name
                judged[key] = judged.get(key, False) or each["pays"]
    off = {row["share"]: row["tok_s"] for row in record["results"] if row["mode"] == "off"}
    names = {"off": "nobody", "measured": "whatever was measured to pay"}
    rows = []
    for row in record["results"]:
        share, mode = row["share"], row["mode"]
        against = share in off and mode != "off"
        verdict = judged.get((share, mode))
        rows.append(
            [
                f"{100 * share:.0f} % of the experts",
                names.get(mode, mode),
                format_rate(row["tok_s"])
                + (f" ({row['tok_s'] / off[share]:.2f}x)" if against else ""),
                _percent(row["hit_rate"]),
                format_bytes(row["read_bytes_per_token"]),
                f"{row['guesses_per_token']:.1f}",
                _percent(row["useful"]),
                "-" if verdict is None else ("yes" if verdict else "no"),
            ]
        )
    headers = ["RAM for", "guesses by", "tok/s", "experts in memory", "read per token"]
    headers += ["guesses per token", "of them right", "judged to pay"]
    simulated = " Rates are simulated." if record["simulated"] else ""
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`: as below; the median of "
        f"{record['runs']} runs, each of a process of its own.{simulated} {machine_of(record)}. "
        f"{versions_of(record)}."
    )


def hit_rates_table(record: Record) -> str:
    """One row for each trace and share of the experts."""
    headers = {"lru": "LRU", "learned": "localrt", "belady": "best possible (Belady)"}
    rows = [
        [
            row["trace"],
            f"{100 * row['cached']:.0f} %",
            f"{row['tokens']:,}",
            *(f"{100 * row['hit_rates'][name]:.1f} %" for name in headers),
        ]
        for row in record["hit_rates"]
    ]
    table = markdown_table(["trace", "experts that fit", "tokens", *headers.values()], rows)
    return f"{table}\n\n`{record['command']}`: from an empty cache. {versions_of(record)}."


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def plans_table(record: Record) -> str:
    """One row for each model."""
    rows = []
    for name, row in record["results"].items():
        ways = row["bytes_per_token"]
        best = row["advice"][0] if row["advice"] else None
        rows.append(
            [
                name,
                format_bytes(row["weight_bytes"]),
                format_bytes(row["active_bytes"]),
                format_rate(row["tok_s"]),
                format_rate(row["ceiling_tok_s"]),
                row["bottleneck"].upper(),
                ", ".join(format_bytes(ways[way]) for way in ("ssd", "link", "ram", "vram")),
                "-" if best is None else f"{best['what']} ({best['gain']:.1f}x)",
            ]
        )
    headers = ["model", "weights", "used per token", "tok/s", "at most", "limited by"]
    headers += ["per token: SSD, link, RAM, VRAM", "what would help most"]
    hardware = record["hardware"]
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`: from config.json alone, "
        f"{record['ctx']:,} tokens of context; {hardware['gpu']} with {hardware['gpu_memory']}, "
        f"{hardware['ram']} of RAM ({hardware['cpu']}, {hardware['ram_bytes_s'] / 1e9:.0f} GB/s), "
        f"SSD of {hardware['ssd']}. All rates are simulated."
    )
