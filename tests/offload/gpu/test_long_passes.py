"""Long passes have the GPU compute what the CPU does otherwise: the same output, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.models.decoder import Decoder
from localrt.offload.placement import LEAST_GPU_ROWS, Placement, Where
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import tokens
from tests.offload.gpu.placed_on_gpu import (
    COSTS,
    PAGES,
    SHORTAGES,
    all_in_ram,
    on_gpu,
    place_on_gpu,
    placements,
    places,
    some,
    stages,
)
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    extend,
    needs_kernels,
    passing,
    wide_mixture,
)
from tests.waits import wait_for

pytestmark = needs_kernels

LONG = 70
SHORT = LEAST_GPU_ROWS - 1


def crossing(
    model: Model, where: Mapping[str, Where], **options: Any
) -> AbstractContextManager[Decoder]:
    """On a GPU, to which every MLP of the CPU crosses in passes of 65 rows or more."""
    slack = options.pop("slack", (0, 0))
    placement = place_on_gpu(model.store, where, slack=slack)
    names = (n for n, place in placement.where.items() if n.endswith("mlp") and not place.on_gpu)
    placement = replace(
        placement, gpu_rows=LEAST_GPU_ROWS, crossing=frozenset(names), prefill_rows=LONG
    )
    return on_gpu(model, where, placement=placement, **options)


def passes(decoder: Decoder, sizes: list[int]) -> list[np.ndarray]:
    """One conversation in passes of these sizes, with and without logits.

    It has its memory from the start: what others take of a GPU meanwhile may leave no room.
    """
    cache = decoder.cache(sum(sizes))
    decoder.weights.reserve(cache, sum(sizes))
    return [
        extend(decoder, cache, tokens(size, seed=seed), [] if seed % 3 == 2 else [size - 1])
        for seed, size in enumerate(sizes)
    ]


@some
@given(data=st.data(), slack=PAGES)
def test_any_mix_of_long_and_short_passes(
    model: Model, data: st.DataObject, slack: tuple[int, int]
) -> None:
    where = data.draw(placements(passing(model.store)))
    sizes = data.draw(st.lists(st.sampled_from([1, 7, SHORT, LONG]), min_size=2, max_size=6))
    pending = iter([(0, 0), *data.draw(SHORTAGES), *[(0, 0)] * 100])
    with crossing(model, where, slack=slack, shortage=lambda: next(pending)) as decoder:
        assert_same(passes(decoder, sizes), passes(model.resident, sizes))


@pytest.mark.parametrize("where", [Where.RAM, Where.SSD])
def test_rows_say_who_computes(model: Model, where: Where) -> None:
    mlps = [name for name in passing(model.store) if name.endswith("mlp")]
    others = dict.fromkeys(passing(model.store), Where.VRAM)
    with crossing(model, others | dict.fromkeys(mlps, where)) as decoder:
        cache = decoder.cache(400)
        seen: list[dict[str, set[str]]] = []
        for size in (SHORT, LEAST_GPU_ROWS, LONG, 1):
            before = len(decoder.weights.tasks())
            extend(decoder, cache, tokens(size), [])
            done = decoder.weights.tasks()[before:]
            seen.append(
                {r: {t.name for t in done if t.resource == r} & set(mlps) for r in ("cpu", "gpu")}
            )
    by_cpu, by_gpu = {"cpu": set(mlps), "gpu": set()}, {"cpu": set(), "gpu": set(mlps)}
    assert seen == [by_cpu, by_gpu, by_gpu, by_cpu]


@settings(max_examples=12)
@given(data=st.data(), slack=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_cancelled_long_pass(model: Model, data: st.DataObject, slack: tuple[int, int]) -> None:
    where = data.draw(placements(passing(model.store)))
    stops = data.draw(
        st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, LONG])), min_size=2, max_size=6)
    )
    with crossing(model, where, slack=slack) as decoder:
        for seed, (stop, size) in enumerate(stops):
            cache, twin = decoder.cache(100), model.resident.cache(100)
            batch = Batch.extend([(cache, tokens(LONG, seed=seed))])
            with pytest.raises(CancelledError):
                decoder.forward(batch, rows=[0], check=cancel_after(stop - 1))
            assert cache.length == 0
            text = tokens(size, seed=seed)
            assert_same(
                [extend(decoder, cache, text, [0])], [extend(model.resident, twin, text, [0])]
            )


def test_least_rows() -> None:
    with pytest.raises(ValueError, match="gpu_rows must be 0 or at least 65, is 64"):
        Placement(where={}, kv=(), gpu_rows=64)


# -- mixtures --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """32 experts in each layer, of which a token sees 4."""
    with closing(wide_mixture(tmp_path_factory.mktemp("moe"), 4)) as model:
        yield model


def batching(
    model: Model, share: float, ssd: float = 0.0, **options: Any
) -> AbstractContextManager[Decoder]:
    """``share`` of the experts in slots, ``ssd`` of the others on disk; long passes cross."""
    where = places(model, share, ssd=ssd)
    placement = replace(place_on_gpu(model.store, where), gpu_rows=LEAST_GPU_ROWS)
    return on_gpu(model, where, placement=placement, expert_costs=COSTS, **options)


def test_absent_experts_are_one_launch(mixture: Model) -> None:
    with batching(mixture, 0.5) as decoder:
        wait_for(lambda: all_in_ram(decoder))
        stage: Any = stages(decoder)
        launches: list[int] = []
        run = stage._on_gpu
        stage._on_gpu = lambda turn, experts: launches.append(len(experts)) or run(turn, experts)
        cache = decoder.cache(400)
        extend(decoder, cache, tokens(LONG), [])
        launches.clear()
        before = len(decoder.weights.tasks())
        extend(decoder, cache, tokens(LONG, seed=1), [])
        tasks = decoder.weights.tasks()[before:]
    layers = len(decoder.config.sparse_layers)
    assert len(launches) == 2 * layers, "what is there, then what comes"
    assert not any(t.resource == "cpu" and "expert" in t.name for t in tasks)
    copied = [t.name for t in tasks if t.resource == "link"]
    order = [int(name.split(".")[1]) for name in copied]
    assert len(order) > 16
    assert order == sorted(order), "layer by layer"
