"""The process that holds one model of the speculation benchmark; its rows start it.

A model is loaded first; then it answers generations one at a time.
"""

from __future__ import annotations

from typing import Any

import localrt
from localrt.answering.core import open_core
from localrt.bench.child import disk_bytes_read, serve
from localrt.loading.options import LoadOptions
from localrt.offload.memory.process import current_rss

__all__ = ["main"]


def main() -> None:
    """Serve one parent."""
    serve(_Child())


class _Child:
    """A model, with what drafts for it."""

    def load(self, *, target: str, draft: str | None, **options: Any) -> None:
        """Load both."""
        loaded = LoadOptions(**options)
        self._load = lambda: open_core(target, loaded, draft=draft or "off")
        self._core = self._load()
        self._model = localrt.Model(self._core)

    def generate(self, *, prompt: str | list[int], tokens: int, **options: Any) -> dict[str, Any]:
        """A text goes through the chat template; options are those of ``Model.generate``."""
        given = {"prompt" if isinstance(prompt, str) else "token_ids": prompt}
        if self._core.drafts is not None:  # a prompt's second round would only repeat the first
            self._core.drafts.archive.clear()
        before = disk_bytes_read()
        chunk = self._model.generate(**given, max_tokens=tokens, **options)
        after = disk_bytes_read()
        return {
            "ids": list(chunk.token_ids),
            "tok_s": chunk.metrics.decode_tok_s,
            "per_pass": chunk.metrics.accepted_per_pass,
            "why": chunk.metrics.speculation,
            "read_bytes": None if before is None or after is None else after - before,
        }

    def another(self, *, prompt: list[int], tokens: int) -> int:
        """Bytes that one more of the same model adds to this process, once it has answered."""
        before = current_rss()
        with localrt.Model(self._load()) as model:
            model.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0)
            return current_rss() - before
