"""The table of ``adapters.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from localrt.formatting import format_bytes

__all__ = ["adapters_table"]


def adapters_table(record: Mapping[str, Any]) -> str:
    """Decoding with and without adapters, and what adding one takes."""
    rows = [
        [
            _what(result),
            f"{result['plain_tok_s']:.1f} tok/s",
            f"{result['adapted_tok_s']:.1f} tok/s",
            f"{100 * result['cost']:.1f} %",
        ]
        for result in record["results"]
    ]
    headers = ["", "without adapter", "with one each", "takes longer by"]
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`: adapters of rank "
        f"{record['rank']} for all linear modules of {record['model']}; one takes "
        f"{format_bytes(record['bytes'])} and is added in {1000 * record['add_s']:.0f} ms. On "
        f"{machine_of(record)}. {versions_of(record)}."
    )


def _what(result: Mapping[str, Any]) -> str:
    if "prompt" in result:
        return f"a prompt of {result['prompt']}"
    return f"{result['chats']} at once" if result["chats"] > 1 else "one chat"
