"""A model much larger than the card: the pipeline on an 8 GB share of the GPU.

14 GB of packed weights in the shapes of a real 24B model: what fits stays in VRAM, the rest crosses
the link from pinned RAM in each token, a little of it comes from the SSD. What the link carries is
held against plain pinned copies, and the speed against Accelerate's CPU offload of the same layers.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common.random_store import RandomStore
from benchmarks.gpu.configs import SMALLEST
from benchmarks.gpu.timing import Result, guarded, timed
from localrt.errors import CancelledError
from localrt.models.decoder import Decoder
from localrt.offload.cards.clock import WallClock
from localrt.offload.cards.cuda import CudaAccelerator
from localrt.offload.pipeline.opening import open_pipeline
from localrt.offload.pipeline.setup import Devices
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import ReadMode
from localrt.offload.reading.loading import Reading
from localrt.quant.ops.cuda.cuda_memory import CudaCopies
from localrt.quant.ops.cuda.ops import CudaOps
from localrt.quant.ops.protocol import Batch
from localrt.quant.ops.torch.ops import TorchOps


@dataclass(frozen=True)
class Size:
    """What is run: a model, the card's share, passes at most."""

    config: Mapping[str, Any]
    vram: int
    scratch: int  # activations, kernels' own, and what the allocator rounds up
    passes: int
    peer_layers: int


# Mistral Small 24B, with as many layers as make 14 GB.
LARGE = Size(
    config={
        "vocab_size": 131_072,
        "hidden_size": 5120,
        "intermediate_size": 32_768,
        "num_hidden_layers": 43,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
        "tie_word_embeddings": False,
    },
    vram=8_000_000_000,
    scratch=600 << 20,
    passes=20,
    peer_layers=6,
)
SMALL = Size(
    config={**LARGE.config, **SMALLEST, "num_hidden_layers": 3},
    vram=2_500_000,
    scratch=150_000,
    passes=1,
    peer_layers=1,
)
FORMAT = "int4-g32"
WARM_UP, SECONDS = 2, 60.0  # passes, and the most that all may take
RING_UNITS = 3
ON_DISK = 3  # attention units: few enough that no disk is what is waited for


def check_offload(device: str) -> list[Result]:
    """The pipeline, then its peer on the same layers, which needs the memory that is free then."""
    size = LARGE if device.startswith("cuda") else SMALL
    results = guarded("offload", lambda: [pipeline(device, size)])
    release()
    ours = results[0].values.get("s_per_token")
    layers = size.config["num_hidden_layers"]
    results += guarded("offload peer", lambda: [peer(device, size, ours and ours / layers)])
    release()
    return results


def release() -> None:
    """Give the card's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def place(store: RandomStore, room: int) -> Placement:
    """``room`` bytes of the card for units and the ring: heads, then layers evenly spread."""
    units = [unit for unit in store.manifest.units if unit.name not in ("embedding", "norm")]
    layers = [unit for unit in units if unit.name.startswith("layers")]
    ring = RING_UNITS * max(unit.nbytes for unit in layers)
    room -= ring + sum(unit.nbytes for unit in units) - sum(unit.nbytes for unit in layers)
    share = max(0.0, room / sum(unit.nbytes for unit in layers))
    where = {unit.name: Where.VRAM for unit in units} | {"norm": Where.RAM, "embedding": Where.SSD}
    kept, seen, on_disk = 0, 0, ON_DISK
    for unit in layers:
        seen += unit.nbytes
        if kept + unit.nbytes <= share * seen:
            kept += unit.nbytes
        elif on_disk and unit.name.endswith("attention"):
            where[unit.name] = Where.SSD_LINK
            on_disk -= 1
        else:
            where[unit.name] = Where.LINK
    read = [unit.nbytes for unit in layers if where[unit.name].read]
    kv = ("vram",) * store.decoder.layers
    ring_bytes = 2 * max(read, default=0)
    # Tokens are decoded one by one.
    return Placement(where=where, kv=kv, ram_ring=ring_bytes, vram_ring=ring, prefill_rows=1)  # type: ignore[arg-type]


@contextmanager
def capped(device: str, nbytes: int) -> Iterator[int]:
    """At most ``nbytes`` of the card for torch and CUDA's context; yields torch's part."""
    if not device.startswith("cuda"):
        yield nbytes
        return
    torch.cuda.init()
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info()
    context = max(0, total - free - torch.cuda.memory_reserved())
    # Other programs' memory looks like the context's: no context is larger than this.
    room = nbytes - min(context, 1 << 30)
    torch.cuda.set_per_process_memory_fraction(room / total)
    torch.cuda.reset_peak_memory_stats()
    try:
        yield room
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measured_copies(device: str) -> tuple[CudaCopies, float, float]:
    """Copies to and from the card; bytes per second of the link, and of the card's memory."""
    copies = CudaCopies(device=device)
    link, memory = copies.measure()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    return copies, link, memory


