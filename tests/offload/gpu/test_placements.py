"""Whatever a GPU holds, copies or leaves to the CPU: bit for bit the resident decoder's output."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.offload.placement import Where
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.reader import POLL_S
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import tokens
from tests.offload.gpu.placed_on_gpu import (
    on_gpu,
    pipeline_threads,
)
from tests.offload.placed import (
    Model,
    assert_same,
    conversation,
    extend,
    needs_kernels,
    pack_synthetic,
    pack_tiny,
    passing,
)
from tests.waits import naps

pytestmark = needs_kernels

ORDER = [Where.VRAM, Where.LINK, Where.SSD_LINK, Where.RAM, Where.SSD]


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """Three layers and a head of slices."""
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"), vocab=1500, layers=3, hidden=128, tied=request.param
    )
    with closing(Model(folder)) as model:
        yield model


def spread(model: Model, offset: int = 0) -> dict[str, Where]:
    """All five places in turn."""
    return {name: ORDER[(n + offset) % 5] for n, name in enumerate(passing(model.store))}


@pytest.mark.parametrize("where", list(Where))
def test_everything_in_one_place(model: Model, where: Where) -> None:
    with on_gpu(model, dict.fromkeys(passing(model.store), where)) as decoder:
        assert_same(conversation(decoder), model.expected)
        counts = decoder.weights.counts()
        assert (counts.ssd_read_bytes > 0) is where.read
        assert ("link" in counts.busy_s) is (where.copied or where is Where.VRAM)
        assert ("gpu" in counts.busy_s) is where.on_gpu


@pytest.mark.parametrize("gpu", [False, True], ids=["attention here", "attention there"])
def test_inputs_move(gpu: bool, tmp_path: Path) -> None:
    """Layers share keys and values: attention is on one processor, MLPs are anywhere."""
    with closing(Model(pack_tiny("gemma4", tmp_path))) as model:
        attention = ORDER[:3] if gpu else ORDER[3:]
        where = {
            unit: attention[n % len(attention)] if unit.endswith(".attention") else ORDER[n % 5]
            for n, unit in enumerate(passing(model.store))
        }
        with on_gpu(model, where) as decoder:
            assert_same(conversation(decoder), model.expected)


def test_prefill_copies_little_of_the_head(model: Model) -> None:
    with on_gpu(model, dict.fromkeys(passing(model.store), Where.SSD_LINK)) as decoder:
        cache = decoder.cache(200)
        for seed in range(8):
            extend(decoder, cache, tokens(10, seed=seed), [])
        for resource in ("ssd", "link"):
            tasks = [t.name for t in decoder.weights.tasks() if t.resource == resource]
            heads = sum(name.startswith("head") for name in tasks)
            # What is on its way to the GPU when a pass begins goes there.
            assert heads < len(tasks) / 4


# -- what ends early -------------------------------------------------------------------------------


def test_cancel_while_stalled(model: Model) -> None:
    """Copies wait for a read that does not come; a cancelled pass does not."""
    hangs, awake = threading.Event(), threading.Event()

    class HangingFiles(StoreFiles):
        def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
            if hangs.is_set():
                awake.wait(60)
            super().read_into(name, offset, out)

    files = HangingFiles(model.store.path, {unit.file for unit in model.store.manifest.units})
    where = dict.fromkeys(passing(model.store), Where.SSD_LINK)
    with on_gpu(model, where, files=files) as decoder:
        cache, twin = decoder.cache(100), model.resident.cache(100)
        expected = [extend(model.resident, twin, [n]) for n in range(3)]
        seen = [extend(decoder, cache, [0])]
        hangs.set()
        started = time.perf_counter()

        def check() -> None:
            if time.perf_counter() - started > 0.1:
                raise CancelledError("stop")

        def use_up_what_is_there() -> None:
            for _ in range(100):
                decoder.forward(Batch.extend([(cache, [1])]), check=check)

        with naps() as found, pytest.raises(CancelledError):
            use_up_what_is_there()
        assert 0 < max(found) <= POLL_S <= 0.05  # at once, but for what a busy machine adds
        hangs.clear()
        awake.set()
        cache.trim(1)
        seen += [extend(decoder, cache, [n]) for n in (1, 2)]
        assert_same(seen, expected)


def test_closing(model: Model) -> None:
    before = pipeline_threads()
    for offset in range(5):
        with on_gpu(model, spread(model, offset)) as decoder:
            extend(decoder, decoder.cache(10), [1, 2])
        assert pipeline_threads(before) == before
