"""Markdown of ``experts.json`` and ``experts_ssd.json``: experts in RAM, and on the SSD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrt.formatting import format_bytes, format_rate

__all__ = ["experts_ssd_table", "experts_table"]


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
    machine, versions = record["machine"], record["versions"]
    installed = ", ".join(f"{package} {version}" for package, version in versions.items())
    lines += [
        "",
        f"`{record['command']}`: random weights, as many layers as said, all in RAM; GB/s of the "
        "active experts' bytes, with their share of the run's own read floor; a step is router, "
        "experts and their sum; in brackets, times llama.cpp at its best on the same file. "
        f"{machine['cpu']['name']}, {machine['cpu']['usable_cores']} cores, {record['isa']}. "
        f"{installed}.",
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
    machine, versions, fixture = record["machine"], record["versions"], record["fixture"]
    installed = ", ".join(f"{package} {version}" for package, version in versions.items())
    lines += [
        "",
        f"`{record['command']}`: the trained fixture ({fixture['tokens'] / 1e6:.1f} million "
        f"tokens), widened to {format_bytes(record['experts_bytes'])} of experts, on text that it "
        f"has not learnt; medians of five. {machine['cpu']['name']}, "
        f"{machine['cpu']['usable_cores']} cores. "
        f"{installed}.",
    ]
    return "\n".join(lines)
