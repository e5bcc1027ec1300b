"""Runs the first passes of a model that was loaded onto a GPU, so that no answer waits for kernels.

A kernel is compiled when it is first launched, and kept on the disk. Which kernels a pass launches
depends on its number of rows. One row comes first: if the disk had all of its kernels, it has those
of longer passes too, and loading ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localrt.loading.context import LoadContext
from localrt.models.config import DecoderConfig
from localrt.models.decoder import Decoder
from localrt.offload.account import pass_logits_nbytes
from localrt.quant.ops.protocol import Batch, Span
from localrt.system import return_free_memory


def run_first_passes(
    decoder: Decoder, context: LoadContext, *, most: int, longest: int = 0
) -> None:
    """Run passes of up to ``most`` rows in caches of their own, counted in no statistics, if the
    decoder computes on a GPU with our kernels. If one fails, close the decoder.

    Passes of ``longest`` rows take other kernels than all shorter ones.

    Raises:
        LocalrtError: a kernel does not compile, or a pass fails.
        CancelledError: loading was cancelled.
    """
    gpu = next((ops for ops in decoder.weights.implementations if ops.name == "cuda"), None)
    if gpu is None:
        return
    from localrt.quant.cuda.driver import device_of
    from localrt.quant.cuda.programs import kept_kernels
    from localrt.quant.cuda.steps import BEST_LOGITS

    try:
        device_of(gpu.device).prepare(BEST_LOGITS)  # of recorded passes
        lengths = _lengths(decoder.config, min(most, decoder.config.context_length), longest)
        before = kept_kernels(context.settings.cache_dir)
        for done, rows in enumerate(lengths):
            context.report("compile", done, len(lengths), "passes")
            _run(decoder, rows, context.check)
            if kept_kernels(context.settings.cache_dir) == before:
                break
    except BaseException:
        decoder.close()
        raise
    decoder.weights.forget_counts()
    return_free_memory()  # left over from the compiler


def _lengths(config: DecoderConfig, most: int, longest: int) -> list[int]:
    """Return numbers of rows whose passes launch all kernels that any pass launches.

    One row comes again at the end: by then there are experts on the GPU.
    """
    from localrt.quant.cuda.experts import rows_at_once
    from localrt.quant.cuda.products import MOST_ROWS

    lengths = {1, 4, 8, 16, 32, MOST_ROWS, max(MOST_ROWS + 1, longest)}
    for router in {spec.router for spec in config.mixtures if spec is not None}:
        sizes = {rows_at_once(n, router.used, router.count): n for n in range(most, 0, -1)}
        lengths.update(sizes.values())
    return [*sorted(rows for rows in lengths if rows <= most), 1]


def _run(decoder: Decoder, rows: int, check: Callable[[], None]) -> None:
    from localrt.quant.cuda.products import MOST_ROWS

    cache, memory = decoder.cache(rows), decoder.weights.memory
    logits = pass_logits_nbytes(decoder.config.vocab_size, rows)
    # Drafts are checked with all rows' logits, for which no weights shall leave memory.
    whole = rows <= MOST_ROWS and not (memory.streams and logits > memory.spare)
    batch = Batch.extend([(cache, [0] * rows)])
    if 1 < rows <= MOST_ROWS:  # trees take all kernels that chains do
        batch = replace(batch, spans=(Span(cache, rows, np.tri(rows, dtype=np.bool_)),))
    decoder.forward(batch, rows=None if whole else [rows - 1], check=check)
