"""The benchmark of models larger than memory: its rows go on, its table follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.record import load, pending, save
from benchmarks.offload import all_rows, offload_table


def result(engine: str, setting: str, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "engine": engine,
        "setting": setting,
        "decode_tok_s": rate,
        "peak_ram_bytes": 300_000_000,
        **more,
    }


def row(name: str, limit: int, *results: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "memory_limit": limit, "results": results, "skipped": []}


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.offload m",
        "machine": {"cpu": {"name": "a processor", "usable_cores": 2}},
        "versions": {"localrt": "1"},
        "rows": list(rows),
    }


def test_rows() -> None:
    rows = list(all_rows())
    assert len({row.name for row in rows}) == len(rows)
    for engine in ("native", "llamacpp"):
        assert {r.limit for r in rows if r.engine == engine} == {
            10**6 * n for n in (1000, 850, 700, 500)
        }
        assert all(r.workload.runs >= 5 for r in rows)


def test_resume(tmp_path: Path) -> None:
    rows = list(all_rows())
    path = tmp_path / "offload.json"
    assert pending(rows, load(path, rows=[]), [], []) == rows
    save(path, record(row(rows[0].name, 1, result("native", "", 4.0)), row(rows[1].name, 1)))
    found = load(path, rows=[])
    assert pending(rows, found, [], []) == rows[1:]  # the second has no results
    assert pending(rows, found, ["airllm"], []) == [r for r in rows if "airllm" in r.name]
    assert rows[0] in pending(rows, found, [], [rows[0].name])
    assert [file.name for file in tmp_path.iterdir()] == ["offload.json"]


def test_saved_lines(tmp_path: Path) -> None:
    made = {"rows": [{"a": 1, "b": "x"}, {"a": [1, 2], "b": None}], "setting": {}}
    save(tmp_path / "made.json", made)
    lines = (tmp_path / "made.json").read_text().splitlines()
    assert '  {"a": 1, "b": "x"},' in lines
    assert '   "a": [1, 2],' in lines
    assert load(tmp_path / "made.json") == made


def test_table() -> None:
    gigabyte = 10**9
    native = result(
        *("native", "q4_k", 5.04),
        pipeline_efficiency=0.97,
        predicted_tok_s=5.0,
        read_bytes_per_token=180_000_000,
        peak_cgroup_bytes=999_000_000,
    )
    text = offload_table(
        record(
            row("1000 MB native", gigabyte, native),
            row(
                "1000 MB llamacpp",
                gigabyte,
                result("llamacpp", "plain", 1.26),
                result("llamacpp", "repacked", 0.9),
            ),
            row("2500 MB airllm", 2_500_000_000, result("airllm", "bf16", 0.1)),
        )
    )
    ours = next(line for line in text.splitlines() if "native" in line)
    assert "5.04 (4.0x llama.cpp, 50x airllm)" in ours
    assert "| 97 % | 180 MB | 999 MB |" in ours
    assert text.count("llamacpp (") == 1
    assert "llamacpp (plain)" in text
