"""Whole tiny models on the driver: bit for bit what the kernels give on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, Where
from localrt.quant.ops.protocol import Batch
from localrt.quantize.quantize import Recipe, quantize_model
from tests.driver.inside.conftest import Kernels
from tests.driver.inside.gpus import copy_none, copy_one, made
from tests.driver.standin import Driver
from tests.models.tiny import relative_error, save_tiny
from tests.offload.experts.rates import Rate
from tests.offload.gpu.placed_on_gpu import (
    all_in_ram,
    on_gpu,
    place_on_gpu,
    placements,
    some,
)
from tests.offload.gpu.test_hybrid_experts import places, stages
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    conversation,
    extend,
    needs_kernels,
    pack_synthetic,
    pack_tiny,
    passing,
    tokens,
)
from tests.waits import wait_for

pytestmark = [needs_kernels, pytest.mark.usefixtures("emulated")]
once = pytest.mark.parametrize("driver", [0], ids=["late"], indirect=True)
few = settings(  # each closes what it has opened
    some, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SLACK = st.tuples(st.integers(0, 8), st.integers(0, 8))
SEEDS = st.integers(0, 1 << 16)
"""Of the driver: 0 is never early."""
FREED = st.integers(1, 100_000)
COSTS = ExpertCosts(cpu=Rate(1e-3, 0.0, 0.0), gpu=Rate(4e-4, 0.0, 0.0), fetch=5e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A small Llama."""
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=256,
        hidden=64,
        inner=64,
        layers=2,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Two layers of eight experts, in a format that the kernels read."""
    folder = tmp_path_factory.mktemp("moe")
    save_tiny("qwen3-moe", folder / "model")
    with closing(open_checkpoint(folder / "model")) as source:
        recipe = Recipe("int4-g32", method="rtn")
        path = quantize_model(source, folder / "store", recipe, threads=1).path
    with closing(Model(path)) as model:
        yield model


def all_in_turn(model: Model) -> dict[str, Where]:
    order = [Where.LINK, Where.SSD, Where.VRAM, Where.SSD_LINK, Where.RAM]
    return {name: order[n % 5] for n, name in enumerate(passing(model.store))}


def talk(decoder: Decoder) -> list[np.ndarray]:
    seen = conversation(decoder)
    cache = decoder.cache(40)
    for token in tokens(5):
        seen.append(extend(decoder, cache, [token]))
    return seen


def test_streamed(model: Model, gpu: Kernels) -> None:
    where = all_in_turn(model)
    seen = []
    for device in ("cpu", "cuda"):
        with on_gpu(model, where, slack=(2, 2), make=made(device)) as decoder:
            seen.append(talk(decoder))
    assert_same(*seen)


@once
@given(data=st.data(), slack=SLACK, seed=SEEDS)
@few
def test_any_placement(
    model: Model,
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
    where = data.draw(placements(passing(model.store)))
    stops = data.draw(st.lists(st.integers(1, len(where)), max_size=3))
    freed, seen = data.draw(st.tuples(FREED, FREED)), []
    placement = place_on_gpu(model.store, where, slack=slack)
    placement = replace(placement, gpu_rows=data.draw(st.sampled_from([0, LEAST_GPU_ROWS])))
    for device in ("cpu", "cuda"):
        with on_gpu(model, where, placement=placement, make=made(device)) as decoder:
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


@once
@given(data=st.data(), slack=SLACK, seed=SEEDS)
@few
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
    scheduler = data.draw(st.sampled_from([copy_none, copy_one]))
    # How far a pass comes until it is cancelled depends on time, and so does what it has copied;
    # the two sides round differently.
    most = 3 if scheduler is copy_none else 0
    stops, evicted = data.draw(st.lists(st.integers(1, 8), max_size=most)), data.draw(FREED)
    seen = []
    for device in ("cpu", "cuda"):
        make = made(device)
        with on_gpu(mixture, where, slack=slack, make=make, expert_costs=COSTS) as decoder:
            if hybrid := decoder.weights.sparse.get("gpu"):
                wait_for(partial(all_in_ram, decoder))
                hybrid.fills, hybrid.scheduler = False, scheduler
            said, cache = talk(decoder), decoder.cache(64)
            for seed, stop in enumerate(stops):
                with suppress(CancelledError):
                    decoder.forward(Batch.extend([(cache, [5])]), check=cancel_after(stop - 1))
                cache.trim(2 * seed)
                said.append(extend(decoder, cache, tokens(2, seed=seed)))
            decoder.weights.memory.evict_gpu(evicted)
            seen.append([*said, *talk(decoder)])
    assert_same(*seen)


@once
def test_units_stay_where_nothing_crosses(mixture: Model, gpu: Kernels) -> None:
    """The ring's bytes are experts' slots there: nothing could be copied through it."""
    names = [unit.name for unit in mixture.store.manifest.units]
    units = [name for name in passing(mixture.store) if ".expert." not in name]
    where = {n: Where.VRAM if n.endswith(".attention") else Where.SSD for n in units}
    where |= dict.fromkeys([name for name in names if ".expert." in name][:4], Where.VRAM)
    for device in ("cpu", "cuda"):
        with on_gpu(mixture, where, make=made(device), expert_costs=COSTS) as decoder:
            talk(decoder)
            decoder.weights.memory.evict_gpu(1)
            talk(decoder)


@once
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_states_on_both_sides(name: str, gpu: Kernels, tmp_path: Path) -> None:
    """The first layer's in RAM, the others' on the GPU."""
    with closing(Model(pack_tiny(name, tmp_path))) as model:
        names = [unit.name for unit in model.store.manifest.units]
        there = [name for name in names if name.startswith(("layers.1", "layers.2"))]
        where = {name: Where.VRAM for name in there if "expert" not in name}
        seen = []
        for device in ("cpu", "cuda"):
            with on_gpu(model, where, make=made(device), expert_costs=COSTS) as decoder:
                cache = decoder.cache(64)
                parts = (tokens(20), [1], tokens(2, seed=3), [5], [6])
                seen.append([extend(decoder, cache, part) for part in parts])
    assert_same(*seen)


@once
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_long_passes(mixture: Model, gpu: Kernels, share: float) -> None:
    """Experts are copied ahead, each layer's while the one before it is computed."""
    where, seen = places(mixture, share), []
    placement = replace(place_on_gpu(mixture.store, where), gpu_rows=LEAST_GPU_ROWS)
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"make": made(device), "placement": placement}
        with on_gpu(mixture, where, expert_costs=COSTS, **options) as decoder:
            wait_for(partial(all_in_ram, decoder))
            cache, text = decoder.cache(200), tokens(2 * LEAST_GPU_ROWS)
            halves = text[:LEAST_GPU_ROWS], text[LEAST_GPU_ROWS:]
            seen.append([extend(decoder, cache, half) for half in halves])
    assert_same(*seen)


