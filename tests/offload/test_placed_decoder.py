"""Where a unit lives changes nothing of what is computed: bit for bit the resident decoder's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.common.errors import MemoryBudgetError
from localrt.common.files import PAGE
from localrt.models.decoder import Decoder
from localrt.offload.placement import Where
from localrt.quant.ops.kv_formats import CacheFormat
from tests.offload.placed import (
    Model,
    assert_same,
    conversation,
    extend,
    needs_kernels,
    pack_synthetic,
    passing,
    tokens,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Three layers and a head of four slices, its own matrix."""
    folder = pack_synthetic(tmp_path_factory.mktemp("llama"), vocab=1500, layers=3, hidden=128)
    with closing(Model(folder)) as model:
        yield model


pytestmark = needs_kernels


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Its embedding is the slices of its head."""
    folder = pack_synthetic(tmp_path_factory.mktemp("tied"), vocab=1500, layers=2, tied=True)
    with closing(Model(folder)) as model:
        yield model


@given(data=st.data(), slack=st.integers(0, 40), embedded=st.booleans())
def test_any_placement_computes_the_same(
    model: Model, data: st.DataObject, slack: int, embedded: bool
) -> None:
    names = passing(model.store)
    streamed = data.draw(st.sets(st.sampled_from(names), min_size=1))
    if embedded:
        streamed.add("embedding")
    with model.placed(streamed, slack=slack * PAGE, largest=80 * PAGE) as decoder:
        assert {s.name for s in decoder.weights.stages if s.where is Where.SSD} == streamed - {
            "embedding"
        }
        assert_same(conversation(decoder), model.expected)


@settings(max_examples=5)
@given(data=st.data())
def test_tied_head(tied: Model, data: st.DataObject) -> None:
    streamed = data.draw(st.sets(st.sampled_from(passing(tied.store)), min_size=1))
    with tied.placed(streamed) as decoder:
        assert_same(conversation(decoder), tied.expected)


@pytest.mark.parametrize(("threads", "kv_format"), [(2, "bf16"), (1, "int8"), (2, "int8")])
def test_threads_and_cache_formats(model: Model, threads: int, kv_format: CacheFormat) -> None:
    with closing(Model(model.store.path, threads=threads, kv_format=kv_format)) as other:
        with other.placed(passing(model.store)) as decoder:
            assert_same(conversation(decoder), conversation(other.resident))
        if kv_format == "bf16":
            assert_same(conversation(other.resident), model.expected)


def test_bytes_read(model: Model) -> None:
    streamed = passing(model.store)
    size = sum(unit.nbytes for unit in model.store.manifest.units if unit.name in streamed)
    with model.placed(streamed) as decoder:
        cache = decoder.cache(100)
        extend(decoder, cache, tokens(30))
        start = decoder.weights.counts().ssd_read_bytes
        for token in range(20):
            extend(decoder, cache, [token])
        counts = decoder.weights.counts()
        assert abs(counts.ssd_read_bytes - start - 20 * size) <= size
        assert counts.passes == 21
        assert counts.decode_passes == 20  # the prompt is none
        assert 0 < counts.decode_cpu_s < counts.busy_s["cpu"]
        assert set(counts.busy_s) == {"ssd", "cpu"}
        assert all(seconds > 0 for seconds in counts.busy_s.values())


# -- memory ----------------------------------------------------------------------------------------


def budget_for(model: Model, streamed: list[str], extra: int) -> int:
    """Exactly what is resident, and ``extra`` bytes."""
    kept = (u for u in model.store.manifest.units if u.name not in {*streamed, "norm"})
    return sum(unit.nbytes for unit in kept) + extra


def largest(model: Model) -> int:
    return max(unit.nbytes for unit in model.store.manifest.units)


def assert_alike(model: Model, decoder: Decoder, cache: Any, twin: Any, part: list[int]) -> None:
    """The last logits are those of the resident decoder."""
    rows = [len(part) - 1]
    expected = extend(model.resident, twin, part, rows=rows)
    assert_same([extend(decoder, cache, part, rows=rows)], [expected])


def test_growing_caches(model: Model) -> None:
    kv = model.ops.kv_nbytes(model.config.attention, 256)
    budget = budget_for(model, [], kv + PAGE)
    with model.placed([], largest=largest(model), budget=budget) as decoder:
        caches = [decoder.cache(512), decoder.cache(512)]
        text = tokens(320, seed=9)
        given_back: list[int] = []
        for cache, length in zip(caches, (320, 128), strict=True):
            twin = model.resident.cache(512)
            for start in range(0, length, 64):
                assert_alike(model, decoder, cache, twin, text[start : start + 64])
                stages = decoder.weights.stages
                resident = sum(s.unit.nbytes for s in stages if s.where is Where.RAM)
                embedding = next(u for u in model.store.manifest.units if u.name == "embedding")
                assert resident + embedding.nbytes + sum(c.nbytes for c in caches) <= budget
                given_back.append(sum(s.where is Where.SSD for s in stages))
        assert given_back == sorted(given_back)
        assert given_back[0] < given_back[-1] < len(decoder.weights.stages)


def test_evicted_units_return(model: Model) -> None:
    with model.placed(["layers.1.mlp"], largest=largest(model)) as decoder:
        cache, twin = decoder.cache(100), model.resident.cache(100)
        for turn, token in enumerate(tokens(12)):
            if turn % 3 == 1:
                wanted = 30_000 * turn
                assert decoder.weights.memory.evict(wanted) >= wanted
                assert sum(stage.where is Where.SSD for stage in decoder.weights.stages) > 1
            assert_alike(model, decoder, cache, twin, [token])
        assert [s.name for s in decoder.weights.stages if s.where is Where.SSD] == ["layers.1.mlp"]


def test_context_beyond_budget(model: Model) -> None:
    streamed = passing(model.store)
    kv = model.ops.kv_nbytes(model.config.attention, 256)
    budget = budget_for(model, streamed, kv + PAGE)
    with model.placed(streamed, largest=largest(model), budget=budget) as decoder:
        cache, twin = decoder.cache(1000), model.resident.cache(1000)
        text = tokens(300)
        assert_alike(model, decoder, cache, twin, text[:100])
        with pytest.raises(MemoryBudgetError, match=r"left for them .* a shorter ctx") as caught:
            extend(decoder, cache, text[100:], rows=[199])
        assert "\n" not in str(caught.value)
        assert cache.length == 100
        assert_alike(model, decoder, cache, twin, text[100:110])
