"""The speculation benchmark: rows go on, turns are fair, tables follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.common.record import load, pending, save
from benchmarks.speculation import __main__ as speculation
from benchmarks.speculation.prompts import humaneval, repeated_share, repeating, spread
from benchmarks.speculation.run import Check, Setup, compared, take_turns
from benchmarks.speculation.tables import speculation_short, speculation_table
from localrt.errors import LocalrtError
from tests.inside import core_of


def setup(tmp_path: Path) -> Setup:
    files = {name: tmp_path / f"{name}.gguf" for name in ("target", "draft")}
    prompts = {"humaneval": tmp_path / "h.jsonl", "mtbench": tmp_path / "m.jsonl"}
    return Setup(**files, **prompts, threads=2)


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


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in speculation.ROWS]
    assert len(set(names)) == len(names) == 5
    repeats = next(row for row in speculation.ROWS if row.name.startswith("n-gram"))
    assert repeats.prompts >= 20


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "speculation.json"
    rows = list(speculation.ROWS)
    assert pending(rows, load(path, rows=[]), [], []) == rows
    save(path, record(row(rows[0].name, result("x", "x", 1)), row(rows[1].name)))
    found = load(path, rows=[])
    assert pending(rows, found, [], []) == rows[1:]  # the second has no results
    assert rows[0] in pending(rows, found, [], [rows[0].name])
    assert [r.name for r in pending(rows, found, ["850"], [])] == ["850 MB, draft besides"]


def test_what_fails_is_recorded_with_its_reason(tmp_path: Path) -> None:
    def fails(setup: Setup, prompts: int, tokens: int, rounds: int) -> dict[str, Any]:
        raise LocalrtError("no memory control group")

    made = speculation.measure(
        speculation.Row(name="it", measure=fails, prompts=3), setup(tmp_path)
    )
    assert made["skipped"] == "no memory control group"
    assert (made["results"], made["prompts"], made["tokens"]) == ([], 3, 128)


def test_messages_name_files_without_their_folders(tmp_path: Path) -> None:
    made = setup(tmp_path)
    value = {"why": [f"draft {made.draft} is not used", None, 3.0]}
    cleaned = speculation.without_folders(value, made)
    assert cleaned == {"why": ["draft draft.gguf is not used", None, 3.0]}


# -- turns -----------------------------------------------------------------------------------------


def answer(
    rate: float | None, ids: Sequence[int] = (1, 2, 3), per_pass: float | None = None
) -> Any:
    return {"ids": list(ids), "tok_s": rate, "per_pass": per_pass}


def test_contestants_take_turns_and_are_compared_by_prompt() -> None:
    order: list[str] = []

    def contestant(name: str, rates: dict[str, list[float | None]], **more: Any) -> Any:
        def one(prompt: Any) -> Any:
            order.append(name)
            return answer(rates[prompt].pop(0), **more)

        return one

    check = Check()
    turns = take_turns(
        ["a", "b", "short"],
        {
            "plain": contestant(
                "plain", {"a": [10, 11, 30], "b": [20, 20, 20], "short": [None] * 3}
            ),
            "ours": contestant(
                "ours",
                {"a": [22, 22, 22], "b": [10, 10, 10], "short": [None] * 3},
                ids=(1, 2, 4, 5, 6),
                per_pass=2.0,
            ),
        },
        3,
        check=check,
    )
    assert order[:4] == ["plain", "ours", "ours", "plain"]
    both = compared(turns, "ours")
    assert both["of_each"] == [2.0, 0.5]
    assert (both["value"], both["least"]) == (1.25, 0.5)
    assert turns.per_pass("ours") == 2.0
    assert turns.per_pass("plain") is None
    assert check.record() == {"generations": 9, "same_tokens": 0}


def test_a_second_round_does_not_repeat_the_first_answer(tiny: Any) -> None:
    prompt = {"token_ids": [5, 6, 7], "max_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    drafts = core_of(tiny).drafts
    assert drafts is not None
    tiny.generate(**prompt, draft="ngram")
    drafts.archive.clear()
    assert len(drafts.archive) == 0


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts(tmp_path: Path) -> None:
    code, turns = tmp_path / "h.jsonl", tmp_path / "m.jsonl"
    code.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(82)))
    assert humaneval(code, 4) == ["p0", "p20", "p41", "p61"]
    assert spread(["a", "b"], 5) == ["a", "b"]
    long = "It is a long text. " * 20
    turns.write_text(
        "".join(json.dumps({"turns": ["short", f"{i} {long}"]}) + "\n" for i in range(9))
    )
    prompts = repeating(turns, 24)
    assert len(prompts) == len(set(prompts)) == 24
    assert sum("```python" in prompt for prompt in prompts) == 15
    assert repeated_share([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 9]) == 0.5
    assert repeated_share([1, 2], [1, 2]) == 0.0


# -- tables ----------------------------------------------------------------------------------------


def test_tables_say_what_was_measured() -> None:
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


def test_the_short_table_has_greedy_decoding_only() -> None:
    hot = result("c", "tokens per pass", 30.0, temperature=0.7)
    text = speculation_short(record(row("a", result("b", "x", 2.5), hot)))
    assert "| a: b | 2.50 x |" in text
    assert "30.0" not in text


def test_pages_are_filled_from_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
