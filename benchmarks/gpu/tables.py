"""The tables of ``docs/gpu.md``, from the JSON of ``scripts/gpu_check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    parts += [
        "\n".join(_one_row(results)),
        "\n".join(_batches(results)),
        "\n".join(_whole(results)),
    ]
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


def _one_row(results: Sequence[Record]) -> Iterator[str]:
    yield "| one row | µs | GB/s | of a copy's | times cuBLAS in bf16 |"
    yield "|---|---|---|---|---|"
    for name, values in _named(results, "one row "):
        yield (
            f"| {name} | {values['us']:.1f} | {values['gb_s']:.0f} "
            f"| {values['share_of_copy']:.0%} | {values['against_cublas_bf16']:.2f}x |"
        )


def _batches(results: Sequence[Record]) -> Iterator[str]:
    yield f"| times cuBLAS in bf16, rows | {' | '.join(map(str, _BATCHES))} |"
    yield "|---" * (1 + len(_BATCHES)) + "|"
    for name, values in _named(results, "batches "):
        cells = [f"{values[f'against_cublas_{rows}']:.2f}x" for rows in _BATCHES]
        yield f"| {name} | {' | '.join(cells)} |"


def _whole(results: Sequence[Record]) -> Iterator[str]:
    yield "| resident, shape of Qwen2.5 1.5B | decode tok/s | without CUDA graphs | prefill tok/s |"
    yield "|---|---|---|---|"
    for name, values in _named(results, "resident "):
        graph = values.get("decode_tok_s_graph")
        plain = values.get("decode_tok_s_plain", values.get("decode_tok_s"))
        yield (
            f"| {name.removeprefix('1.5B ')} | {f'{graph:.0f}' if graph else ''} | {plain:.0f} "
            f"| {values['prefill_tok_s']:.0f} |"
        )