@dataclass(frozen=True)
class Card:
    """The share of the GPU that a pipeline gets."""

    ops: CudaOps
    copies: CudaCopies
    capacity: int


@contextmanager
def opened(
    store: RandomStore,
    placement: Placement,
    card: Card,
    host: Any,
    mode: ReadMode,
    costs: Any = None,
) -> Iterator[Decoder]:
    """The pipeline of a random store, on the wall's clock."""
    clock = WallClock()
    devices = Devices(
        ops=host,
        clock=clock,
        card=CudaAccelerator(clock, card.ops, card.copies, capacity=card.capacity),
        expert_costs=costs,
    )
    reading = Reading(mode=mode, files=store, verify=False)
    like_a_store: Any = store
    streamed = open_pipeline(
        like_a_store, store.decoder, placement, devices, reading, budget=1 << 60
    )
    decoder = Decoder(streamed)
    try:
        yield decoder
    finally:
        decoder.close()


def within_cap(device: str, values: dict[str, Any], cap: int, room: int) -> bool:
    """Whether torch and CUDA's context stayed below ``cap``; adds the numbers to ``values``."""
    if not device.startswith("cuda"):
        return True
    reserved, context = torch.cuda.max_memory_reserved(), cap - room
    values |= {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": reserved,
        "context_bytes": context,
        "cap_bytes": cap,
    }
    return reserved + context < cap


def names_at(placement: Placement, where: Where) -> list[str]:
    """The units at a place, in order."""
    return [name for name, place in placement.where.items() if place is where]


def pipeline(device: str, size: Size) -> Result:
    """Decode passes through ``open_pipeline``."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, capped(device, size.vram) as room:
        copies, plain, _ = measured_copies(device)
        store = RandomStore("MistralForCausalLM", size.config, FORMAT, Path(folder))
        placement = place(store, room - size.scratch)
        store.put_on_disk(names_at(placement, Where.SSD_LINK))
        card = Card(CudaOps(device=device), copies, room)
        host = TorchOps(compute_format="f32", device="cpu")
        mode = ReadMode(direct=True, threads=4, block=1 << 20)
        with opened(store, placement, card, host, mode) as decoder:
            loaded = time.perf_counter() - started
            values = decode(decoder, size)
    within = within_cap(device, values, size.vram, room)
    logits = values.pop("logits")
    release()
    if not device.startswith("cuda") or torch.cuda.mem_get_info()[0] > 2 * store.nbytes:
        values["as_resident_bit_for_bit"] = np.array_equal(
            logits, resident_logits(size, device, len(logits))
        )
    sizes = {unit.name: unit.nbytes for unit in store.manifest.units}
    total = sum(sizes.values())
    on_card, over_link, from_disk = (
        sum(sizes[name] for name in names_at(placement, where))
        for where in (Where.VRAM, Where.LINK, Where.SSD_LINK)
    )
    values |= {
        "weight_bytes": total,
        "resident_bytes": on_card,
        "ram_bytes": over_link,
        "ssd_bytes": from_disk,
        "link_gb_s": values.pop("link_bytes_s") / 1e9,
        "pinned_copy_gb_s": plain / 1e9,
        "load_s": loaded,
    }
    values["share_of_pinned_copy"] = values["link_gb_s"] / values["pinned_copy_gb_s"]
    ok = bool(values["finite"]) & within & values.get("as_resident_bit_for_bit", True)
    return Result("offload 24B int4 in 8 GB", ok, values=values)


def resident_logits(size: Size, device: str, count: int) -> np.ndarray:
    """The same tokens' with all weights on the card: what nothing can overtake."""
    store = RandomStore("MistralForCausalLM", size.config, FORMAT, Path())
    where = {unit.name: Where.VRAM for unit in store.manifest.units}
    where |= {"norm": Where.RAM, "embedding": Where.RAM}
    kv = ("vram",) * store.decoder.layers
    placement = Placement(where=where, kv=kv, prefill_rows=1)  # type: ignore[arg-type]
    card = Card(CudaOps(device=device), CudaCopies(device=device), 2 * store.nbytes + (1 << 30))
    host = TorchOps(compute_format="f32", device="cpu")
    with opened(store, placement, card, host, ReadMode(threads=4, block=1 << 20)) as decoder:
        cache = decoder.cache(256)
        tokens = (Batch.extend([(cache, [number % 50])]) for number in range(count))
        return np.concatenate([decoder.forward(batch, rows=[0]) for batch in tokens])


