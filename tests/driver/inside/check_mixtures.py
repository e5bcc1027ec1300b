"""A mixture that GPU and CPU compute together, in virtual time, on the routing of a trained one.

Kernels compute nothing; what routers choose is the trace's. The expert cache, its policy, and the
copies that it has made are the product's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.random_store import write_store
from localrt.models.decoder import Decoder
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.experts.hybrid import HybridExperts, RecordedLayers, RecordedPass
from localrt.offload.placement import Placement, Where
from tests.driver.inside.check_schedule import BETWEEN, WINDOWS
from tests.driver.inside.conftest import Kernels, once
from tests.driver.inside.gpus import made
from tests.driver.standin import Driver
from tests.driver.virtual_time import Machine, VirtualTime, virtual_time
from tests.offload.experts.routing import TrainedChoices
from tests.offload.gpu.placed_on_gpu import all_in_ram, on_gpu, stages
from tests.offload.placed import Model, extend, needs_kernels

pytestmark = needs_kernels

LAYERS, COUNT, USED = 40, 64, 8
CONFIG = {
    "vocab_size": 14_000,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_experts": COUNT,
    "num_experts_per_tok": USED,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Layers, their attention, experts and the head in the proportions of Qwen3.5-35B-A3B, with a
quarter of its experts."""
EXPERT = 3 * 128 * 32 * 9 / 16  # bytes
GEFORCE = Machine(
    link=12.5e9, gpu=245e9, cpu=50e9, kernel=2.75e-6, scale=1.45e6 / EXPERT, expert=1.45e6
)
"""An RTX 4060 beside DDR5-5600; the experts are of 3.4 bits."""
TOKENS, WARM = 150, 250


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("mixture") / "store"
    write_store(path, "Qwen3MoeForCausalLM", CONFIG, "int4-g32")
    with closing(Model(path)) as model:
        yield model


class Choices(TrainedChoices):
    """The trace's, of every layer."""

    token = 0

    def most_used(self) -> list[tuple[int, int]]:
        """Experts, (expert, layer), by how often the tokens before the measured ones use them."""
        used = np.zeros((COUNT, LAYERS), int)
        for layer, token in np.ndindex(LAYERS, WARM):
            used[self.choose(layer, token, USED)[0], layer] += 1
        order = np.argsort(-used, axis=None, kind="stable")
        return [(int(key) // LAYERS, int(key) % LAYERS) for key in order]

    def put(self, layer: RecordedPass) -> None:
        """Write a layer's choice where the GPU would have."""
        routing = layer.share.routing
        chosen = self.choose(layer.routed.place, self.token, 2 * USED)
        routing.experts[0], routing.scores[0] = chosen


@dataclass(frozen=True)
class Rates:
    """Of the last tokens: how many a second, the share of hits, launches, bytes over the link, and
    the share of time in which the GPU was at work.
    """

    tok_s: float
    hits: float
    launches: float
    link: float
    gpu: float


@contextmanager
def opened(model: Model, machine: Machine, share: float) -> Iterator[tuple[VirtualTime, Decoder]]:
    names = [unit.name for unit in model.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    where = dict.fromkeys(names, Where.VRAM) | {"norm": Where.RAM, "embedding": Where.RAM}
    where |= dict.fromkeys(experts[round(share * len(experts)) :], Where.RAM)
    plan = Placement(where=where, kv=("vram",) * LAYERS, prefill_rows=1000)
    fetch = machine.expert / machine.link
    on_cpu, there = machine.expert / machine.cpu, machine.expert / machine.gpu
    costs = ExpertCosts(cpu=on_cpu, gpu=there, fetch=fetch)
    with (
        virtual_time(machine, lambda name: 0) as time,
        on_gpu(model, where, placement=plan, make=made("cuda"), expert_costs=costs) as decoder,
    ):
        while not all_in_ram(decoder):
            time.wait_until(time.now + 1e-3, sleeps=False)  # reading threads go on
            for pool in stages(decoder).memory.pools:
                pool._settle_arrived()
        yield time, decoder


def decode(
    model: Model,
    driver: Driver,
    gpu: Kernels,
    machine: Machine,
    share: float,
    *,
    fills: bool = True,
    copies: bool = False,
) -> Rates:
    """With a ``share`` of the experts on the GPU: without ``fills`` always the same ones, those
    that the tokens before use most; with ``copies`` the CPU computes none: absent ones are copied.
    """
    choices = Choices(COUNT)
    with opened(model, machine, share) as (time, decoder), pytest.MonkeyPatch.context() as patch:
        hybrid, learn = stages(decoder), HybridExperts.learn

        def serve(layers: RecordedLayers, check: Any) -> None:
            for layer in layers._layers:
                choices.put(layer)
                absent = len(layer.absent())
                time.share(USED - absent, absent, copies=copies)
            hybrid.served(layers._layers, 0.0)

        def timed_learn(hybrid: HybridExperts) -> None:
            if hybrid._served:
                time.spend(machine.learning)
            learn(hybrid)

        patch.setattr(RecordedLayers, "__call__", serve)
        patch.setattr(HybridExperts, "learn", timed_learn)
        patch.setattr(hybrid._recorder, "while_waiting", hybrid.learn)
        fill(hybrid, choices.most_used() if not fills else np.ndindex(COUNT, LAYERS))
        hybrid.fills = fills
        cache = decoder.cache(2000)
        extend(decoder, cache, [1])
        hybrid._recorder.most_new = 1000
        driver.idle(True)
        for token in range(WARM + TOKENS):
            if token == WARM:
                begin, hits, uses = time.now, hybrid.hits, hybrid.uses
                gpu.launches.clear()
                copied = hybrid.gpu.link_bytes
            choices.token = token
            extend(decoder, cache, [1])
            time.spend(BETWEEN)
        seconds = (time.now - begin) / TOKENS
        rates = Rates(
            1 / seconds,
            (hybrid.hits - hits) / (hybrid.uses - uses),
            len(gpu.launches) / TOKENS,
            (hybrid.gpu.link_bytes - copied) / TOKENS * machine.scale,
            time.busy("gpu", begin, time.now),
        )
    driver.idle(False)
    return rates


def fill(hybrid: HybridExperts, keys: Iterable[tuple[int, ...]]) -> None:
    """The first experts of ``keys``, (expert, layer), in all slots."""
    for expert, layer in itertools.islice(keys, hybrid.slots.cache.capacity):
        hybrid.copies.bring(layer, expert)
    hybrid.settle()


@once
@pytest.mark.parametrize("system", [{}, WINDOWS], ids=["Linux", "Windows"])
def test_graphics_card(
    model: Model, driver: Driver, gpu: Kernels, system: dict[str, float]
) -> None:
    rates = decode(model, driver, gpu, replace(GEFORCE, **system), 0.37)
    assert rates.tok_s > (68 if system else 73)
    assert rates.launches < 3.5  # entries, layers, head


@once
@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.37, 0.5])
def test_division(model: Model, driver: Driver, gpu: Kernels, share: float) -> None:
    """CPU and GPU with a cache that learns, against one that does not, and against copies alone."""
    dynamic = decode(model, driver, gpu, GEFORCE, share)
    static = decode(model, driver, gpu, GEFORCE, share, fills=False)
    copies = decode(model, driver, gpu, GEFORCE, share, copies=True)
    assert dynamic.hits > static.hits
    assert dynamic.tok_s > 0.99 * static.tok_s
    assert dynamic.tok_s > 1.3 * copies.tok_s
