"""The ``llamacpp`` engine: llama.cpp behind the engine contract, for GGUF files.

The library's low-level calls are used, without its Python sampler and prompt handling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

import numpy as np

from localrt.engine.llamacpp.model import CHUNK, LlamaCppModel
from localrt.engine.llamacpp.session import LlamaCppSession
from localrt.engine.llamacpp.tokenizer import LlamaCppTokenizer
from localrt.engine.protocol import Check, Engine, Logits
from localrt.errors import LocalrtError, OptionError
from localrt.quant.ops.adapters import Mix

__all__ = ["LlamaCppEngine"]


class LlamaCppEngine(Engine):
    """A GGUF model run by llama.cpp. Thread-safe: passes of several sessions take turns."""

    pass_rows = CHUNK

    def __init__(self, model: LlamaCppModel) -> None:
        self._model = model
        self.info = model.info

    def session(self, capacity: int) -> LlamaCppSession:
        """See ``Engine``."""
        self._model.check_open()
        if capacity < 1:
            raise OptionError(f"a session needs room for at least one token, not {capacity}")
        self._model.check_cache_fits(capacity)
        return LlamaCppSession(self._model, capacity)

    def logits(
        self,
        tokens: Sequence[int],
        *,
        first: int = 0,
        mix: Mix = (),
        check: Check | None = None,
    ) -> Iterator[Logits]:
        """See ``Engine``: there is no adapter."""
        assert not mix, "none can be added"
        with closing(self.session(len(tokens))) as session:
            yield from session.logits(tokens, first=first, check=check)

    def close(self) -> None:
        """Free the weights, once the last session that still has a cache is closed."""
        self._model.close()

    def tokenizer(self) -> LlamaCppTokenizer:
        """llama.cpp's own; not to be used after ``close``."""
        return LlamaCppTokenizer(self._model)

    def kv_nbytes(self, length: int) -> int:
        """See ``Engine``."""
        return length * self._model.kv_bytes_per_token

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states."""
        return self._model.hidden_size

    def hidden_states(
        self, texts: Sequence[Sequence[int]], *, check: Check | None = None
    ) -> Generator[tuple[int, Logits], None, None]:
        """See ``Engine``; a context of its own for each text.

        Raises:
            MemoryBudgetError: llama.cpp has no room for so long a text.
            LocalrtError: llama.cpp failed.
        """
        model = self._model
        for index, tokens in enumerate(texts):
            context = model.new_context(
                len(tokens), outputs=min(CHUNK, len(tokens)), embeddings=True
            )
            try:
                for start in range(0, len(tokens), CHUNK):
                    if check is not None:
                        check()
                    yield index, _embedded(model, context, tokens[start : start + CHUNK])
            finally:
                model.api.llama_free(context)


def _embedded(model: LlamaCppModel, context: object, tokens: Sequence[int]) -> Logits:
    """The hidden states of the next ``tokens``, (n, D), the caller's own."""
    ids = (ctypes.c_int32 * len(tokens))(*tokens)
    batch = model.api.llama_batch_get_one(ids, len(tokens))
    wanted = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
    batch.logits = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8))
    with model.lock:
        code = model.api.llama_decode(context, batch)
    if code != 0:
        raise LocalrtError(f"llama.cpp could not embed: {model.library.reason(f'{code}')}")
    rows = model.api.llama_get_embeddings(context)
    return np.ctypeslib.as_array(rows, shape=(len(tokens), model.hidden_size)).copy()
