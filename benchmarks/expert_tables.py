"""Markdown of ``experts.json``: expert kernels against the read floor and llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["experts_table"]


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
