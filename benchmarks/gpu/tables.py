"""The tables of ``docs/gpu.md``, from the JSON of ``scripts/gpu_check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.markdown import markdown_table

__all__ = ["gpu_tables"]

Record = Mapping[str, Any]

_BATCHES = (1, 4, 8, 16, 32, 64)


def gpu_tables(record: Record) -> str:
    """What ran, what failed, and the kernels' speeds."""
    results = record["results"]
    machine = record["machine"]
    passed = sum(result["ok"] for result in results)
    head = (
        f"`{record['command']}` on one {machine['device']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}: {passed} of {len(results)} checks passed in "
        f"{record['seconds']:.0f} seconds."
    )
    failed = [f"- {result['name']}: {_why(result)}" for result in results if not result["ok"]]
    parts = [head, *(["Failed:", "\n".join(failed)] if failed else [])]
    parts += [_one_row(results), _batches(results), _whole(results)]
    return "\n\n".join(parts)


def _why(result: Record) -> str:
    values = result["values"]
    if "error" in values:
        return str(values["error"]).split(". ")[0]
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _named(results: Sequence[Record], start: str) -> Iterator[tuple[str, Record]]:
    for result in results:
        if result["name"].startswith(start) and "error" not in result["values"]:
            yield result["name"].removeprefix(start), result["values"]


def _one_row(results: Sequence[Record]) -> str:
    rows = [
        [
            name,
            f"{values['us']:.1f}",
            f"{values['gb_s']:.0f}",
            f"{values['share_of_copy']:.0%}",
            f"{values['against_cublas_bf16']:.2f}x",
        ]
        for name, values in _named(results, "one row ")
    ]
    headers = ["one row", "µs", "GB/s", "of a copy's", "times cuBLAS in bf16"]
    return markdown_table(headers, rows)


def _batches(results: Sequence[Record]) -> str:
    rows = [
        [name, *(f"{values[f'against_cublas_{rows}']:.2f}x" for rows in _BATCHES)]
        for name, values in _named(results, "batches ")
    ]
    return markdown_table(["times cuBLAS in bf16, rows", *map(str, _BATCHES)], rows)


def _whole(results: Sequence[Record]) -> str:
    rows = []
    for name, values in _named(results, "resident "):
        graph = values.get("decode_tok_s_graph")
        rows.append(
            [
                name.removeprefix("1.5B "),
                f"{graph:.0f}" if graph else "",
                f"{values['decode_tok_s_plain']:.0f}",
                f"{values['prefill_tok_s']:.0f}",
            ]
        )
    headers = ["resident, shape of Qwen2.5 1.5B", "decode tok/s", "without CUDA graphs"]
    return markdown_table([*headers, "prefill tok/s"], rows)
