"""The claims beside llama.cpp's server: what the table says of each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import CLAIMS, Setting, ask, claims_table, serving
from localrt import LocalrtError
from tests.conftest import write_tiny_model
from tests.server.conftest import needs_kernels

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


@needs_kernels
def test_a_server_is_started_and_asked(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    folder = write_tiny_model(tmp_path / "tiny", context=512)
    setting = Setting(Path("llama-server"), folder, tmp_path)
    with serving("localrt", [str(folder), "--draft", "off"], setting) as server:
        first, again = (ask(server, "Hello. " * 10, max_tokens=4) for _ in range(2))
        assert (first.cached_tokens, first.tokens) == (0, 4)
        assert again.prompt_tokens == first.prompt_tokens == again.cached_tokens + 1
        assert again.text == first.text
        with pytest.raises(LocalrtError, match="max_tokens"):
            ask(server, "Hello.", max_tokens="many")
