"""Whole tiny models on the driver: bit for bit as where all is done at once, and near what the
CPU's own kernels give, which round in other places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, Where
from localrt.offload.shapes import shape_from_checkpoint
from localrt.offload.store import pack_store
from localrt.quant.ops.adapters import Adapter, LowRank
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch
from tests.checkpoints.published.test_models import SMALL, publish
from tests.driver.inside.conftest import (
    AT_ONCE,
    Kernels,
    all_in_ram,
    bring_some,
    few,
    gpu_of,
    made,
    on_gpu,
    placements,
    places,
    quantized,
    stages,
)
from tests.driver.standin import Driver
from tests.models.tiny import relative_error, save_tiny
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    conversation,
    extend,
    needs_kernels,
    pack_tiny,
    passing,
    place_on_gpu,
    tokens,
)
from tests.waits import wait_for

pytestmark = [needs_kernels, pytest.mark.gpu]
SLOW = pytest.mark.slow
SLACK = st.tuples(st.integers(0, 8), st.integers(0, 8))
SEEDS = st.integers(0, 1 << 16)
"""Of the driver: 0 is never early."""
FREED = st.integers(1, 100_000)
COSTS = ExpertCosts(cpu=1e-3, gpu=4e-4, fetch=5e-4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Two layers of eight experts, in a format that the kernels read."""
    folder = tmp_path_factory.mktemp("moe")
    save_tiny("qwen3-moe", folder)
    with closing(Model(quantized(folder))) as model:
        yield model


def unreadable(format_: str, folder: Path) -> Path:
    """A mixture in FP8, or as it was trained."""
    if format_ == "plain":
        return pack_tiny("qwen3-moe", folder)
    published, _, _ = publish(folder, "qwen3-moe", SMALL[format_])
    with closing(open_checkpoint(published)) as source:
        return pack_store(source, folder / "store")


def by_turns(model: Model) -> dict[str, Where]:
    """In all places."""
    order = [Where.LINK, Where.SSD, Where.VRAM, Where.SSD_LINK, Where.RAM]
    return {name: order[n % 5] for n, name in enumerate(passing(model.store))}


def talk(decoder: Decoder) -> list[np.ndarray]:
    seen = conversation(decoder)
    cache = decoder.cache(40)
    for token in tokens(5):
        seen.append(extend(decoder, cache, [token]))
    return seen


