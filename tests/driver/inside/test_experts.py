"""Mixtures whose experts are on both sides: what layers wait for, and recordings they are part of.

Where results are compared to the bit, copies are a fixed choice: both ways have the same experts on
the GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.random_store import write_store
from localrt.common.errors import CancelledError
from localrt.models.decoder import Decoder
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.experts.hybrid import HybridExperts, RecordedLayers
from localrt.offload.experts.pool import ExpertPool
from localrt.offload.placement import LEAST_GPU_ROWS, Placement, Where
from localrt.quant.cpu.replay import NativeSharedLayers
from localrt.quant.cuda.products import MOST_ROWS
from localrt.quant.ops.kv import KVCache
from tests.driver.inside.conftest import (
    AT_ONCE,
    Kernels,
    all_in_ram,
    made,
    on_gpu,
    quantized,
    stages,
)
from tests.models.tiny import relative_error, save_tiny
from tests.offload.placed import PLENTY, Model, extend, needs_kernels, tokens
from tests.waits import wait_for

pytestmark = [needs_kernels, pytest.mark.gpu]


COUNT, USED, LAYERS = 12, 3, 2
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_experts": COUNT,
    "num_experts_per_tok": USED,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
# The GPU computes everything, or everything that it holds.
FETCHED = ExpertCosts(cpu=1.0, gpu=1e-6, fetch=1e-6)
SHARED = ExpertCosts(cpu=1e-6, gpu=1e-7, fetch=1e-6)


@contextmanager
def placed(
    folder: Path,
    share: float,
    costs: ExpertCosts,
    *,
    device: str = "cuda",
    recorded: bool = True,
    tiny: str = "",
    ssd: float = 0.0,
    gpu_rows: int = 0,
) -> Iterator[Decoder]:
    """A mixture on a GPU, with room for a ``share`` of its experts: that of ``CONFIG``, or a
    ``tiny`` model. A share stays on the ``ssd``.
    """
    if not tiny:
        write_store(folder / "store", "Qwen3MoeForCausalLM", CONFIG, "int4-g32")
    elif not (folder / "store").exists():
        save_tiny(tiny, folder)
        quantized(folder)
    with closing(Model(folder / "store")) as model:
        names = [unit.name for unit in model.store.manifest.units]
        experts = [name for name in names if ".expert." in name]
        where = dict.fromkeys(names, Where.VRAM) | {"norm": Where.RAM, "embedding": Where.RAM}
        where |= dict.fromkeys(experts[round(share * len(experts)) :], Where.RAM)
        if ssd:
            where |= dict.fromkeys(experts[round((1 - ssd) * len(experts)) :], Where.SSD)
        options: dict[str, Any] = {"make": made(device, recorded=recorded), "expert_costs": costs}
        layers = model.store.config["num_hidden_layers"]
        plan = Placement(where=where, kv=("vram",) * layers, prefill_rows=1, gpu_rows=gpu_rows)
        with on_gpu(model, where, placement=plan, **options) as decoder:
            wait_for(lambda: bool(ssd) or all_in_ram(decoder))
            yield decoder


def fill(decoder: Decoder) -> None:
    """Copy experts that are in RAM to half of the slots: the same each time."""
    hybrid = stages(decoder)
    hybrid.fills, slots = False, hybrid.slots.cache
    for number in range(slots.capacity // 2):
        key = number % slots.layers, number // slots.layers
        seeds = itertools.count()
        while not hybrid.memory.pool(key[0]).holds(*key):
            extend(decoder, decoder.cache(200), tokens(2, seed=next(seeds), vocab=60))
        hybrid.copies.bring(*key)
    hybrid.settle()


def fill_all(decoder: Decoder) -> None:
    """Bring all experts to the GPU."""
    slots = stages(decoder).slots.cache
    while len(slots) < LAYERS * COUNT:
        extend(decoder, decoder.cache(200), tokens(40, seed=len(slots), vocab=60))
    stages(decoder).settle()


def talk(decoder: Decoder, cache: KVCache, count: int = 4) -> list[np.ndarray]:
    """Tokens, then passes of two."""
    seen = [extend(decoder, cache, [token]) for token in tokens(count, seed=5, vocab=60)]
    return [*seen, *(extend(decoder, cache, [token, 3]) for token in tokens(3, vocab=60))]


def replace_expert(hybrid: HybridExperts, number: int) -> None:
    """One on the GPU by another, the same in all decoders."""
    cache = hybrid.slots.cache
    absent = [key for key in np.ndindex(cache.layers, cache.count) if key not in cache]
    cache.drop(*cache.keys()[number % len(cache)])
    hybrid.copies.bring(*absent[number % len(absent)])
    hybrid.settle()


Between = Callable[[HybridExperts, int], None]


def told(
    folder: Path, device: str, *, between: Between, rows: int = 1, **options: Any
) -> list[np.ndarray]:
    """On the CPU step by step; on the GPU recorded."""
    with placed(
        folder, 0.2 if "ssd" in options else 0.5, SHARED, device=device, **options
    ) as decoder:
        fill(decoder)
        hybrid, cache, seen = stages(decoder), decoder.cache(200), list[np.ndarray]()
        for number in range(8):
            seen.append(extend(decoder, cache, tokens(rows, seed=number, vocab=60)))
            between(hybrid, number)
        return seen


def same_as_alone(folder: Path, between: Between = replace_expert, **options: Any) -> None:
    """What the stand-in GPU and the CPU compute at once is what they compute in turns."""
    wanted, seen = (
        told(folder, device, between=between, **options) for device in (AT_ONCE, "cuda")
    )
    assert all(map(np.array_equal, seen, wanted))
    assert all(np.isfinite(logits).all() for logits in seen)


@pytest.mark.parametrize("rows", [1, 3])
def test_same_logits(gpu: Kernels, tmp_path: Path, rows: int) -> None:
    """Experts come and go between passes."""
    same_as_alone(tmp_path, rows=rows)
    assert gpu.launches.count("replay") > 4


@pytest.mark.parametrize("tiny", ["", pytest.param("qwen3-next", marks=pytest.mark.slow)])
def test_lost_pass(
    gpu: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    """If the GPU has waited too long, the pass is computed again."""
    work, lost = RecordedLayers.__call__, list[float]()

    def late(layers: RecordedLayers, check: Any) -> None:
        if len(lost) < 2:
            lost.append(layers._layers[0].share.words.turn[0])
            time.sleep(0.3)
        work(layers, check)

    def begin_late(hybrid: HybridExperts, number: int) -> None:
        if number == 4:
            monkeypatch.setattr(RecordedLayers, "__call__", late)
            lost[:] = [0.0]

    same_as_alone(tmp_path, begin_late, tiny=tiny)
    assert len(lost) == 2


def test_cancelled_pass(gpu: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU is asked to stop while the GPU waits for it."""
    compute, cancelled = HybridExperts.compute_absent, list[int]()
    monkeypatch.setattr(NativeSharedLayers, "run", lambda self, first: first)  # step by step

    def cancel(experts: HybridExperts, layer: Any) -> None:
        if len(cancelled) == 1:
            cancelled.append(layer.routed.place)
            raise CancelledError("stop")
        compute(experts, layer)

    monkeypatch.setattr(HybridExperts, "compute_absent", cancel)
    with placed(tmp_path, 0.5, SHARED) as decoder:
        fill(decoder)
        cache = decoder.cache(200)
        wanted = talk(decoder, cache)
        cache.trim(0)
        cancelled.append(0)
        with pytest.raises(CancelledError):
            talk(decoder, cache)
        cache.trim(0)
        seen = talk(decoder, cache)
    assert all(map(np.array_equal, seen, wanted))


