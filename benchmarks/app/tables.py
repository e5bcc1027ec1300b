"""Markdown of what is measured of app, conversations and server: one table of many files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table

__all__ = ["app_table"]

Row = tuple[str, str]


def app_table(results: Path) -> str:
    """One row for each thing measured; of a file that is not there, none."""
    rows: list[list[str]] = []
    machine: dict[str, Any] | None = None
    for name, rows_of in _FILES.items():
        path = results / f"{name}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        machine = record.get("machine") or record["results"][-1]["machine"]
        module = "benchmarks.app" if name == "app" else f"benchmarks.app.{name}"
        rows += [[what, measured, f"`{module}`"] for what, measured in rows_of(record)]
    if machine is None:
        return "Not measured yet."
    table = markdown_table(["what", "measured", "by `python -m`"], rows)
    return f"{table}\n\nMedians on {machine_of({'machine': machine})}."


def _start(record: dict[str, Any]) -> Iterator[Row]:
    name = f"`localrt chat {record['model']}`"
    yield f"{name} to a prompt that takes keys", f"{record['typed_s']:.2f} s"
    yield f"{name} to the first token", f"{record['first_token_s']:.2f} s"


def _resume(record: dict[str, Any]) -> Iterator[Row]:
    for row in record["results"]:
        model = row["model"].removesuffix(".gguf")
        yield (
            f"{row['tokens']:,} tokens of {model} ({row['saved']}) from the disk",
            f"{row['resume_s']:.2f} s, {row['faster']:.0f}x faster than computed again; file not "
            f"cached: {row['resume_cold_s']:.2f} s, {row['faster_cold']:.0f}x",
        )


def _app(record: dict[str, Any]) -> Iterator[Row]:
    for row in record["results"]:
        if "cost" in row:
            yield f"the app's cost, {row['what']}", f"{100 * row['cost']:.1f} %"
        elif "median_ms" in row:
            measured = f"{row['median_ms']:.0f} ms, at worst {row['worst_ms']:.0f} ms"
            yield row["what"], measured
        else:
            yield row["what"], f"{row['worst_ms']:.0f} ms"


def _serve(record: dict[str, Any]) -> Iterator[Row]:
    model = record["model"].removesuffix(".gguf")
    what = (
        f"{record['chats']} chats of {record['turns']} turns at once on {model} within "
        f"{record['ram']}"
    )
    for row in record["results"]:
        guessing = "nobody guesses" if row["draft"] == "off" else "all guess ahead"
        yield (
            f"{what}, against one after another; {guessing}",
            f"{row['ratio']:.1f}x tokens per second",
        )


_FILES: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "chat_start": _start,
    "app": _app,
    "resume": _resume,
    "serve": _serve,
}
