"""One contestant of ``python -m benchmarks.drafts``: a model in a separate process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import localrt
from localrt.bench.process import serve


class Contestant:
    """``load`` a model first, then use it."""

    _model: localrt.Model

    def load(self, job: Mapping[str, Any]) -> None:
        """Load the model, with its draft."""
        self._draft, budget = job["draft"], {} if job["ram"] is None else {"ram": job["ram"]}
        self._options = {"max_tokens": job["tokens"], "temperature": 0.0, "ignore_eos": True}
        self._model = localrt.load(
            job["model"], device="cpu", ctx=2048, draft=self._draft, **budget
        )

    def answer(self, prompt: str, *, raw: bool = False, size: int | None = None) -> dict[str, Any]:
        """One answer, and the time that it took to decode."""
        drafts: Any = self._model._core.drafts
        drafts.archive.clear()
        fixed = {} if size is None else {"tree_budget": size}
        chunk = self._model.generate(prompt, raw=raw, draft=self._draft, **fixed, **self._options)
        metrics = chunk.metrics
        return {
            "tokens": list(chunk.token_ids),
            "tok_s": metrics.decode_tok_s,
            "each": metrics.accepted_per_pass or 1.0,
            "said": metrics.speculation or "",
        }


def main() -> None:
    """Answer the parent's requests."""
    serve(Contestant())
