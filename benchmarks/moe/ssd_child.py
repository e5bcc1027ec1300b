"""The process that holds one engine of ``benchmarks.moe.ssd``, within its memory limit.

It imports little: all that it takes counts.
"""

from __future__ import annotations

import time
from typing import Any

from localrt.answering.core import open_core
from localrt.bench.child import disk_bytes_read, serve
from localrt.bench.engines import Launch, llamacpp_core
from localrt.loading.options import LoadOptions

__all__ = ["PROMPT", "main"]

PROMPT = 64  # tokens of a text that are not timed


def main() -> None:
    """Hold one model for the parent."""
    serve(_Child())


class _Child:
    """Loads a model, then decodes texts."""

    def load(self, engine: str, path: str) -> list[str]:
        """The model's notes."""
        if engine == "native":
            options = LoadOptions(engine=engine, threads=2, ctx=512)
            self._core = open_core(path, options, draft="off")
        else:
            settings = {"repack": False}
            launch = Launch(engine=engine, path=path, ctx=512, threads=2, settings=settings)
            self._core = llamacpp_core(launch)
        return list(self._core.info.notes)

    def decode(self, tokens: list[int]) -> dict[str, Any]:
        """A prompt, then the tokens after it one by one; what these took."""
        session: Any = self._core.new_session()
        try:
            session.extend(tokens[:PROMPT])
            before, read = session.counts(), disk_bytes_read() or 0
            forecast, began = session.forecast(), time.perf_counter()
            for token in tokens[PROMPT:]:
                session.extend([token])
            seconds, after = time.perf_counter() - began, session.counts()
        finally:
            session.close()
        hit_rate = None
        if after is not None and after.expert_uses:
            uses = after.expert_uses - before.expert_uses
            hit_rate = (after.expert_hits - before.expert_hits) / uses
        count = len(tokens) - PROMPT
        return {
            "tok_s": count / seconds,
            "read_bytes_per_token": ((disk_bytes_read() or 0) - read) / count,
            "predicted_tok_s": None if forecast is None else forecast.tok_s,
            "hit_rate": hit_rate,
        }
