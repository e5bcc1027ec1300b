"""Experts on a card and beside it, for ``scripts/gpu_check``.

First attention as mixtures have it, and a layer whose experts are all on the card
(``attention.py``, ``grouped.py``); then mixtures whose experts are in RAM, card and
CPU together on 8 GB of the GPU.

Random weights in the shapes of Qwen3-30B-A3B (int4) and gpt-oss-20b (MXFP4), decoded token by token
with made-up routing that repeats itself about as Qwen3-30B-A3B's does. The hybrid scheduler takes
turns with all absent experts on the CPU and with all of them copied to the card.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.random_store import RandomStore
from benchmarks.gpu.attention import check_mixture_attention
from benchmarks.gpu.configs import SMALLEST
from benchmarks.gpu.grouped import check_grouped
from benchmarks.gpu.offload import (
    Card,
    capped,
    measured_copies,
    names_at,
    opened,
    release,
    within_cap,
)
from benchmarks.gpu.timing import Result, guarded
from localrt.models.decoder import Decoder
from localrt.offload.experts.hybrid import HybridStage
from localrt.offload.experts.scheduler import (
    Assignment,
    ExpertCosts,
    Ready,
    schedule,
    split_misses,
)
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import ReadMode
from localrt.quant.ops.cuda.ops import CudaOps
from localrt.quant.ops.cuda.routing import on_card
from localrt.quant.ops.experts import RouterSpec, RouterWeights, Routing
from localrt.quant.ops.native.abi import find_library
from localrt.quant.ops.native.ops import NativeOps
from localrt.quant.ops.protocol import Batch

SCRATCH = 600 << 20


@dataclass(frozen=True)
class Size:
    """A model, the card's share of memory, turns of each way, and tokens of each turn."""

    config: Mapping[str, Any]
    format: str
    vram: int
    scratch: int = SCRATCH
    turns: int = 3
    tokens: int = 32


def _qwen3_moe(**config: Any) -> dict[str, Any]:
    return {
        "vocab_size": 32_768,  # of 151,936: the head is not what is looked at
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        **config,
    }


