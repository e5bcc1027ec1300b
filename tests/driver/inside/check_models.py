"""Whole tiny models on the driver: bit for bit what the kernels give on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.placement import Where
from localrt.quantize.quantize import Recipe, quantize_model
from tests.driver.inside.gpus import copy_one, made
from tests.driver.torch_cuda import Kernels
from tests.models.tiny import relative_error, save_tiny
from tests.offload.experts.rates import Rate
from tests.offload.gpu.placed_on_gpu import all_in_ram, on_gpu
from tests.offload.gpu.test_hybrid_experts import places, stages
from tests.offload.placed import (
    Model,
    assert_same,
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