def decode(decoder: Decoder, size: Size) -> dict[str, Any]:
    """Tokens one by one until there are enough, or the time is up."""
    cache = decoder.cache(256)
    end = time.perf_counter() + SECONDS

    def check() -> None:
        if time.perf_counter() > end:
            raise CancelledError("the time is up")

    found: list[np.ndarray] = []
    seconds: list[float] = []
    totals = decoder.residency.counts()
    for number in range(WARM_UP + size.passes):
        if number == WARM_UP:
            totals = decoder.residency.counts()
        start = time.perf_counter()
        try:
            found += [
                decoder.forward(Batch.extend([(cache, [number % 50])]), rows=[0], check=check)
            ]
        except CancelledError:
            break
        seconds.append(time.perf_counter() - start)
    counts, wall = decoder.residency.counts(), sum(seconds[WARM_UP:])
    if not wall:
        raise TimeoutError(f"fewer than {WARM_UP + 1} passes in {SECONDS} seconds")
    busy = {
        f"{name}_busy": (value - totals.busy_s.get(name, 0.0)) / wall
        for name, value in counts.busy_s.items()
    }
    logits = np.concatenate(found)
    return {
        "finite": bool(np.isfinite(logits).all()),
        "logits": logits,
        "tok_s": len(seconds[WARM_UP:]) / wall,
        "s_per_token": statistics.median(seconds[WARM_UP:]),
        "passes": len(seconds[WARM_UP:]),
        "link_bytes_s": (counts.link_bytes - totals.link_bytes) / wall,
        **busy,
    }


# -- the peer --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The matrices of a layer in bf16, and no more work than they are."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
        queries, keys = (head * config[f"num_{k}_heads"] for k in ("attention", "key_value"))
        shapes = {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        for name, (rows, columns) in shapes.items():
            linear = nn.utils.skip_init(nn.Linear, columns, rows, bias=False, dtype=torch.bfloat16)
            linear.weight.data.fill_(1e-3)
            linear.weight.requires_grad_(False)
            self.add_module(name, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.k(x).sum() + self.v(x).sum()
        x = x + self.o(self.q(x)) + 0 * keys
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def peer(device: str, size: Size, ours: float | None) -> Result:
    """Seconds per layer of Accelerate's CPU offload."""
    try:
        from accelerate import cpu_offload
    except ImportError:
        skipped = "accelerate is not installed"
        return Result("offload peer in bf16", True, values={"skipped": skipped})
    layers = nn.Sequential(*(Layer(size.config) for _ in range(size.peer_layers)))
    nbytes = sum(p.numel() * p.element_size() for p in layers.parameters())
    x = torch.full((1, size.config["hidden_size"]), 1e-3, dtype=torch.bfloat16, device=device)
    run = cpu_offload(layers, execution_device=torch.device(device))
    with torch.inference_mode():
        run(x)
        seconds = statistics.median(timed(lambda: run(x)) for _ in range(3))
    values: dict[str, Any] = {
        "peer": "accelerate",
        "layers": size.peer_layers,
        "bf16_bytes": nbytes,
        "s_per_layer": seconds / size.peer_layers,
        "gb_s": nbytes / seconds / 1e9,
    }
    if ours is not None:
        values["ours_s_per_layer"] = ours
        values["times_faster"] = values["s_per_layer"] / ours
    return Result("offload peer in bf16", True, values=values)
