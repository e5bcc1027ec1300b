"""What the benchmarks of streamed experts share: the widened fixture, its texts, and the child.

A child process serves one parent: it loads a model with ``load`` requests, and decodes what comes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import localrt
from benchmarks.fixture_gguf import write_fixture
from benchmarks.fixture_text import encode, read_texts
from localrt.answering.core import Core

__all__ = ["held_out", "serve", "widened"]


def widened(folder: Path, experts: int) -> Path:
    """The trained fixture of ``folder``, with ``experts`` bytes of experts; written once."""
    path = folder / f"widened-{experts}.gguf"
    if not path.exists():
        write_fixture(folder, path, experts=experts)
    return path


def held_out(folder: Path, count: int, size: int, apart: int) -> list[list[int]]:
    """Texts of ``size`` tokens that the fixture has not learnt; one begins every ``apart``."""
    ids = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), read_texts().held_out)
    return [ids[i * apart : i * apart + size].tolist() for i in range(count)]


def serve(
    load: Callable[[dict[str, Any]], Core],
    decode: Callable[[Core, list[int]], dict[str, Any]],
) -> None:
    """Answer the requests on stdin, a line of JSON each."""
    core: Core | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                core = load(request)
                answer: Any = {"notes": list(core.info.notes)}
            else:
                assert core is not None, "a model is loaded first"
                answer = decode(core, request["tokens"])
        except (localrt.LocalrtError, MemoryError) as error:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        else:
            print(json.dumps({"answer": answer}), flush=True)
