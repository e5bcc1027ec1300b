"""Tables of studies whose programs are gone, from their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.studies import speculation_short, speculation_table


def result(what: str, unit: str, value: float, **more: Any) -> dict[str, Any]:
    return {"what": what, "unit": unit, "value": value, **more}


def row(name: str, *results: dict[str, Any], **more: Any) -> dict[str, Any]:
    sizes = {"prompts": 4, "tokens": 128, "rounds": 1, "seconds": 60.0}
    return {"name": name, **sizes, "skipped": None, "results": list(results), **more}


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.speculation --target t.gguf",
        "target": "t.gguf",
        "draft": "d.gguf",
        "machine": {"cpu": {"name": "a processor", "usable_cores": 2}},
        "versions": {"localrt": "1"},
        "rows": list(rows),
    }


# -- rows ------------------------------------------------------------------------------------------


def test_speculation_table() -> None:
    rates = {"tok_s": 26.2, "plain_tok_s": 8.75, "tokens_per_pass": 9.43}
    text = speculation_table(
        record(
            row(
                "850 MB, draft besides",
                result("against plain streaming", "x plain", 2.994, **rates),
                limit_bytes=850_000_000,
                draft_bytes=430_000_000,
                checked={"generations": 4, "same_tokens": 4},
            ),
            row("1000 MB in all", skipped="no memory control group"),
        )
    )
    line = next(line for line in text.splitlines() if line.startswith("| 850 MB"))
    assert line.endswith("| 2.99 x plain | 26.2, 8.75 | 9.4 | 4, 128 tokens |")
    assert "850 MB for the target, and 430 MB more" in text
    assert "not measured: no memory control group" in text
    assert "4 of 4 generations have the tokens of plain decoding" in text


def test_speculation_short() -> None:
    hot = result("c", "tokens per pass", 30.0, temperature=0.7)
    text = speculation_short(record(row("a", result("b", "x", 2.5), hot)))
    assert "| a: b | 2.50 x |" in text
    assert "30.0" not in text


def test_filled_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "benchmarks/results")
    page = (
        "<!-- table: speculation -->\n<!-- end --><!-- table: speculation-short -->\n<!-- end -->"
    )
    assert tables.filled(page).count("Not measured yet: run python -m benchmarks.speculation.") == 2
    folder = tmp_path / "benchmarks/results"
    folder.mkdir(parents=True)
    made = record(row("a", result("b", "x", 2.5)))
    (folder / "speculation.json").write_text(json.dumps(made))
    text = tables.filled(page)
    assert "| a | b | 2.50 x |" in text
    assert "| a: b | 2.50 x |" in text
