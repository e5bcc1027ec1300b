"""Offline batching: the answers to a fixed list of prompts, which share passes.

Each pass serves a block of sequences, and one event cancels all. ``live.py`` is for prompts that
come and go. No templates, files or engines are known here.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing

import numpy as np

from localrt.common.errors import CancelledError, MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.common.progress import Progress, ProgressCallback
from localrt.engine.batch.schedule import MOST_SEQUENCES, Schedule, Terms
from localrt.engine.batch.sequence import BatchSequence, raising
from localrt.engine.batch.waiting import FairQueue
from localrt.engine.protocol import Engine
from localrt.engine.request import Request
from localrt.engine.sampling import check_integer
from localrt.engine.types import Chunk
from localrt.models.tokenizers.base import Tokenizer
from localrt.quant.ops.protocol import Check


def generate_batch(
    engine: Engine,
    tokenizer: Tokenizer | None,
    requests: Sequence[tuple[int, Request]],
    *,
    ctx: int,
    room: int,
    size: int | None = None,
    cancel: threading.Event,
    on_progress: ProgressCallback | None = None,
) -> Generator[tuple[int, Chunk], None, None]:
    """Yield the chunks of every request as they come, each with its request's number.

    ``ctx`` is the longest sequence in tokens. The KV caches of running sequences take ``room``
    bytes at most; a lone sequence always runs. ``size`` sequences run at once; with None, up to 64,
    as many as ``room`` holds.

    The prompts have been checked. Waiting prompts start in order, each when a running one has
    finished. An error of one sequence is in its last chunk; an error of a pass is raised. An engine
    that cannot share passes runs one prompt after another. After every pass, ``on_progress`` gets
    the number of finished prompts, with the tokens so far in ``detail``.

    Raises:
        MemoryBudgetError: the caches of ``size`` sequences do not fit.
        OptionError: ``size`` is not a number of sequences.
    """
    if size is not None:
        most = engine.pass_rows if engine.shares_passes else 1 << 31
        check_integer("batch_size", size, 1, most)
    waiting: FairQueue[BatchSequence[int]] = FairQueue()
    for request in requests:
        waiting.push(None, BatchSequence(*request, ctx))

    check = raising(cancel)
    terms = Terms(most=size or MOST_SEQUENCES, capacity=None if engine.shares_passes else ctx)
    schedule = Schedule(engine, tokenizer, waiting, terms, room=lambda: room, check=check)
    if size is not None and engine.shares_passes:
        _check_room(size, map(schedule.cost, waiting.items()), room)
    return _run_all(schedule, waiting, check, on_progress)


def _run_all(
    schedule: Schedule[int],
    waiting: FairQueue[BatchSequence[int]],
    check: Check,
    on_progress: ProgressCallback | None,
) -> Generator[tuple[int, Chunk], None, None]:
    """Run passes until all sequences have finished or are cancelled."""
    total, finished, tokens = len(waiting), 0, 0
    with closing(schedule):
        try:
            while len(waiting) or schedule.sequences:
                check()
                for sequence, chunks in schedule.step():
                    finished += sequence.done
                    for chunk in chunks:
                        tokens += len(chunk.token_ids)
                        yield sequence.owner, chunk
                if on_progress is not None:
                    detail = f"{tokens} tokens"
                    on_progress(Progress("batch", finished, total, "prompts", detail))
        except CancelledError:
            for sequence in [*schedule.sequences, *waiting.items()]:
                yield sequence.owner, sequence.end("cancelled")


def _check_room(size: int, costs: Iterable[int], room: int) -> None:
    """Raise an error unless the ``size`` largest of ``costs`` fit into ``room`` together."""
    largest = sorted(costs, reverse=True)[:size]
    if len(largest) > 1 and sum(largest) > room:
        fitting = max(1, int(np.count_nonzero(np.cumsum(largest) <= room)))
        raise MemoryBudgetError(
            f"{len(largest)} sequences at once need {format_bytes(sum(largest))} for their KV "
            f"caches and {format_bytes(room)} is available: use "
            f"{option('batch_size', fitting)}, or a smaller {option('max_tokens')}"
        )
