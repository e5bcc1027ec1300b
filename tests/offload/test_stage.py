"""A streamed unit's part: made anew where its bytes come to lie, without copies to the card."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.decoder import load_mlp
from localrt.models.registry import read_config
from localrt.offload.device.gpu import Clock
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.stage import Stage
from localrt.offload.placement import Where
from localrt.offload.ring import PAGE
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Batch
from tests.offload.placed import needs_kernels, pack_synthetic

pytestmark = needs_kernels


class Counting(NativeOps):
    """Counts the vectors that it makes: on a GPU each is a copy that is waited for."""

    made = 0

    def vector(self, values: Any) -> Any:
        self.made += 1
        return super().vector(values)


class Moving:
    """A reader whose ring has the unit at another place each time."""

    def __init__(self, data: np.ndarray, places: int) -> None:
        self._data = data
        self._memory = aligned_buffer(data.nbytes + places * PAGE)
        self._places, self._next = places, 0

    def acquire(self, name: str, check: Any = None) -> Any:
        start = self._next % self._places * PAGE
        self._next += 1
        self._memory[:] = 0
        self._memory[start : start + self._data.nbytes] = self._data
        return self._memory[start : start + self._data.nbytes]

    def release(self, name: str, event: Any = None) -> None:
        pass


@pytest.mark.parametrize("places", [6, 50])
def test_norms_are_made_once(tmp_path: Path, places: int) -> None:
    store = open_checkpoint(pack_synthetic(tmp_path, vocab=64, layers=1))
    assert isinstance(store, StoreCheckpoint)
    try:
        unit = next(u for u in store.manifest.units if u.name == "layers.0.mlp")
        data = np.fromfile(store.path / unit.file, np.uint8, unit.nbytes, offset=unit.offset)
        ops, config = Counting(threads=1), read_config(store)
        reader: Any = Moving(data, places)
        cache = ops.kv_cache(config.attention, 8)
        lane = Lane(store, ops, Clock(), reader=reader, attends=False)
        stage = Stage(unit, Where.SSD, lane, partial(load_mlp, config, 0, experts=None))
        seen = []
        for _ in range(2 * places):
            state = StreamedState(Batch.extend([(cache, [3])]), np.empty(0, np.intp), lane, None)
            state.x = np.ones((1, config.hidden_size), np.float32)
            stage(state)
            seen.append(np.array(state.x))
        assert ops.made == 1
        assert all(np.array_equal(x, seen[0]) for x in seen)
    finally:
        store.close()
