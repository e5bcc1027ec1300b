"""Discrete-event simulation of a placement's pipeline: seconds per token, and causes of waits.

Disk, link, CPU and GPU each do one thing at a time. A pass goes through its units in order. Reads
and copies keep that order, run ahead as far as their ring has room (units are placed in it as
``offload/ring.py`` does), and continue with the next token's units. An expert is fetched once its
router has chosen it; with the router on a GPU, the GPU computes a layer's experts in VRAM, and the
CPU the others at the same time. Every queue is first in, first out, so one walk over the units
gives every time exactly. It knows a placement and costs, not how either was obtained.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from localrt.offload.placement import PlacedUnit, Placement, Where
from localrt.offload.ring import (
    COPY_BLOCK,
    RingSpan,
    UnitChunk,
    chunks,
    fixed_places,
    newest,
    place,
)
from localrt.planning.costs import READ_CHUNK, RESOURCES, Costs, PassTime, Resource, disk_share


@dataclass(slots=True)
class RingSlot(RingSpan):
    """A unit's slot in a ring; ``release`` is the time when it is freed, known once the unit has
    been used.
    """

    release: float = float("inf")


class RingModel:
    """A ring of ``nbytes``; units load in chunks of ``chunk`` bytes, each as soon as it fits."""

    def __init__(self, nbytes: int, chunk: int) -> None:
        self.nbytes = nbytes
        self._chunk = chunk
        self._live: deque[RingSlot] = deque()
        self._cut: dict[tuple[int, int], list[UnitChunk]] = {}  # by (unit bytes, first bytes)
        self._next = 0

    def load(
        self, nbytes: int, free: float, bytes_s: float, at: int | None = None
    ) -> tuple[RingSlot, float]:
        """Load a unit over a resource that is free at ``free``; return slot and end time.

        ``at`` is its offset, if fixed.
        """
        while self._live and self._live[0].release <= free:
            self._live.popleft()
        slot, pieces = self._place(nbytes, at)
        clock = free
        if self._live and (ready := self._ready(slot, pieces[0])) > free:
            # A load that waits until the ring is empty starts at offset 0.
            if ready >= self._live[-1].release:
                self._live.clear()
                slot, pieces = self._place(nbytes, at)
            clock = ready
        if self._live:
            for chunk in pieces:
                clock = max(clock, self._ready(slot, chunk)) + chunk.nbytes / bytes_s
        else:
            clock += nbytes / bytes_s
        stop = slot.offset + nbytes
        self._next = stop if stop < self.nbytes else 0
        self._live.append(slot)
        return slot, clock

    def release(self, slot: RingSlot, time: float) -> None:
        """Free a slot at ``time``, but not before older slots, since slots are freed in order."""
        slot.release = time
        for older in self._live:
            if older is slot:
                break
            slot.release = max(slot.release, older.release)

    def _place(self, nbytes: int, at: int | None) -> tuple[RingSlot, list[UnitChunk]]:
        if nbytes > self.nbytes:
            raise ValueError(f"a unit of {nbytes} bytes does not fit a ring of {self.nbytes}")
        if not self._live:
            self._next = 0
        offset, first = place(nbytes, self.nbytes, self._live, at=self._next, fixed=at)
        slot = RingSlot(offset, nbytes)
        if not newest(self._live, offset, offset + nbytes):
            return slot, [UnitChunk(0, nbytes)]
        if (nbytes, first) not in self._cut:
            self._cut[nbytes, first] = chunks(nbytes, self._chunk, first=first)
        return slot, self._cut[nbytes, first]

    def _ready(self, slot: RingSlot, chunk: UnitChunk) -> float:
        """Return the time when the bytes of a chunk are free."""
        start = slot.offset + chunk.start
        stop = start + chunk.nbytes
        ready = 0.0
        for other in self._live:
            if other.release > ready and other.overlaps(start, stop):
                ready = other.release
        return ready


_WAKE_S = 1.5e-4  # wake-up time of a pass that waits for a disk; only the GPU waits for copies


@dataclass(slots=True)
class _Sums:
    busy: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    chain: float = 0.0
    nbytes: dict[str, float] = field(
        default_factory=lambda: {"ssd": 0.0, "link": 0.0, "ram": 0.0, "vram": 0.0}
    )
    waits: dict[str, float] = field(
        default_factory=lambda: {"ssd": 0.0, "link": 0.0, "crossing": 0.0}
    )


def simulate(
    costs: Costs, placement: Placement, *, passes: int | None = None, warm_up: int = 3
) -> PassTime:
    """Replay ``warm_up`` + ``passes`` passes; results are means over the latter.

    Experts are chosen at random with equal probability; every replay has the same choices.
    """
    if passes is None:
        passes = 8 if costs.shape.experts else 4
    replay, before = _Replay(costs, placement), 0.0
    for token in range(warm_up + passes):
        if token == warm_up:
            replay.sums, before = _Sums(), replay.clock
        replay.one_pass()
    sums = replay.sums
    busy = {name: value / passes for name, value in sums.busy.items()}
    chain = sums.chain / passes
    # A ring that was full at the start makes a few passes look too fast: apply the lower bound.
    seconds = max((replay.clock - before) / passes, chain, *busy.values())
    return PassTime(
        seconds=seconds,
        busy=busy,
        chain=chain,
        nbytes={name: value / passes for name, value in sums.nbytes.items()},
        waits={name: value / passes for name, value in sums.waits.items()},
        total_seconds=replay.clock,
    )


class _Replay:
    """Replays passes of one placement. Times are seconds from the start of the first token."""

    def __init__(self, costs: Costs, placement: Placement) -> None:
        self.costs = costs = costs.of(placement)
        self.where = placement.on(costs.rows)
        self.crossing = placement.crosses(costs.rows)
        self.kv = placement.kv
        self.random = random.Random(0)
        self.bytes_s = costs.machine.ssd_bytes_s
        # The disk's rate depends on the ring's room besides the largest unit read from the SSD.
        read = [u.nbytes for u in costs.shape.units if u.macs and placement.where[u.name].read]
        room = placement.ram_ring - max(read, default=0)
        self.read_bytes_s = self.bytes_s * disk_share(room) if read else self.bytes_s
        self.link_bytes_s = costs.link_bytes_s or 1.0
        self.touched: dict[str, tuple[int, int]] = {}  # by layer: experts, and rows of each
        places = [placement.where[unit.name] for unit in costs.shape.routed]
        kept, off = places.count(Where.VRAM), sum(place.read for place in places)
        self.in_vram = kept / len(places) if places else 0.0
        self.on_ssd = off / (len(places) - kept) if len(places) > kept else 0.0
        self.ram = RingModel(placement.ram_ring, READ_CHUNK)
        self.vram = RingModel(placement.vram_ring, COPY_BLOCK)
        copied = [u for step in costs.shape.steps for u in step if self.where[u.name].copied]
        dense = {unit.name: unit.nbytes for unit in copied if unit.kind != "expert"}
        at = fixed_places(list(dense.values()), placement.vram_ring)
        self.places = dict(zip(dense, at, strict=True))  # offsets in the GPU's ring
        # Copies and the CPU slow each other down, in proportion to their work in the previous pass.
        link, cpu = costs.beside()
        self.losses = {"link": 1 / link - 1, "cpu": 1 / cpu - 1}
        self.times = {"link": 1.0, "cpu": 1.0}
        self.worked = {"link": 0.0, "cpu": 0.0}
        self.disk_free = self.link_free = 0.0
        self.clock = 0.0  # end of the latest computation
        self.on_gpu = False
        self.router = 0.0  # the end of the latest unit other than an expert
        self.pieces = -1, 0.0  # the latest split MLP's layer and start time
        self.asked = 0.0  # time from which copies for the next layer's experts may begin
        self.sums = _Sums()

    def one_pass(self) -> None:
        """Replay one pass through all units."""
        begin, self.worked = self.clock, {"link": 0.0, "cpu": 0.0}
        self.pieces = -1, 0.0
        if self.on_gpu:
            self._cross(self.costs.crossing())
        extra = self.costs.per_pass()
        self.clock += extra
        self.sums.busy["cpu"] += extra
        self.sums.chain += extra
        for step in self.costs.shape.steps:
            if step[0].kind == "expert" and self.on_gpu:
                self._shared(step)
            elif step[0].kind == "expert":
                for unit, rows, where in self._chosen(step):
                    self._unit(unit, where, rows)
            elif step[0].only is self.where[step[0].name] is Where.RAM:
                self._beside(step[0])
            else:
                self._unit(step[0], self.where[step[0].name])
                self.router = self.clock
        took, worked = self.clock - begin, self.worked
        for name, other in (("link", "cpu"), ("cpu", "link")):
            self.times[name] = 1 + self.losses[name] * min(1.0, worked[other] / took)

    def _chosen(self, experts: Sequence[PlacedUnit]) -> list[tuple[PlacedUnit, int, Where]]:
        """Choose the experts that a pass uses; return each with its rows and place.

        Experts in memory come first: they are computed while others are read.
        """
        chosen, each = self._touched(experts)
        hits = self.costs.expert_hits
        if hits is None:
            places = [self.where[unit.name] for unit in chosen]
        else:
            places = [Where.RAM if self.random.random() < hits else Where.SSD for unit in chosen]
        found = [(unit, each, place) for unit, place in zip(chosen, places, strict=True)]
        return sorted(found, key=lambda item: item[2].read)

    def _touched(self, experts: Sequence[PlacedUnit]) -> tuple[list[PlacedUnit], int]:
        """Choose the experts of a layer that a pass uses; return them and the rows of each."""
        name = experts[0].name
        if name not in self.touched:
            count = len(experts)
            share, each = self.costs.touched(sum(unit.use for unit in experts) / count)
            self.touched[name] = max(1, round(count * share)), each
        wanted, each = self.touched[name]
        return self.random.sample(experts, wanted), each

    def _shared(self, experts: Sequence[PlacedUnit]) -> None:
        """Compute a layer's experts on GPU and CPU at once: those in VRAM, and the others. In a
        pass of many rows those in RAM are copied instead, beginning during the previous layer.

        Caches decide which experts are on the GPU and in RAM, so each is there with a probability
        given by the available room. Others are read before the CPU computes them. All have equal
        rows, so only the number of experts of each kind matters.
        """
        costs, sums, unit, draw = self.costs, self.sums, experts[0], self.random.random
        chosen, rows = self._touched(experts)
        hits = costs.expert_hits
        kept = self.in_vram if hits is None else hits
        held = sum(draw() < kept for _ in chosen)
        missing = len(chosen) - held
        read = sum(draw() < self.on_ssd for _ in range(missing))
        copied = missing - read if self.crossing else 0
        by_gpu, by_cpu = held + copied, missing - copied
        # Even without experts to compute, the host waits for the routing.
        waits = kept < 1 and not self.crossing
        way = costs.crossing() if waits or by_cpu else 0.0
        begin, back, gpu_s = self.clock, way if by_cpu else 0.0, costs.gpu(unit, rows)
        known = begin + way + (costs.sharing_experts(unit) if waits else 0.0)
        gpu = begin + held * gpu_s
        if copied:
            copying = copied * costs.copy(unit.nbytes)
            self.worked["link"] += copying
            copying *= self.times["link"]
            self.link_free = max(self.link_free, self.asked) + copying
            gpu = max(gpu, self.link_free) + copied * gpu_s
            sums.busy["link"] += copying
            sums.nbytes["link"] += copied * unit.nbytes
        self.asked = begin
        cpu_s = costs.cpu(unit, rows)
        self.worked["cpu"] += by_cpu * cpu_s
        cpu_s *= self.times["cpu"]
        computed = known + by_cpu * cpu_s
        cpu = known + (by_cpu - read) * cpu_s
        for _ in range(read):
            arrived = max(self.disk_free, begin) + unit.nbytes / self.read_bytes_s
            self._read_done(arrived, unit.nbytes)
            cpu = max(cpu, arrived) + cpu_s
        sums.waits["ssd"] += cpu - computed
        sums.chain += max(gpu, computed + back) - begin
        self.clock = max(gpu, cpu + back)
        sums.busy["cpu"] += by_cpu * cpu_s
        sums.busy["gpu"] += by_gpu * gpu_s
        sums.nbytes["ram"] += by_cpu * unit.nbytes
        sums.nbytes["vram"] += by_gpu * unit.nbytes

    def _unit(self, unit: PlacedUnit, where: Where, rows: int | None = None) -> None:
        """Read, copy and compute a unit; ``rows`` if an expert has fewer than the pass."""
        sums, ready = self.sums, 0.0
        slot: tuple[RingModel, RingSlot] | None = None  # the latest slot of the unit
        asked = self.router if unit.kind == "expert" else 0.0
        if where.read:
            slot, ready = self._read(unit, where, asked)
        if unit.kind == "attention" and unit.layer is not None and self.kv[unit.layer] == "ssd":
            ready = self._read_kv(self.costs.kv_held(unit.layer), ready)
        if where.copied:
            slot, ready = self._copy(unit, max(ready, asked), slot)
        if unit.macs and where.on_gpu != self.on_gpu:
            self._cross(self.costs.crossing() + (0.0 if where.on_gpu else self.costs.visit()))
        if slot is not None and not where.copied:
            ready += _WAKE_S
        start = max(self.clock, ready)
        if start > self.clock:
            sums.waits["link" if where.copied else "ssd"] += start - self.clock
        if unit.only is not None and self.pieces[0] != unit.layer:
            self.pieces = -1 if unit.layer is None else unit.layer, start
        compute = self.costs.compute(unit, on_gpu=where.on_gpu, rows=rows) if unit.macs else 0.0
        if not where.on_gpu:
            self.worked["cpu"] += compute
            compute *= self.times["cpu"]
            if where.read:
                compute += self.costs.reading_load(unit.nbytes)
        if where.copied and where.on_gpu and unit.kind != "expert":
            compute += self.costs.streaming(unit)
        self.clock = start + compute
        resource: Resource = "gpu" if where.on_gpu else "cpu"
        sums.busy[resource] += compute
        sums.chain += compute
        if unit.macs:
            sums.nbytes["vram" if where.on_gpu else "ram"] += unit.nbytes
        if slot is not None:
            slot[0].release(slot[1], self.clock)

    def _beside(self, unit: PlacedUnit) -> None:
        """Compute the CPU's piece of an MLP, starting when the GPU started its own. If the GPU ends
        later, its next work is already queued.
        """
        _, began = self.pieces
        host, cpu = self.costs.splitting(), self.costs.cpu(unit)
        self.worked["cpu"] += cpu
        cpu *= self.times["cpu"]
        end = max(self.clock, began + cpu + host)
        self.sums.busy["cpu"] += cpu + host
        self.sums.nbytes["ram"] += unit.nbytes
        self.sums.chain += end - self.clock
        self.clock = end

    def _read(
        self, unit: PlacedUnit, where: Where, earliest: float
    ) -> tuple[tuple[RingModel, RingSlot] | None, float]:
        """Read a unit; return its ring slot, if any, and when it is in memory."""
        slot, start = None, max(self.disk_free, earliest)
        end = start + unit.nbytes / self.read_bytes_s
        if unit.kind != "expert" or where.copied:  # experts have separate slots
            placed, end = self.ram.load(unit.nbytes, start, self.read_bytes_s)
            slot = self.ram, placed
        self._read_done(end, unit.nbytes)
        return slot, end

    def _read_kv(self, nbytes: int, ready: float) -> float:
        """Read a layer's KV cache through its own two small buffers, not ahead of the layer's
        computing. Return when it is in memory.
        """
        if not nbytes:
            return ready
        end = max(self.disk_free, self.clock) + nbytes / self.bytes_s
        self._read_done(end, nbytes)
        return end

    def _read_done(self, end: float, nbytes: int) -> None:
        self.disk_free = end
        self.sums.busy["ssd"] += nbytes / self.bytes_s
        self.sums.nbytes["ssd"] += nbytes

    def _copy(
        self, unit: PlacedUnit, ready: float, read: tuple[RingModel, RingSlot] | None
    ) -> tuple[tuple[RingModel, RingSlot], float]:
        """Copy a unit to the GPU, and free its slot in RAM; returns as ``_read``."""
        free, bytes_s = max(self.link_free, ready), self.link_bytes_s / self.times["link"]
        slot, end = self.vram.load(unit.nbytes, free, bytes_s, self.places.get(unit.name))
        self.link_free = end
        if read is not None:
            read[0].release(read[1], end)
        self.worked["link"] += unit.nbytes / self.link_bytes_s
        self.sums.busy["link"] += unit.nbytes / bytes_s
        self.sums.nbytes["link"] += unit.nbytes
        return (self.vram, slot), end

    def _cross(self, seconds: float) -> None:
        """Move the activations to the other device."""
        self.clock += seconds
        self.on_gpu = not self.on_gpu
        self.sums.waits["crossing"] += seconds
        self.sums.chain += seconds
