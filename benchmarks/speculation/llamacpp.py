"""llama.cpp as the peer: plain greedy decoding, and with a second model that drafts a chain.

Driven through llama-cpp-python's low-level calls: its own loop copies every row's logits to Python,
keeps room for a whole context of them, and samples with a chain of samplers, none of which the peer
should be charged with. One pass verifies all drafted tokens, as llama.cpp's own speculative loop
does, which also ends a draft at a token of which the draft model is not sure (``p_min``).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.engine.llamacpp.library import Library, load_library
from localrt.errors import LocalrtError

__all__ = ["LlamaSequence", "generate"]

_BATCH = 512
Logits = npt.NDArray[np.float32]


class LlamaSequence:
    """A model with one sequence: its tokens so far, and a pass over more of them."""

    def __init__(self, path: Path, *, ctx: int, threads: int, repack: bool, rows: int) -> None:
        """``rows`` is the most rows of a pass whose logits are wanted."""
        library = load_library()
        self._library: Library = library
        api = self._api = library.api
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self._model = api.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise LocalrtError(f"llama.cpp cannot load {path.name}: {library.reason('unknown')}")
        self._context = self._new_context(ctx, threads, rows)
        vocab = api.llama_model_get_vocab(self._model)
        self.vocab = int(api.llama_vocab_n_tokens(vocab))
        self.ends = frozenset(t for t in range(self.vocab) if api.llama_vocab_is_eog(vocab, t))
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int], *, every: bool = False) -> Logits:
        """Compute ``tokens``; logits (rows, vocab) of all or of the last, until the next."""
        api = self._api
        for start in range(0, len(tokens), _BATCH):
            part = list(tokens[start : start + _BATCH])
            ids = (ctypes.c_int32 * len(part))(*part)
            batch = api.llama_batch_get_one(ids, len(part))
            wanted = (ctypes.c_int8 * len(part))(*([1] * len(part)))
            if every:
                batch.logits = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8))
            code = api.llama_decode(self._context, batch)
            if code:
                raise LocalrtError(f"llama.cpp: {self._library.reason(f'code {code}')}")
            self.tokens += part
        rows = len(tokens) if every else 1
        kept = api.llama_get_logits(self._context) if every else self._last()
        return np.ctypeslib.as_array(kept, shape=(rows, self.vocab))

    def trim(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        if length < len(self.tokens):
            memory = self._api.llama_get_memory(self._context)
            if not self._api.llama_memory_seq_rm(memory, 0, length, -1):
                raise LocalrtError("llama.cpp cannot cut this model's cache")
            del self.tokens[length:]

    def catch_up(self, history: Sequence[int]) -> Logits:
        """Bring the cache to ``history``; logits (vocab,) after it."""
        same = 0
        for ours, theirs in zip(self.tokens, history, strict=False):
            if ours != theirs:
                break
            same += 1
        self.trim(min(same, len(history) - 1))
        row: Logits = self.extend(history[len(self.tokens) :])[0]
        return row

    def close(self) -> None:
        """Free everything."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _last(self) -> Any:
        return self._api.llama_get_logits_ith(self._context, -1)

    def _new_context(self, ctx: int, threads: int, rows: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = ctx
        params.n_batch = params.n_ubatch = min(_BATCH, ctx)
        params.n_seq_max = 1
        params.n_outputs_max = rows  # it would make room for a whole batch's logits
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        params.offload_kqv = params.op_offload = False
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise LocalrtError(f"llama.cpp: {self._library.reason('not enough memory')}")
        return context


def generate(
    target: LlamaSequence,
    prompt: Sequence[int],
    tokens: int,
    *,
    draft: LlamaSequence | None = None,
    ahead: int = 0,
    p_min: float = 0.0,
) -> dict[str, Any]:
    """At most ``tokens`` greedy tokens: ids, tokens per second and per pass.

    ``draft`` guesses ``ahead`` tokens a pass, fewer where its probability falls below ``p_min``.
    """
    ids = [int(target.catch_up(prompt).argmax())]
    started = time.perf_counter()
    passes = 0
    while len(ids) < tokens and ids[-1] not in target.ends:
        left = tokens - len(ids)
        guesses: list[int] = []
        if draft is not None and left > 1:
            guesses = guess(draft, [*prompt, *ids], min(ahead, left - 1), p_min)
        held = len(target.tokens)
        rows = target.extend([ids[-1], *guesses], every=bool(guesses))
        passes += 1
        said = _accepted(rows, guesses, target.ends)
        ids += said
        target.trim(held + len(said))
    seconds = time.perf_counter() - started
    if ids[-1] in target.ends:
        ids.pop()
    later = max(len(ids) - 1, 0)
    return {
        "ids": ids,
        "tok_s": later / seconds if later else None,
        "per_pass": later / passes if passes else None,
    }


def guess(draft: LlamaSequence, history: Sequence[int], ahead: int, p_min: float) -> list[int]:
    """The draft's own greedy continuation, as far as it is sure of it."""
    logits = draft.catch_up(history)
    guesses: list[int] = []
    while True:
        token = int(logits.argmax())
        if p_min and _probability(logits, token) < p_min:
            return guesses
        guesses.append(token)
        if len(guesses) == ahead or token in draft.ends:
            return guesses
        logits = draft.extend([token])[0]


def _accepted(rows: Logits, guesses: Sequence[int], ends: Collection[int]) -> list[int]:
    """The target's tokens along the chain: guesses that it confirms, and one of its own."""
    said: list[int] = []
    for index, row in enumerate(rows):
        said.append(int(row.argmax()))
        if said[-1] in ends or index == len(guesses) or said[-1] != guesses[index]:
            break
    return said


def _probability(logits: Logits, token: int) -> float:
    return float(1.0 / np.exp(logits - logits[token]).sum(dtype=np.float64))