def test_experts_on_the_ssd(gpu: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read while the GPU waits."""
    arrived = list[int]()
    arrive = ExpertPool.arrive
    monkeypatch.setattr(
        ExpertPool, "arrive", lambda *args: (arrived.append(args[2]), arrive(*args))[1]
    )
    same_as_alone(tmp_path, lambda hybrid, number: None, ssd=0.4)
    assert arrived


def test_what_moves_is_not_recorded_again(gpu: Kernels, tmp_path: Path) -> None:
    """Experts that come and go are entries of the layers' tables."""
    with placed(tmp_path, 0.5, FETCHED) as decoder:
        fill(decoder)
        hybrid = stages(decoder)
        cache = decoder.cache(200)
        for token in tokens(3, vocab=60):
            extend(decoder, cache, [token])
        gpu.launches.clear()
        for number, token in enumerate(tokens(9, seed=1, vocab=60)):
            replace_expert(hybrid, number)
            extend(decoder, cache, [token])
        assert "record" not in gpu.launches
        assert gpu.launches.count("entries") == 9
        extend(decoder, cache, [1])  # writes the last entries
        gpu.launches.clear()
        extend(decoder, cache, [2])
    # Layers, and the head.
    assert gpu.launches == ["replay"] * 2


@pytest.mark.slow
def test_copies_of_a_failed_pass(
    gpu: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have begun, and nobody has waited for them."""
    compute, failing = HybridExperts._run_arrived, [False]
    rows = LEAST_GPU_ROWS
    failures, seen = list[int](), list[list[np.ndarray]]()

    def fail(stage: HybridExperts, turn: Any, arrivals: Any) -> None:
        if arrivals and failing[0]:
            failures.append(len(seen))
            raise CancelledError("stop")
        compute(stage, turn, arrivals)

    monkeypatch.setattr(HybridExperts, "_run_arrived", fail)
    for device in (AT_ONCE, "cuda"):
        with placed(tmp_path, 0.5, FETCHED, device=device, gpu_rows=rows) as decoder:
            cache, said = decoder.cache(200), list[np.ndarray]()
            for seed in range(4):
                for failing[0] in (True, False):
                    with suppress(CancelledError):
                        said.append(extend(decoder, cache, tokens(rows, seed=seed, vocab=60)))
                    cache.trim(0)
            seen.append(said)
    assert failures.count(0) == failures.count(1) > 2
    assert all(map(np.array_equal, *seen))


def test_memory_given_back(gpu: Kernels, tmp_path: Path) -> None:
    """Slots that are gone are not read: the CPU computes what was in them. Recorded passes find the
    experts where they are once the memory has returned.
    """
    with placed(tmp_path, 1.0, FETCHED) as decoder:
        assert decoder.weights.exact_rows == 1  # who computes an expert depends on earlier ones
        fill_all(decoder)
        memory = decoder.weights.memory
        hybrid, cache = stages(decoder), decoder.cache(200)
        before = decoder.weights.counts()
        whole = [extend(decoder, cache, [token]) for token in (1, 2, 3, 4)]
        assert decoder.weights.exact_rows == MOST_ROWS
        after = decoder.weights.counts()
        assert after.busy_s["cpu"] == before.busy_s["cpu"]
        # What a layer chose is counted in the next pass.
        assert after.expert_hits - before.expert_hits >= 3 * LAYERS * USED
        use, launches = memory.gpu_use, gpu.launches
        memory.set_gpu_budget(use.used - hybrid.reclaimable, "another model is used")
        cache.trim(0)
        again = [extend(decoder, cache, [token]) for token in (1, 2, 3, 4)]
        assert decoder.weights.counts().busy_s["cpu"] > after.busy_s["cpu"]
        memory.set_gpu_budget(PLENTY, "")
        assert memory.gpu_use.missing == 0
        cache.trim(0)
        launches.clear()
        last = [extend(decoder, cache, [token]) for token in (1, 2, 3, 4)]
        assert "replay" in launches
    assert all(relative_error(*pair) < 0.05 for pair in zip(again, whole, strict=True))
    assert all(map(np.array_equal, last, whole))
