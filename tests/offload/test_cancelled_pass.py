"""A pass that is given up: what was still to be loaded for it is dropped; the next one is whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.offload.reading.files import StoreFiles
from tests.offload.placed import Model, extend, needs_kernels, pack_synthetic, passing, tokens
from tests.waits import wait_for

pytestmark = needs_kernels
TEXT = tokens(8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with closing(Model(pack_synthetic(tmp_path_factory.mktemp("m"), vocab=700, layers=4))) as model:
        yield model


class SlowFiles:
    """Remembers what is read; a unit that is ``held`` does not come before it is let go."""

    def __init__(self, model: Model) -> None:
        names = {unit.file for unit in model.store.manifest.units}
        self._files = StoreFiles(model.store.path, names)
        self.read: list[tuple[str, int]] = []
        self.held: tuple[str, int, int] | None = None  # a file, from byte to byte
        self.stuck = threading.Event()  # the read of such a unit has begun
        self.go = threading.Event()

    def read_into(self, name: str, offset: int, out: Any) -> None:
        self.read.append((name, offset))
        held = self.held
        if held is not None and held[0] == name and held[1] <= offset < held[2]:
            self.stuck.set()
            assert self.go.wait(60)
        self._files.read_into(name, offset, out)

    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    def close(self) -> None:
        self._files.close()


def test_queued_loads_are_dropped(model: Model) -> None:
    streamed = [name for name in passing(model.store) if name.startswith("layers")]
    units = {unit.name: unit for unit in model.store.manifest.units}
    last, stuck = units["layers.3.mlp"], units["layers.1.attention"]
    files = SlowFiles(model)
    with model.placed(streamed, files=files) as decoder:
        expected = extend(model.resident, model.resident.cache(50), TEXT)
        assert np.array_equal(extend(decoder, decoder.cache(50), TEXT), expected)
        time.sleep(0.05)  # the ring is full of the next pass's first units
        files.held = stuck.file, stuck.offset, stuck.offset + stuck.nbytes
        files.read.clear()
        waits = 0

        def check() -> None:
            nonlocal waits
            waits += files.stuck.is_set()
            if waits > 4:  # it waits for the unit that does not come
                raise CancelledError("stop")

        cache = decoder.cache(50)
        with pytest.raises(CancelledError):
            decoder.forward(_batch(cache), check=check)
        assert cache.length == 0
        files.go.set()
        files.held = None
        first, there = units["layers.0.attention"], (stuck.file, stuck.offset)
        assert there in files.read
        # What was on its way arrives, and the ring is filled anew.
        wait_for(lambda: (first.file, first.offset) in files.read[files.read.index(there) :])
        # Nothing of the rest of that pass was read: it began again with the first units.
        begun = list(files.read)
        assert not any(n == last.file and o >= last.offset for n, o in begun)
        assert np.array_equal(extend(decoder, cache, TEXT), expected)


def _batch(cache: Any) -> Any:
    from localrt.quant.ops.protocol import Batch

    return Batch.extend([(cache, TEXT)])
