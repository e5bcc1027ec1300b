"""Mixtures whose layers are recorded, with the host's part between graphs.

They compute the same to the bit as step by step, whatever moves meanwhile.
Experts are computed where costs and a fixed choice of copies say: then both ways have the same ones
on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.models.decoder import Decoder
from localrt.offload.experts.scheduler import ExpertCosts, schedule
from localrt.quant.cuda import graph
from localrt.quant.cuda.launch import emulate
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch
from tests.offload.experts.rates import Rate
from tests.offload.gpu.test_choices_on_gpu import COUNT, LAYERS, placed
from tests.offload.placed import cancel_after, extend, needs_kernels, tokens
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.tape import Tape

pytestmark = needs_kernels

# The GPU computes everything, or everything that it holds.
FETCHED = ExpertCosts(cpu=Rate(1.0, 0.0, 0.0), gpu=Rate(1e-6, 0.0, 0.0), fetch=1e-6)


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    """Runs what is launched on the CPU, and what was recorded again."""
    tape = Tape(Emulator())
    before = emulate(tape)
    monkeypatch.setattr(graph, "record", tape.record)
    yield tape
    emulate(before)


def never(rows: Any, resident: Any, costs: Any, ready: Any) -> Any:
    """See ``schedule``."""
    return schedule(rows, resident, costs, ready, fetched=0)


def one(rows: Any, resident: Any, costs: Any, ready: Any) -> Any:
    """See ``schedule``: a copy, if any expert is absent."""
    return schedule(rows, resident, costs, ready, fetched=int(not all(resident)))


def experts_of(decoder: Decoder) -> Any:
    """What runs the sparse layers on the GPU."""
    hybrid: Any = decoder.weights.sparse["gpu"]  # type: ignore[attr-defined]
    hybrid.fills = False
    return hybrid


def fill(decoder: Decoder) -> None:
    """Copy experts as long as there are free slots: the same each time."""
    hybrid = experts_of(decoder)
    slots = hybrid.slots.cache
    for seed in range(9):
        extend(decoder, decoder.cache(200), tokens(6, seed=seed, vocab=60))
    assert len(slots) == slots.capacity


def talk(decoder: Decoder, cache: KVCache, count: int = 4) -> list[np.ndarray]:
    """Tokens, then passes of two."""
    seen = [extend(decoder, cache, [token]) for token in tokens(count, seed=5, vocab=60)]
    return [*seen, *(extend(decoder, cache, [token, 3]) for token in tokens(3, vocab=60))]


def told(
    folder: Path, scheduler: Any, *, fills: bool, late: bool, recorded: bool
) -> list[np.ndarray]:
    with placed(folder, 0.5, FETCHED, late=late, recorded=recorded) as decoder:
        hybrid = experts_of(decoder)
        slots = hybrid.slots.cache
        if fills:  # the others while they are recorded
            extend(decoder, decoder.cache(200), [1])
        else:
            fill(decoder)
        before = len(slots)
        hybrid.scheduler, hybrid.fills = scheduler, fills
        seen = talk(decoder, decoder.cache(200))
        assert (len(slots) > before) is fills
        return seen


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("scheduler", "fills"), [(schedule, False), (never, False), (never, True), (one, False)]
)
def test_same_logits(tape: Tape, tmp_path: Path, scheduler: Any, fills: bool, late: bool) -> None:
    wanted = told(tmp_path, scheduler, fills=fills, late=late, recorded=False)
    assert "replay" not in tape.events
    seen = told(tmp_path, scheduler, fills=fills, late=late, recorded=True)
    assert tape.events.count("replay") > 4 * LAYERS
    assert all(map(np.array_equal, seen, wanted))
    assert all(np.isfinite(logits).all() for logits in seen)


def test_what_moves_is_not_recorded_again(tape: Tape, tmp_path: Path) -> None:
    """A layer is two graphs; experts that come and go are entries of its table."""
    with placed(tmp_path, 0.5, FETCHED, recorded=True) as decoder:
        fill(decoder)
        hybrid = experts_of(decoder)
        hybrid.scheduler = one
        cache = decoder.cache(200)
        for token in tokens(3, vocab=60):
            extend(decoder, cache, [token])
        recorded, before = len(tape.recorded), hybrid.slots.cache.keys()
        tape.events.clear()
        for token in tokens(9, seed=1, vocab=60):
            extend(decoder, cache, [token])
        assert hybrid.slots.cache.keys() != before
        assert len(tape.recorded) == recorded
        assert "entries" in tape.events
        hybrid.scheduler = never
        extend(decoder, cache, [1])  # writes the last entries
        tape.events.clear()
        extend(decoder, cache, [2])
    # Layers, the end of the last one, and the head.
    assert tape.events == ["replay"] * (2 * LAYERS + 2)


def test_cancelled_passes(tape: Tape, tmp_path: Path) -> None:
    seen = list[list[np.ndarray]]()
    for recorded in (False, True):
        with placed(tmp_path, 0.5, FETCHED, recorded=recorded) as decoder:
            fill(decoder)
            experts_of(decoder).scheduler = never
            cache = decoder.cache(200)
            said = talk(decoder, cache, 3)
            for stop in (0, 1, 2):
                with pytest.raises(CancelledError):
                    decoder.forward(Batch.extend([(cache, [11])]), check=cancel_after(stop))
                said += talk(decoder, cache, 1)
            seen.append(said)
    assert all(map(np.array_equal, *seen))


def test_memory_given_back(tape: Tape, tmp_path: Path) -> None:
    """Slots that are gone are not read: the CPU computes what was in them."""
    with placed(tmp_path, 1.0, FETCHED, recorded=True) as decoder:
        fill_all(decoder)
        hybrid, cache = experts_of(decoder), decoder.cache(200)
        hybrid.scheduler = never
        whole = [extend(decoder, cache, [token]) for token in (1, 2, 3)]
        assert "cpu" not in decoder.weights.counts().busy_s
        assert hybrid.evict(1) > 0
        cache.trim(0)
        again = [extend(decoder, cache, [token]) for token in (1, 2, 3)]
    for ours, theirs in zip(again, whole, strict=True):
        assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def fill_all(decoder: Decoder) -> None:
    """Bring all experts to the GPU."""
    slots = experts_of(decoder).slots.cache
    while len(slots) < LAYERS * COUNT:
        extend(decoder, decoder.cache(200), tokens(40, seed=len(slots), vocab=60))