def near(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    """bf16 activations on one side, 8-bit ones on the other, and a near tie of experts or two."""
    both = [each for each in zip(ours, theirs, strict=True) if each[0].size]
    return float(np.median([relative_error(*each) for each in both])) < 0.06


@given(data=st.data(), slack=SLACK, seed=SEEDS)
@few(10)
def test_any_placement(
    small: Model,
    gpu: Kernels,
    driver: Driver,
    data: st.DataObject,
    slack: tuple[int, int],
    seed: int,
) -> None:
    """Passes end early, and memory is given back: nothing is read before it has come, and nothing
    is overwritten before it has been read.
    """
    driver.set(seed=seed)
    where = data.draw(placements([*passing(small.store), "embedding"]))
    where["embedding"] = Where.SSD if where["embedding"].read else Where.RAM
    stops = data.draw(st.lists(st.integers(1, len(passing(small.store))), max_size=3))
    freed, seen = data.draw(st.tuples(FREED, FREED)), []
    placement = place_on_gpu(small.store, where, slack=slack)
    placement = replace(placement, gpu_rows=data.draw(st.sampled_from([0, LEAST_GPU_ROWS])))
    for device in (AT_ONCE, "cuda"):
        with on_gpu(small, where, placement=placement, make=made(device)) as decoder:
            cache, said = decoder.cache(100), talk(decoder)
            said.append(extend(decoder, cache, tokens(LEAST_GPU_ROWS)))
            for seed, stop in enumerate(stops):
                with pytest.raises(CancelledError):
                    decoder.forward(Batch.extend([(cache, [5, 6])]), check=cancel_after(stop - 1))
                said.append(extend(decoder, cache, tokens(2, seed=seed)))
            decoder.weights.memory.evict(freed[0])
            decoder.weights.memory.evict_gpu(freed[1])
            seen.append([*said, *talk(decoder)])
    assert_same(*seen)
    last = talk(small.resident)
    assert near(seen[0][-len(last) :], last)


@given(data=st.data(), slack=SLACK, seed=SEEDS)
@few(10)
def test_any_placement_of_a_mixture(
    mixture: Model,
    gpu: Kernels,
    driver: Driver,
    data: st.DataObject,
    slack: tuple[int, int],
    seed: int,
) -> None:
    driver.set(seed=seed)
    names = [unit.name for unit in mixture.store.manifest.units]
    shells = [name for name in passing(mixture.store) if ".expert." not in name]
    where = data.draw(placements(shells))
    experts = [name for name in names if ".expert." in name]
    where |= dict.fromkeys(experts[: data.draw(st.integers(1, len(experts)))], Where.VRAM)
    # The two sides round differently: who computes an expert is given.
    stops, evicted = data.draw(st.lists(st.integers(1, 8), max_size=3)), data.draw(FREED)
    seen = []
    for device in (AT_ONCE, "cuda"):
        make = made(device)
        with on_gpu(mixture, where, slack=slack, make=make, expert_costs=COSTS) as decoder:
            if hybrid := decoder.weights.sparse.get("gpu"):
                wait_for(partial(all_in_ram, decoder))
                hybrid.fills = False
                bring_some(hybrid)
            said, cache = talk(decoder), decoder.cache(64)
            for seed, stop in enumerate(stops):
                with suppress(CancelledError):
                    decoder.forward(Batch.extend([(cache, [5])]), check=cancel_after(stop - 1))
                cache.trim(2 * seed)
                said.append(extend(decoder, cache, tokens(2, seed=seed)))
            decoder.weights.memory.evict_gpu(evicted)
            seen.append([*said, *talk(decoder)])
    assert_same(*seen)
    last = talk(mixture.resident)
    assert near(seen[0][-len(last) :], last)


@pytest.mark.parametrize("format_", ["FP8", pytest.param("plain", marks=SLOW)])
def test_experts_that_no_kernel_reads(format_: str, gpu: Kernels, tmp_path: Path) -> None:
    """Made of each expert's bytes anew, once they have come; the copies count as memory."""

    def answer(decoder: Decoder) -> list[np.ndarray]:
        cache = decoder.cache(40)
        return [extend(decoder, cache, part) for part in (tokens(9), [5], [6], [7])]

    with closing(Model(unreadable(format_, tmp_path))) as model:
        where = places(model, 0.3)
        units = {unit.name: unit for unit in shape_from_checkpoint(model.store).units}
        experts = [unit for unit in units.values() if unit.kind == "expert"]
        dense = sum(units[n].nbytes for n in where if where[n].on_gpu and ".expert." not in n)
        with on_gpu(model, where, make=made("cuda"), expert_costs=COSTS) as decoder:
            wait_for(partial(all_in_ram, decoder))
            stages(decoder).fills = False
            bring_some(stages(decoder))
            assert near(answer(decoder), answer(model.resident))
            counts, slots = decoder.weights.counts(), stages(decoder).slots
            assert 0 < counts.expert_hits < counts.expert_uses
            each = max(unit.nbytes for unit in experts) + experts[0].unpacked
            assert slots.slot_nbytes == each
            used = gpu_of(decoder).used
            assert used == dense + slots.cache.capacity * each
            assert decoder.weights.memory.evict_gpu(1) == each == used - gpu_of(decoder).used


# -- adapters --------------------------------------------------------------------------------------


def adapter_of(model: Model) -> Adapter[LowRank]:
    """Of every matrix."""
    rng = np.random.default_rng(0)

    def part(rows: int, columns: int) -> LowRank:
        a, b = rng.normal(0, 0.2, (4, columns)), rng.normal(0, 0.2, (rows, 4))
        return LowRank(a.astype(np.float32), b.astype(np.float32), None)

    shapes = {n: i.shape for n, i in model.store.tensors.items() if "layers" in n}
    matrices = {n: part(s[0], s[1]) for n, s in shapes.items() if len(s) == 2}
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    return Adapter("key", matrices, part(hidden, vocab), part(vocab, hidden))


def add(decoder: Decoder, adapter: Adapter[LowRank]) -> Callable[[], None]:
    """To all lanes; what removes it."""
    tables = [ops.adapters for ops in getattr(decoder.weights, "implementations", [decoder.ops])]
    for table in tables:
        table.add(table.packed(adapter))
    return lambda: [table.remove("key") for table in tables] and None


@pytest.mark.parametrize("mlps_only", [False, True])
def test_lanes_add_their_own(small: Model, gpu: Kernels, mlps_only: bool) -> None:
    """Others find nothing of an adapter, in a pass of their own and beside it."""
    ids, where = [5, 6, 7], by_turns(small)
    if mlps_only:  # the GPU's lane attends to nothing
        names = passing(small.store)
        where = {n: Where.VRAM if n.endswith(".mlp") else Where.RAM for n in names}

    def part(decoder: Decoder, *keys: str) -> tuple[KVCache, list[int]]:
        cache = decoder.cache(16)
        cache.mix = tuple((key, 1.0) for key in keys)
        return cache, ids

    remove = add(small.resident, adapter_of(small))
    wanted, plain = (
        small.resident.forward(Batch.extend([part(small.resident, *keys)]))
        for keys in (("key",), ())
    )
    remove()
    with on_gpu(small, where, slack=(2, 2), make=made("cuda")) as decoder:
        first = decoder.forward(Batch.extend([part(decoder)]))
        assert near([first], [plain])
        remove = add(decoder, adapter_of(small))
        for _ in range(2):
            got = decoder.forward(Batch.extend([part(decoder, "key")]))
            assert near([got], [wanted])
            assert not near([got], [plain])
            assert_same([decoder.forward(Batch.extend([part(decoder)]))], [first])
        both = decoder.forward(Batch.extend([part(decoder), part(decoder, "key")]))
        assert_same([both], [np.concatenate([first, got])])
        remove()
        assert_same([decoder.forward(Batch.extend([part(decoder)]))], [first])
