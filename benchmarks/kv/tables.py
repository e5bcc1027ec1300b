"""Markdown from ``kv.json``: each model's formats beside bf16. It computes nothing of its own."""

from __future__ import annotations

from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of

__all__ = ["kv_table"]


def kv_table(record: dict[str, Any]) -> str:
    """One row for each model and format."""
    headers = ["model", "cache", "bits", "perplexity", "change", "KL", "same top token", "tokens"]
    rows = [
        [model["model"], *_cells(name, model["bits"][name], found)]
        for model in record["models"]
        for name, found in model["formats"].items()
    ]
    settings = record["settings"]
    texts = "; ".join(f"{text['name']}: {text['source']}" for text in settings["texts"])
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`. Windows of {settings['ctx']} "
        "tokens, half of them prose, half code, all tokens but a window's first scored. Changes "
        "and KL are against bf16 at the same tokens, ± one standard error. Bits are of a number, "
        f"with its share of the scales. {texts}. {machine_of(record)}. {versions_of(record)}."
    )


def _cells(name: str, bits: float, found: dict[str, Any]) -> list[str]:
    cells = [name, f"{bits:.2f}", f"{found['perplexity']:.3f}"]
    if name == "bf16":
        return [*cells, "", "", "", f"{found['tokens']:,}"]
    return [
        *cells,
        f"{100 * found['change']:+.3f} ± {100 * found['change_error']:.3f} %",
        f"{found['kl']:.5f} ± {found['kl_error']:.5f}",
        f"{100 * found['top1']:.1f} %",
        f"{found['tokens']:,}",
    ]
