"""The claims beside llama.cpp's server: what the table says of each row."""

from __future__ import annotations

from typing import Any

from benchmarks.claims import CLAIMS, claims_table

READ = {"read": 1200, "first_s": 0.5}
FOUND: dict[str, dict[str, Any]] = {
    "agent": READ,
    "restarts": READ,
    "draft": {"limit": 1_300_000_000, "tok_s": 4.25},
    "models": {"limit": 1_500_000_000, "asked": 12, "answered": 3, "failed": "x", "answer_s": None},
    "answers": {"asked": 12, "changed": 2},
    "larger": {"limit": 850_000_000, "failed": "it did not start"},
}


def test_claims_table() -> None:
    rows = [{"name": name, "localrt": FOUND[name], "llama-server": FOUND[name]} for name in CLAIMS]
    table = claims_table({"rows": rows, "command": "python -m benchmarks.claims", "versions": {}})
    for words in (
        "1,200 tokens read, 0.50 s to the first token | 1,200",
        "within 1.3 GB | 4.2 tok/s",
        "3 of 12 answered |",
        "2 of 12 answers changed |",
        "no answer: it did not start",
    ):
        assert words in table
