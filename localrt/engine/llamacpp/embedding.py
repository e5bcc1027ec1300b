"""Hidden states after the final norm, from llama.cpp: a context of its own for each text.

llama.cpp's own pooling is left out, so that both engines pool alike. It knows no text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localrt.engine.llamacpp.session import CHUNK
from localrt.engine.protocol import Check
from localrt.errors import LocalrtError, MemoryBudgetError

if TYPE_CHECKING:
    from localrt.engine.llamacpp.engine import LlamaCppEngine

__all__ = ["hidden_size", "hidden_states"]

_NO_POOLING = 0  # LLAMA_POOLING_TYPE_NONE


def hidden_size(engine: LlamaCppEngine) -> int:
    """Columns of the hidden states."""
    return int(engine.library.api.llama_model_n_embd(engine.model))


def hidden_states(
    engine: LlamaCppEngine, tokens: Sequence[int], check: Check | None
) -> Generator[npt.NDArray[np.float32], None, None]:
    """Those of ``tokens`` in order, pieces (n, D) that are the caller's own.

    Raises:
        MemoryBudgetError: llama.cpp has no room for so long a text.
        LocalrtError: llama.cpp failed.
    """
    engine.check_open()
    api, size = engine.library.api, hidden_size(engine)
    params = api.llama_context_default_params()
    params.n_ctx = len(tokens)
    params.n_batch = params.n_ubatch = params.n_outputs_max = min(CHUNK, len(tokens))
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = engine.threads
    params.no_perf = True
    params.embeddings = True
    params.pooling_type = _NO_POOLING
    if engine.info.device == "cpu":
        params.offload_kqv = params.op_offload = False
    engine.library.errors.clear()
    context = api.llama_init_from_model(engine.model, params)
    if not context:
        reason = engine.library.reason("not enough memory")
        raise MemoryBudgetError(f"llama.cpp cannot embed {len(tokens)} tokens at once: {reason}")
    try:
        for start in range(0, len(tokens), CHUNK):
            if check is not None:
                check()
            chunk = tokens[start : start + CHUNK]
            ids = (ctypes.c_int32 * len(chunk))(*chunk)
            batch = api.llama_batch_get_one(ids, len(chunk))
            wanted = (ctypes.c_int8 * len(chunk))(*[1] * len(chunk))
            batch.logits = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8))
            with engine.lock:
                code = api.llama_decode(context, batch)
            if code != 0:
                raise LocalrtError(f"llama.cpp could not embed: {engine.library.reason(f'{code}')}")
            rows = api.llama_get_embeddings(context)
            yield np.ctypeslib.as_array(rows, shape=(len(chunk), size)).copy()
    finally:
        api.llama_free(context)
