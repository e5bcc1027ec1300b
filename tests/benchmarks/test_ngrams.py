"""The benchmark of hashed n-grams' rows, on a small table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.offload import ngrams


def test_rows_of_a_small_table_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, results = tmp_path / "table", tmp_path / "ngrams.json"
    options = ["--size", "2MB", "--tokens", "3", "--file", str(file), "--json", str(results)]
    assert ngrams.main([*options, "--rate", "0.001"]) == 0
    (row,) = json.loads(results.read_text())["rows"]
    assert row["table_bytes"] == file.stat().st_size
    assert row["table_bytes"] == pytest.approx(2_000_000, rel=0.1)
    assert 10 < row["reads_per_token"] <= row["rows_per_token"] == 16
    assert f"{row['rows']:,} rows" in capsys.readouterr().out
    assert ngrams.main([*options, "--rate", "1000000"]) == 1  # far more than a token takes
