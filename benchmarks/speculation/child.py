"""The process that holds one engine of the speculation benchmark; its rows start it.

An engine is loaded first; then it answers generations one at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import localrt
from benchmarks.speculation.llamacpp import LlamaSequence, generate
from localrt.answering.core import open_core
from localrt.bench.child import serve
from localrt.bench.process_io import disk_bytes_read
from localrt.engine.options import read_options
from localrt.errors import LocalrtError
from localrt.loading.options import LoadOptions
from localrt.offload.memory.process import current_rss
from localrt.speculative.tree import TokenTree

__all__ = ["main"]

Answer = dict[str, Any]


def main() -> None:
    """Serve one parent."""
    serve(_Child())


class _Child:
    """Loads an engine; every other request is one of its methods."""

    def load(self, engine: str, **values: Any) -> Answer:
        """What runs."""
        made: Native | Peer = Native(**values) if engine == "native" else Peer(**values)
        for name in ("generate", "verify", "bubbles", "another"):
            if hasattr(made, name):
                setattr(self, name, getattr(made, name))
        return made.info


class Native:
    """A model of localrt, with what drafts for it."""

    def __init__(self, *, target: str, draft: str | None, **options: Any) -> None:
        loaded = LoadOptions(**options)
        self._load = lambda: open_core(target, loaded, draft=draft or "off")
        self._core = self._load()
        self._model = localrt.Model(self._core)
        info = self._model.info
        self.info: Answer = {
            "weight_bytes": info.weight_bytes,
            "ctx": info.ctx,
            "device": info.device,
            "notes": list(info.notes),
        }

    def generate(self, *, prompt: str | list[int], tokens: int, **options: Any) -> Answer:
        """A text goes through the chat template; options are those of ``Model.generate``."""
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {}
        given = given or {"token_ids": prompt}
        if self._core.drafts is not None:  # a prompt's second round would only repeat the first
            self._core.drafts.archive.clear()
        before = disk_bytes_read()
        chunk = self._model.generate(**given, max_tokens=tokens, **options)
        after = disk_bytes_read()
        metrics = chunk.metrics
        return {
            "ids": list(chunk.token_ids),
            "tok_s": metrics.decode_tok_s,
            "per_pass": metrics.accepted_per_pass,
            "by_source": dict(metrics.accepted_by_source or {}),
            "why": metrics.speculation,
            "ttft_s": metrics.ttft_s,
            "peak_ram_bytes": metrics.peak_ram_bytes,
            "read_bytes": None if before is None or after is None else after - before,
            "simulated": metrics.simulated,
        }

    def another(self, *, prompt: list[int], tokens: int) -> int:
        """Bytes that one more of the same model adds to this process, once it has answered."""
        before = current_rss()
        with localrt.Model(self._load()) as model:
            model.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0)
            return current_rss() - before

    def verify(self, *, prompt: Sequence[int], budget: int, times: int = 5) -> float:
        """Seconds of one target pass over a tree of ``budget`` nodes, the median."""
        session: Any = self._core.new_session()
        session.extend(prompt)
        tree = TokenTree.of(
            [5 + i for i in range(budget)], [i // 2 - 1 for i in range(budget)], [0.0] * budget, "x"
        )
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            session.extend_tree(5, tree)
            taken.append(time.perf_counter() - start)
            session.keep([])
        session.close()
        return statistics.median(taken)

    def bubbles(self, *, on: bool) -> None:
        """Let the draft work while weights are being loaded, or after the pass."""
        core = self._core
        options = read_options(core.defaults, {"temperature": 0.0})  # of the generations to come
        speculation = None if core.drafts is None else core.drafts.speculation(options)
        if speculation is None:
            raise LocalrtError("nothing drafts for this model")
        speculation.in_gaps = on


class Peer:
    """llama.cpp, with a second model where it drafts."""

    def __init__(
        self, *, target: str, draft: str | None, ctx: int, threads: int, repack: bool, ahead: int
    ) -> None:
        made = {"ctx": ctx, "threads": threads, "repack": repack}
        self._target = LlamaSequence(Path(target), rows=ahead + 1, **made)
        self._draft = None if draft is None else LlamaSequence(Path(draft), rows=1, **made)
        self.info: Answer = {"repacked": repack, "ctx": ctx}

    def generate(self, *, ahead: int = 0, **values: Any) -> Answer:
        """Greedily, with ``ahead`` drafted tokens a pass (0: none)."""
        return generate(self._target, draft=self._draft if ahead else None, ahead=ahead, **values)