def test_two_gpus(model: Model, gpu: Kernels) -> None:
    """A model on each, whose passes take turns in one thread, recorded and not."""
    where, text = all_in_turn(model), tokens(6)
    seen = list[list[np.ndarray]]()
    with ExitStack() as held:
        decoders = [
            held.enter_context(on_gpu(model, where, slack=(2, 2), make=made(device)))
            for device in ("cpu", "cuda:1", "cuda:0")
        ]
        caches = [decoder.cache(40) for decoder in decoders]
        for token in text:
            parts = zip(decoders, caches, strict=True)
            seen.append([extend(decoder, cache, [token]) for decoder, cache in parts])
    for one, *others in seen:
        assert all(np.array_equal(one, other) for other in others)


def test_experts_on_both_sides(mixture: Model, gpu: Kernels) -> None:
    """How many experts are copied is given, as the two sides round differently."""
    seen, hits = [], []
    for device in ("cpu", "cuda"):
        where = places(mixture, 0.5)
        with on_gpu(mixture, where, make=made(device), expert_costs=COSTS) as decoder:
            wait_for(partial(all_in_ram, decoder))
            stages(decoder).fills = False
            stages(decoder).scheduler = copy_one
            cache, text = decoder.cache(64), tokens(12)
            parts = [text[:6], *([token] for token in text[6:])]
            seen.append([extend(decoder, cache, part) for part in parts])
            counts = decoder.weights.counts()
        assert 0 < counts.expert_hits < counts.expert_uses
        assert counts.busy_s["cpu"] > 0
        hits.append(counts.expert_hits)
    assert_same(*seen)
    assert hits[0] == hits[1]


def test_experts_that_no_kernel_reads(gpu: Kernels, tmp_path: Path) -> None:
    """Made of each expert's bytes anew, once they have come."""
    with closing(Model(pack_tiny("qwen3-moe", tmp_path))) as model:
        where = places(model, 0.3)
        with on_gpu(model, where, make=made("cuda"), expert_costs=COSTS) as decoder:
            wait_for(partial(all_in_ram, decoder))
            stages(decoder).fills = False
            stages(decoder).scheduler = copy_one
            cache, twin = decoder.cache(64), model.resident.cache(64)
            for token in tokens(6):
                ours, theirs = (
                    extend(decoder, cache, [token]),
                    extend(model.resident, twin, [token]),
                )
                assert relative_error(ours, theirs) < 0.03
            counts = decoder.weights.counts()
        assert 0 < counts.expert_hits < counts.expert_uses
