"""The benchmark of models larger than memory: its table follows from its rows."""

from __future__ import annotations

from typing import Any

from benchmarks.offload import offload_table


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
            {**row("500 MB native", 500_000_000), "skipped": [{"reason": "no group"}]},
        )
    )
    ours = next(line for line in text.splitlines() if "native" in line)
    assert "5.04 (4.0x llama.cpp)" in ours
    assert "| 97 % | 180 MB | 999 MB |" in ours
    assert text.count("llamacpp (") == 1
    assert "llamacpp (plain)" in text
    assert "| 500 MB |  | no group |" in text
