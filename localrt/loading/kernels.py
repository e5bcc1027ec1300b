"""A card's kernels are compiled while a model's weights load: its first prompt finds them all.

Which ones is found by passes through the model's parts without weights (``models/rehearsal.py``).
What was compiled once is on the disk. Other implementations bring their kernels with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from localrt.common.errors import CancelledError
from localrt.common.progress import Progress, ProgressCallback
from localrt.models.checkpoints.base import TensorSource
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig
from localrt.models.rehearsal import Share, rehearse
from localrt.models.tokenizers.free_memory import return_free_memory
from localrt.offload.placement import Placement
from localrt.quant.ops.protocol import Ops

_MOST_THREADS = 4  # each takes a core, and 30 MB of RAM
_LOOK_S = 0.1


@contextmanager
def compiled_meanwhile(
    source: TensorSource,
    config: DecoderConfig,
    ops: Ops,
    share: Share | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[None]:
    """What ``ops`` will launch for their ``share`` of a model, default all, is compiled beside the
    body. What is left at its end is waited for.

    Raises:
        LocalrtError: a kernel does not compile.
        CancelledError: ``cancel`` was set.
    """
    if ops.name != "cuda":
        yield
        return
    from localrt.quant.cuda.ops import CudaOps  # these two bring torch
    from localrt.quant.cuda.sketch import SketchOps

    assert isinstance(ops, CudaOps), "no others have their name"
    sketch = SketchOps(ops)
    rehearse(source, config, sketch, share or Share.whole(config))
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "localrt-compile")
    try:
        work = [pool.submit(sketch.prepare, program) for program in sketch.programs]
        yield
        _wait(work, progress, cancel)
    finally:
        pool.shutdown(cancel_futures=True)
        return_free_memory()  # the compiler's


def share_of_card(store: StoreCheckpoint, config: DecoderConfig, placement: Placement) -> Share:
    """What a placement has a card compute."""

    def layers(kind: str) -> frozenset[int]:
        names = {layer: f"layers.{layer}.{kind}" for layer in range(config.layers)}
        return frozenset(n for n, name in names.items() if name in on_card)

    on_card = {name for name, where in placement.where.items() if where.on_gpu}
    crossing = frozenset(n for n in range(config.layers) if f"layers.{n}.mlp" in placement.crossing)
    matrix = EMBEDDING if config.tied_head else HEAD
    head = [unit.tensors[0] for unit in store.manifest.units if unit.name in on_card]
    return Share(
        attention=layers("attention"),
        mlp=layers("mlp"),
        longest=crossing,
        head=tuple(tensor.shape[0] for tensor in head if tensor.name == matrix),
    )


def _wait(
    work: list[Future[None]], progress: ProgressCallback | None, cancel: threading.Event | None
) -> None:
    left = set(work)
    while left:
        ended, left = wait(left, _LOOK_S, FIRST_COMPLETED)
        for future in ended:
            future.result()
        if cancel is not None and cancel.is_set():
            raise CancelledError("loading was cancelled")
        if left and progress is not None:
            progress(Progress("compile", len(work) - len(left), len(work), "kernels"))
