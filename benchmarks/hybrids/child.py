"""A process of ``benchmarks.hybrids`` that uses the library as an app does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import localrt
from benchmarks.common.contest import token_ids
from localrt.bench.child import serve
from localrt.offload.pipeline.ngram_table import NgramTable

__all__ = ["main"]


def main() -> None:
    """Hold models for the parent."""
    serve(_Child())


class _WatchedRows:
    def __init__(self) -> None:
        self.seconds = {"asked": 0.0, "waited": 0.0}
        self.passes = 0
        self.table: NgramTable | None = None

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - started
        self.passes += what == "asked"


class _Child:
    def load(self, path: str, options: dict[str, dict[str, Any]]) -> None:
        """A model under each name, with its options for ``localrt.load``."""
        self._models = {
            name: localrt.load(path, device="cpu", **given) for name, given in options.items()
        }

    def answer(
        self, name: str, prompt: list[int], tokens: int, temperature: float = 0.0
    ) -> dict[str, Any]:
        """The metrics of an answer of exactly so many tokens."""
        chunk = self._models[name].generate(
            token_ids=prompt,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            seed=1,
        )
        return chunk.metrics.to_dict()

    def watch_ngrams(self) -> None:
        """Take the time of the rows of hashed n-grams from here on, whose file is not cached."""
        self._rows = rows = _WatchedRows()
        ask = NgramTable.ask

        def watched(table: NgramTable, *args: Any) -> Callable[[], Any]:
            rows.table = table
            with rows.timed("asked"):
                take = ask(table, *args)

            def taken() -> Any:
                with rows.timed("waited"):
                    return take()

            return taken

        NgramTable.ask = watched  # type: ignore[method-assign]

    def ngrams(self) -> dict[str, Any]:
        """Passes so far, seconds that asking for rows and waiting for them took, bytes read."""
        rows = self._rows
        read = 0 if rows.table is None else rows.table.bytes_read
        return {"passes": rows.passes, **rows.seconds, "bytes": read}

    def resume(self, name: str, tokens: int) -> dict[str, Any]:
        """The first token of a chat's next turn, whose KV cache and states are then parked."""
        model = self._models[name]
        sentence = "The store keeps what was packed and brings it back in order. "
        sentences = 8 * tokens // len(model.tokenize(sentence * 8))
        chat = model.chat()
        chat.messages = [
            {"role": "user", "content": sentence * sentences},
            {"role": "assistant", "content": "Yes."},
        ]
        metrics = chat.send("And then?", max_tokens=1, temperature=0.0).metrics
        if not metrics.cached_tokens:
            chat.park()
        return metrics.to_dict()

    def peak(self) -> int:
        """The most bytes of RAM that this process has held."""
        status = Path("/proc/self/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    def fill(self, name: str, tokens: int) -> dict[str, Any]:
        """A context filled to its last token."""
        metrics = self.answer(name, token_ids(tokens - 2, 0), 2)
        ram = self._models[name].status().ram
        return {**metrics, "peak": self.peak(), "forecast": ram.forecast, "budget": ram.budget}
