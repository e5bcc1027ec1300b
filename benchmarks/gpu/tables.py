"""The tables of ``docs/gpu.md``, from the JSON of ``scripts/gpu_check``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.record import markdown_table

Record = Mapping[str, Any]

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Of a failed check's values, those that may have failed it.
_REASONS = re.compile("error|bound|equal|sequential|peak|estimate|finite|same")
_VERSIONS = ("torch", "cuda", "driver", "triton", "cuda-bindings", "bitsandbytes")


def gpu_tables(record: Record) -> str:
    """When and where it ran, what failed, what did not run, and speeds."""
    results = record["results"]
    machine = record["machine"]
    passed = sum(result["ok"] for result in results)
    versions = ", ".join(f"{name} {machine[name]}" for name in _VERSIONS if machine.get(name))
    head = (
        f"`{record['command']}` on {record.get('date', 'a day that was not kept')}, one "
        f"{machine['device']}, {versions}: {passed} of {len(results)} checks passed in "
        f"{record['seconds']:.0f} seconds."
    )
    failed = [f"- {result['name']}: {_why(result)}" for result in results if not result["ok"]]
    parts = [head, *(["Failed:", "\n".join(failed)] if failed else [])]
    missing = [(name, values) for name, values in _named(results, "") if "not run" in values]
    if missing:
        parts += [
            "Not run:",
            "\n".join(f"- {name}: {values['not run']}" for name, values in missing),
        ]
    parts += [_facts(results), _batches(results), _whole(results)]
    parts += [_adapters(results), _towers(results), _loaded(results)]
    return "\n\n".join(part for part in parts if part)


def _why(result: Record) -> str:
    values = result["values"]
    if "error" in values:
        return str(values["error"]).split(". ")[0]
    told = {name: value for name, value in values.items() if _REASONS.search(name)} or values
    return ", ".join(f"{name} {_number(value)}" for name, value in told.items())


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _named(results: Sequence[Record], start: str) -> Iterator[tuple[str, Record]]:
    for result in results:
        if result["name"].startswith(start) and "error" not in result["values"]:
            yield result["name"].removeprefix(start), result["values"]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Nothing where there is nothing to show."""
    return markdown_table(list(headers), [list(row) for row in rows]) if rows else ""


def _facts(results: Sequence[Record]) -> str:
    """What is measured before models: of the GPU, its link and the disk."""
    rows = [
        [f"{name}, {key}", _number(value)]
        for name, values in _named(results, "")
        if name.startswith(("facts", "disk"))
        for key, value in values.items()
        if isinstance(value, float)
    ]
    return _table(["fact", "measured"], rows)


def _by_rows(results: Sequence[Record], title: str, start: str, key: str, show: str) -> str:
    """A table of the results that have ``key`` for some numbers of rows."""
    found = list(_named(results, start))
    counts = [n for n in _BATCHES if any(f"{key}_{n}" in values for _, values in found)]
    rows = [
        [
            name,
            *(show.format(values[f"{key}_{n}"]) if f"{key}_{n}" in values else "" for n in counts),
        ]
        for name, values in found
        if any(f"{key}_{n}" in values for n in counts)
    ]
    return _table([title, *map(str, counts)], rows)


def _batches(results: Sequence[Record]) -> str:
    title = "times cuBLAS in bf16, rows"
    tables = (
        _by_rows(results, title, "batches ", "against_cublas", "{:.2f}x"),
        _by_rows(results, "µs, rows", "batches ", "us", "{:.1f}"),
        _by_rows(results, "of a copy's rate, rows", "batches ", "share_of_copy", "{:.0%}"),
    )
    return "\n\n".join(table for table in tables if table)


def _loaded(results: Sequence[Record]) -> str:
    """Models larger than 8 GB, a way of loading each a row."""
    found = [(name, values) for name, values in _named(results, "loaded ") if "load_s" in values]
    keys = {
        "decode tok/s": ("decode_tok_s", "{:.1f}"),
        "forecast": ("predicted_tok_s", "{:.1f}"),
        "off by": ("forecast_error", "{:+.0%}"),
        "first token of 512, s": ("first_token_512_s", "{:.2f}"),
        "at first, s": ("first_token_512_at_first_s", "{:.2f}"),
        "of 2048, s": ("first_token_2048_s", "{:.2f}"),
        "prompt tok/s, forecast": ("predicted_prefill_tok_s", "{:.0f}"),
        "kernels a token": ("kernels_per_token", "{:.0f}"),
        "launches": ("launches_per_token", "{:.0f}"),
        "waits": ("waits_per_token", "{:.1f}"),
        "GPU idle": ("gpu_idle", "{:.0%}"),
        "loading, s": ("load_s", "{:.0f}"),
    }
    known = {key for _, values in found for key in values}
    keys = {title: shown for title, shown in keys.items() if shown[0] in known}
    rows = [
        [name, *(show.format(values[key]) if key in values else "" for key, show in keys.values())]
        for name, values in found
    ]
    return _table(["within 8 GB, or as named", *keys], rows)


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
    return _table([*headers, "prefill tok/s"], rows)


def _adapters(results: Sequence[Record]) -> str:
    """What decoding costs with adapters."""
    rows = [
        [
            f"decode, {count} at once",
            f"{values[f'tok_s_{count}_plain']:.1f} tok/s",
            f"{values[f'tok_s_{count}_adapted']:.1f} tok/s",
            f"{values[f'cost_{count}']:.0%}",
        ]
        for _, values in _named(results, "adapters, decode")
        for count in _BATCHES
        if f"cost_{count}" in values
    ]
    headers = ["adapters of rank 16", "without", "with one each", "takes longer by"]
    return _table(headers, rows)


def _towers(results: Sequence[Record]) -> str:
    """Seconds of a picture of 896 x 896 through each tower."""
    rows = [
        [
            name,
            f"{values['s']:.3f}",
            f"{values['s_without_cublas']:.3f}",
            f"{values['cpu_s']:.2f}",
            f"{values['gpu_mb']:.0f}",
        ]
        for name, values in _named(results, "tower ")
    ]
    headers = ["tower", "s", "s without cuBLAS", "s on its CPU", "MB of the GPU"]
    return _table(headers, rows)
