"""The process that holds one engine of ``benchmarks.moe.ssd``, within its memory limit.

It imports little: all that it takes counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from localrt.answering.core import open_core
from localrt.bench.child import serve
from localrt.bench.engines import Launch, llamacpp_core
from localrt.bench.process_io import disk_bytes_read
from localrt.loading.options import LoadOptions

__all__ = ["PROMPT", "main"]

PROMPT = 64  # tokens of a text that are not timed
Answer = dict[str, Any]


def main() -> None:
    """Hold one model for the parent."""
    serve(_Child())


class _Child:
    """Loads a model, then decodes texts."""

    def load(
        self, engine: str, path: str, repack: bool, guesses: str, options: dict[str, Any]
    ) -> list[str]:
        """The model's notes."""
        if engine == "native":
            loaded = LoadOptions(engine=engine, threads=2, ctx=512, **options)
            self._core = open_core(path, loaded, draft="off")
        else:
            settings = {"repack": repack}
            launch = Launch(engine=engine, path=path, ctx=512, threads=2, settings=settings)
            self._core = llamacpp_core(launch)
        self._residency: Any = getattr(self._core.engine, "_residency", None)
        for prefetcher in self._prefetchers().values():
            prefetcher.force({"off": False, "gates": True}.get(guesses))
        return list(self._core.info.notes)

    def decode(self, tokens: list[int]) -> Answer:
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
        count = len(tokens) - PROMPT
        if self._core.engine.simulated:
            seconds = after.clock_s - before.clock_s
        answer: Answer = {
            "tok_s": count / seconds,
            "read_bytes_per_token": ((disk_bytes_read() or 0) - read) / count,
            "predicted_tok_s": None if forecast is None else forecast.tok_s,
            "hit_rate": None,
        }
        if after is not None and after.expert_uses:
            uses = after.expert_uses - before.expert_uses
            guesses = after.expert_prefetches - before.expert_prefetches
            right = after.expert_prefetch_hits - before.expert_prefetch_hits
            answer |= {
                "hit_rate": (after.expert_hits - before.expert_hits) / uses,
                "guesses_per_token": guesses / count,
                "useful": right / guesses if guesses else None,
            }
        return answer

    def prefetching(self) -> Answer:
        """Whether each lane prefetches, and how that was judged."""
        return {
            lane: {
                "on": ["gates"] if each.on else [],
                "measuring_share": each.measuring_share,
                "judged": {} if each.judgement is None else {"gates": asdict(each.judgement)},
            }
            for lane, each in self._prefetchers().items()
        }

    def _prefetchers(self) -> Mapping[str, Any]:
        runners = getattr(self._residency, "sparse", {})
        return {lane: runner.prefetcher for lane, runner in runners.items()}