LARGE = {
    "Qwen3-30B-A3B": Size(
        _qwen3_moe(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        "int4-g32",
        8_000_000_000,
    ),
    "gpt-oss-20b shapes": Size(
        _qwen3_moe(
            hidden_size=2880,
            intermediate_size=2880,
            moe_intermediate_size=2880,
            num_hidden_layers=24,
            num_experts=32,
            num_experts_per_tok=4,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
        ),
        "mxfp4",
        8_000_000_000,
    ),
}
SMALL = {
    "small": Size(
        _qwen3_moe(
            **SMALLEST,
            moe_intermediate_size=64,
            num_hidden_layers=1,
            num_experts=8,
            num_experts_per_tok=2,
        ),
        "int4-g32",
        3_000_000,
        scratch=150_000,
        turns=1,
        tokens=2,
    )
}


def skewed_logits(
    layers: int, count: int, tokens: int, *, seed: int = 0
) -> npt.NDArray[np.float64]:
    """(tokens, layers, count) router logits: experts of unequal weight, and noise that lasts.

    With 8 of 128 experts 46 % of the choices repeat at the next token and 77 % within eight;
    published of Qwen3-30B-A3B are 45 % and 80 % (github.com/kekzl/imp, pull request 1359).
    """
    random = np.random.default_rng(seed)
    ranks = np.tile(np.arange(1, count + 1), (layers, 1))
    weights = -0.8 * np.log(random.permuted(ranks, axis=1))
    lasting = random.standard_normal((layers, count))
    logits = np.empty((tokens, layers, count))
    for token in range(tokens):
        fresh = random.standard_normal((layers, count))
        lasting = 0.95 * lasting + np.sqrt(1 - 0.95**2) * fresh
        logits[token] = weights + 3.0 * lasting + random.gumbel(size=(layers, count))
    return logits


class SkewedOps(CudaOps):
    """Routes by given (tokens, layers, count) logits: random routers send every row one way."""

    def __init__(self, logits: npt.NDArray[np.float64], used: int, *, device: str) -> None:
        super().__init__(device=device)
        self._experts = np.argsort(-logits, axis=-1)[..., : 2 * used].astype(np.int32)
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        self._scores = np.take_along_axis(shares, self._experts, -1).astype(np.float32)
        self._layer = 0

    def norm_route(self, x: Any, weights: RouterWeights, spec: RouterSpec) -> tuple[Any, Routing]:
        """At the cost of the real router, another's choice for a row."""
        normed, _ = super().norm_route(x, weights, spec)
        tokens, layers, _ = self._experts.shape
        token, layer = divmod(self._layer, layers)
        self._layer += 1
        token %= tokens
        experts, scores = self._experts[None, token, layer], self._scores[None, token, layer]
        chosen = scores[:, : spec.used]
        shares = chosen / chosen.sum(-1, keepdims=True)
        return normed, on_card(Routing(experts, scores, shares), normed.device)


def check_experts(device: str) -> list[Result]:
    """Kernels first, then each shape under each scheduler."""
    results = [*check_mixture_attention(device), *check_grouped(device)]
    for name, size in (LARGE if device.startswith("cuda") else SMALL).items():
        results += guarded(f"experts {name}", lambda n=name, s=size: [mixture(device, n, s)])
        release()
    return results


def mixture(device: str, name: str, size: Size) -> Result:
    """Decode under each scheduler, in turns, the slots of the card as they come to be."""
    if find_library() is None:
        raise RuntimeError("the CPU's kernels are missing: python3 setup.py build_ext --inplace")
    layers = size.config["num_hidden_layers"]
    turns = 2 + size.turns * len(WAYS)
    logits = skewed_logits(layers, size.config["num_experts"], turns * size.tokens)
    used = size.config["num_experts_per_tok"]
    host = NativeOps()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, capped(device, size.vram) as room:
        copies, link, memory = measured_copies(device)
        store = RandomStore("Qwen3MoeForCausalLM", size.config, size.format, Path(folder))
        placement = place(store, room - size.scratch)
        card = Card(SkewedOps(logits, used, device=device), copies, room)
        costs = costs_of(store, host, link, memory)
        mode = ReadMode(threads=4, block=1 << 20)
        with opened(store, placement, card, host, mode, costs) as decoder:
            loaded = time.perf_counter() - started
            values = compare(decoder, size)
    values |= {
        "weight_bytes": sum(unit.nbytes for unit in store.manifest.units),
        "expert_slots": len(names_at(placement, Where.VRAM)),
        "link_gb_s": link / 1e9,
        "load_s": loaded,
    }
    ok = bool(values["finite"]) & within_cap(device, values, size.vram, room)
    return Result(f"experts {name} {size.format} in 8 GB", ok, values=values)


def place(store: RandomStore, room: int) -> Placement:
    """What every row needs on the card, experts in what is left of ``room``, others in RAM."""
    units = [unit for unit in store.manifest.units if unit.name not in ("embedding", "norm")]
    experts = [unit for unit in units if ".expert." in unit.name]
    room -= sum(unit.nbytes for unit in units) - sum(unit.nbytes for unit in experts)
    where = {unit.name: Where.VRAM for unit in units}
    where |= {"norm": Where.RAM, "embedding": Where.RAM}
    kept = max(0, room // experts[0].nbytes)
    where |= {unit.name: Where.RAM for unit in experts[kept:]}
    kv = ("vram",) * store.decoder.layers
    return Placement(where=where, kv=kv, prefill_rows=1)  # type: ignore[arg-type]


def costs_of(store: RandomStore, host: NativeOps, link: float, memory: float) -> ExpertCosts:
    """What an expert takes here: the CPU measured on one of them, the card by its memory."""
    unit = next(unit for unit in store.manifest.units if ".expert." in unit.name)
    macs = sum(tensor.shape[0] * tensor.shape[1] for tensor in unit.tensors)
    data = np.random.default_rng(0).integers(0, 255, 256 << 20, dtype=np.uint8)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        host.read_all(data)
        seconds.append(time.perf_counter() - start)
    read = unit.nbytes * statistics.median(seconds) / data.nbytes
    return ExpertCosts(
        cpu=lambda rows: 5e-6 + max(1.15 * read, 2 * macs / 1e12 * rows),
        gpu=lambda rows: 1e-4 + max(unit.nbytes / memory, 2 * macs / 1e14 * rows),
        fetch=unit.nbytes / link,
        link_load=0.1,
    )


def fixed(
    rows: Any, resident: Any, costs: ExpertCosts, ready: Ready, *, copied: bool
) -> Assignment:
    """One rule for all absent experts: the CPU's, or copied to the card."""
    return split_misses(len(rows) if copied else 0, rows, resident, costs, ready)


WAYS: Mapping[str, Callable[..., Any]] = {
    "hybrid": schedule,
    "static": partial(fixed, copied=False),
    "streamed": partial(fixed, copied=True),
}


def compare(decoder: Decoder, size: Size) -> dict[str, Any]:
    """Median tokens per second of each way, and how busy CPU and card were in the hybrid's."""
    stages = decoder.residency.sparse["gpu"]
    assert isinstance(stages, HybridStage)
    cache = decoder.cache(4096)
    logits = np.zeros(1)

    def tokens(count: int) -> float:
        nonlocal logits
        start = time.perf_counter()
        for number in range(count):
            logits = decoder.forward(Batch.extend([(cache, [number % 50])]), rows=[0])
        return (time.perf_counter() - start) / count

    tokens(2 * size.tokens)  # fills the slots
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    values: dict[str, Any] = {}
    for _ in range(size.turns):
        for name, way in WAYS.items():
            stages.scheduler, stages.fills = way, name == "hybrid"
            before, began = decoder.residency.counts(), time.perf_counter()
            seconds[name].append(tokens(size.tokens))
            if name == "hybrid":
                after, wall = decoder.residency.counts(), time.perf_counter() - began
                uses = after.expert_uses - before.expert_uses
                values["hit_rate"] = (after.expert_hits - before.expert_hits) / uses
                for resource in ("cpu", "gpu", "link"):
                    busy = after.busy_s.get(resource, 0) - before.busy_s.get(resource, 0)
                    values[f"{resource}_busy"] = busy / wall
    rates = {name: 1 / statistics.median(found) for name, found in seconds.items()}
    values |= {f"{name}_tok_s": rate for name, rate in rates.items()}
    values["times_better_of_two"] = rates["hybrid"] / max(rates["static"], rates["streamed"])
    values["finite"] = bool(np.isfinite(logits).all())
    return values
