"""The process that holds one engine of the speculation benchmark; its rows start it.

One JSON object per line comes in and goes out, as with ``localrt.bench.child``, whose requests know
no drafts. An engine is loaded first; then it answers generations one at a time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.speculation_llamacpp import LlamaSequence, generate
from localrt.answering.core import Core, open_core
from localrt.api import Model
from localrt.bench.process_io import disk_bytes_read
from localrt.engine.options import read_options
from localrt.errors import LocalrtError
from localrt.loading.parts import LoadOptions
from localrt.offload.memory.process import current_rss

__all__ = ["child_command", "main"]

Answer = dict[str, Any]


class Engine(Protocol):
    """What a child holds."""

    def ask(self, do: str, **values: Any) -> Any:
        """The answer to a request that is not ``load``."""


def child_command() -> list[str]:
    """The command that starts a child of this checkout."""
    root = str(Path(__file__).resolve().parent.parent)
    start = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from benchmarks.speculation_child import main; main()"
    )
    return [sys.executable, "-c", start, root]


def main() -> None:
    """Serve one parent on stdin and stdout, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library's print must not spoil the protocol
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "load":
                engine, answer = _load(**request)
            elif engine is None:
                raise LocalrtError("no engine is loaded")
            else:
                answer = engine.ask(do, **request)
        except (LocalrtError, MemoryError) as error:
            message: Answer = {"error": type(error).__name__, "message": str(error)}
        else:
            message = {"answer": answer}
        answers.write(json.dumps(message, default=str) + "\n")
        answers.flush()


def _load(*, engine: str, **values: Any) -> tuple[Engine, Answer]:
    made: Native | Peer = Native(**values) if engine == "native" else Peer(**values)
    return made, made.info


class Native:
    """A model of localrt, with what drafts for it."""

    def __init__(self, *, target: str, draft: str | None, **options: Any) -> None:
        loaded = LoadOptions(**options)
        self._load = lambda: open_core(target, loaded, draft=draft or "off")
        self._core = self._load()
        self._model = Model(self._core)
        info = self._model.info
        self.info: Answer = {
            "weight_bytes": info.weight_bytes,
            "ctx": info.ctx,
            "device": info.device,
            "notes": list(info.notes),
        }

    def ask(self, do: str, **values: Any) -> Any:
        """``generate``, ``verify``, ``bubbles`` or ``another``."""
        if do == "generate":
            return self._generate(**values)
        if do == "verify":
            return self._verify(**values)
        if do == "bubbles":
            return draft_in_bubbles(self._core, values["on"])
        if do == "another":
            return self._another(**values)
        raise LocalrtError(f"unknown request {do!r}")

    def _generate(self, *, prompt: str | list[int], tokens: int, **options: Any) -> Answer:
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

    def _another(self, *, prompt: list[int], tokens: int) -> int:
        """Bytes that one more of the same model adds to this process, once it has answered."""
        before = current_rss()
        with Model(self._load()) as model:
            model.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0)
            return current_rss() - before

    def _verify(self, *, prompt: Sequence[int], budget: int, times: int = 5) -> float:
        """Seconds of one target pass over a tree of ``budget`` nodes, the median."""
        from localrt.speculative.tree import TokenTree

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


class Peer:
    """llama.cpp, with a second model where it drafts."""

    def __init__(
        self, *, target: str, draft: str | None, ctx: int, threads: int, repack: bool, ahead: int
    ) -> None:
        made = {"ctx": ctx, "threads": threads, "repack": repack}
        self._target = LlamaSequence(Path(target), rows=ahead + 1, **made)
        self._draft = None if draft is None else LlamaSequence(Path(draft), rows=1, **made)
        self.info: Answer = {"repacked": repack, "ctx": ctx}

    def ask(self, do: str, **values: Any) -> Any:
        """``generate``, greedily, with ``ahead`` drafted tokens a pass (0: none)."""
        if do != "generate":
            raise LocalrtError(f"unknown request {do!r}")
        ahead = values.pop("ahead", 0)
        draft = self._draft if ahead else None
        return generate(self._target, draft=draft, ahead=ahead, **values)


def draft_in_bubbles(core: Core, on: bool) -> None:
    """Let a model's draft work while weights are being loaded, or after the pass.

    Raises:
        LocalrtError: nothing drafts.
    """
    options = read_options(core.defaults, {"temperature": 0.0})  # of the generations to come
    speculation = None if core.drafts is None else core.drafts.speculation(options)
    if speculation is None:
        raise LocalrtError("nothing drafts for this model")
    speculation.in_gaps = on
