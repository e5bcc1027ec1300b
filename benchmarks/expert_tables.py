"""Markdown of the results about experts: in RAM, on the SSD, ahead of their need, in plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrt.formatting import format_bytes, format_rate

__all__ = ["experts_ssd_table", "experts_table", "plans_table", "prefetch_table"]


def experts_table(record: Mapping[str, Any]) -> str:
    """One row for each shape."""
    lines = [
        "| shape | format | layers | experts, one row | step, one row | decode tok/s "
        "| prefill 512 tok/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in record["results"].items():
        kernels, models = result["kernels"], result.get("models")
        cells = [
            name,
            kernels["format"],
            str(kernels["layers"]),
            _share(kernels["experts_bytes_s"], kernels["of_floor"]),
            _share(kernels["step_bytes_s"], kernels["step_of_floor"]),
            _against(models, "decode"),
            _against(models, "prefill"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"`{record['command']}`: random weights, as many layers as said, all in RAM; GB/s of the "
        "active experts' bytes, with their share of the run's own read floor; a step is router, "
        "experts and their sum; in brackets, times llama.cpp at its best on the same file. "
        f"{_where(record, record['isa'])}",
    ]
    return "\n".join(lines)


def _share(bytes_s: float, share: float) -> str:
    return f"{bytes_s / 1e9:.1f} GB/s ({100 * share:.0f} %)"


def _against(models: Mapping[str, Any] | None, phase: str) -> str:
    if not models or phase not in models:
        return "-"
    found = models[phase]
    return f"{found['native_tokens_s']:.0f} ({found['times_llamacpp']:.2f}x)"


def experts_ssd_table(record: Mapping[str, Any]) -> str:
    """One row for each engine and share of the experts."""
    lines = [
        "| RAM for | memory limit | engine | tok/s | predicted | experts in memory "
        "| read per token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["results"]:
        peers = [
            other["tok_s"]
            for other in record["results"]
            if other["share"] == row["share"] and other["engine"] == "llamacpp"
        ]
        ahead = (
            f" ({row['tok_s'] / max(peers):.1f}x)" if row["engine"] == "native" and peers else ""
        )
        hits, predicted = row["hit_rate"], row["predicted_tok_s"]
        cells = [
            f"{100 * row['share']:.0f} % of the experts",
            format_bytes(row["limit_bytes"]),
            f"{row['engine']} (repacked)" if row["repacked"] else row["engine"],
            f"{format_rate(row['tok_s'])}{ahead}",
            "-" if predicted is None else format_rate(predicted),
            "-" if hits is None else f"{100 * hits:.0f} %",
            format_bytes(row["read_bytes_per_token"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    fixture = record["fixture"]
    lines += [
        "",
        f"`{record['command']}`: the trained fixture ({fixture['tokens'] / 1e6:.1f} million "
        f"tokens), widened to {format_bytes(record['experts_bytes'])} of experts, on text that it "
        f"has not learnt; medians of five. {_where(record)}",
    ]
    return "\n".join(lines)


def prefetch_table(record: Mapping[str, Any]) -> str:
    """One row for each share of the experts and mode."""
    lines = [
        "| RAM for | guesses by | tok/s | experts in memory | read per token | guesses per token "
        "| of them right | judged to pay |",
        "|---|---|---|---|---|---|---|---|",
    ]
    judged: dict[tuple[float, str], bool] = {}
    for row in record["results"]:
        if row["mode"] == "measured":
            for lane in row["sources"].values():
                for name, each in lane["judged"].items():
                    judged[row["share"], name] = (
                        judged.get((row["share"], name), False) or (each["pays"])
                    )
    for row in record["results"]:
        off = [
            other["tok_s"]
            for other in record["results"]
            if other["share"] == row["share"] and other["mode"] == "off"
        ]
        ratio = f" ({row['tok_s'] / off[0]:.2f}x)" if off and row["mode"] != "off" else ""
        verdict = judged.get((row["share"], row["mode"]))
        cells = [
            f"{100 * row['share']:.0f} % of the experts",
            {"off": "nobody", "measured": "whatever was measured to pay"}.get(
                row["mode"], row["mode"]
            ),
            f"{format_rate(row['tok_s'])}{ratio}",
            "-" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.0f} %",
            format_bytes(row["read_bytes_per_token"]),
            f"{row['guesses_per_token']:.1f}",
            "-" if row["useful"] is None else f"{100 * row['useful']:.0f} %",
            "-" if verdict is None else ("yes" if verdict else "no"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    simulated = " Rates are simulated." if record["simulated"] else ""
    lines += [
        "",
        f"`{record['command']}`: as below; the median of {record['runs']} runs, each of a process "
        f"of its own.{simulated} {_where(record)}",
    ]
    return "\n".join(lines)


def plans_table(record: Mapping[str, Any]) -> str:
    """One row for each model."""
    lines = [
        "| model | weights | used per token | tok/s | at most | limited by | per token: SSD, link, "
        "RAM, VRAM | what would help most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in record["results"].items():
        ways = row["bytes_per_token"]
        best = row["advice"][0] if row["advice"] else None
        cells = [
            name,
            format_bytes(row["weight_bytes"]),
            format_bytes(row["active_bytes"]),
            format_rate(row["tok_s"]),
            format_rate(row["ceiling_tok_s"]),
            row["bottleneck"].upper(),
            ", ".join(format_bytes(ways[way]) for way in ("ssd", "link", "ram", "vram")),
            "-" if best is None else f"{best['change']} ({best['gain']:.1f}x)",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    hardware = record["hardware"]
    lines += [
        "",
        f"`{record['command']}`: from config.json alone, {record['ctx']:,} tokens of context; "
        f"{hardware['gpu']} with {hardware['gpu_memory']}, {hardware['ram']} of RAM "
        f"({hardware['cpu']}, {hardware['ram_bytes_s'] / 1e9:.0f} GB/s), "
        f"SSD of {hardware['ssd']}. All rates are simulated.",
    ]
    return "\n".join(lines)


def _where(record: Mapping[str, Any], *more: str) -> str:
    """The machine, and what was installed on it."""
    cpu = record["machine"]["cpu"]
    installed = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [cpu["name"], f"{cpu['usable_cores']} cores", *more]
    return f"{', '.join(parts)}. {installed}."
