"""A replay of the pipeline's schedule under a placement: what a token takes, and where it waits.

Four resources, each doing one thing at a time: disk, link, CPU, GPU. A pass goes through its units
in order; reads and copies go in the same order, as far ahead as their ring has room, and wrap round
the model's end into the next token. An expert is fetched once its router has chosen; with
the router on a card, card and CPU share a layer's experts as the runtime's scheduler has it.
Since every queue is first in, first out, one walk over the units settles every time exactly. It
knows a placement and costs, not how either was found.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from localrt.offload.experts.assignment import Assignment, Ready, split_misses
from localrt.offload.experts.scheduler import schedule
from localrt.offload.placement import PlacedUnit, Placement, UnitKind, Where
from localrt.offload.planner.costs import Costs
from localrt.offload.planner.expert_costs import expert_costs
from localrt.offload.planner.ring_model import RingModel, Slot

__all__ = ["RESOURCES", "Resource", "SimulatedTask", "Simulation", "simulate"]

Resource = Literal["ssd", "link", "cpu", "gpu"]
RESOURCES: tuple[Resource, ...] = ("ssd", "link", "cpu", "gpu")

READ_CHUNK = 2 << 20
COPY_CHUNK = 8 << 20
_WAKE_S = 1.5e-4  # until a pass that waits goes on


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """One stretch of work in seconds from the first token's beginning; ``token`` counts from 0."""

    name: str
    kind: UnitKind | Literal["pass", "crossing", "kv"]
    resource: Resource
    start: float
    end: float
    token: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a steady pass takes: seconds, and bytes of each way.

    ``busy`` is each resource's work per pass, ``chain`` the computing and crossing that can only
    follow one another. ``waits`` is the time per pass that computing stood still, by what it waited
    for; ``full`` the time that disk or link waited for room. ``tasks`` are of the last passes.
    """

    seconds: float
    busy: Mapping[Resource, float]
    chain: float
    nbytes: Mapping[str, float]
    waits: Mapping[str, float]
    full: Mapping[str, float]
    tasks: tuple[SimulatedTask, ...] = ()
    total_seconds: float = 0.0

    @property
    def bound(self) -> float:
        """Seconds that no schedule of this placement can beat."""
        return max(self.busy["ssd"], self.busy["link"], self.chain)

    @property
    def efficiency(self) -> float:
        """The busiest resource's share of the time."""
        return max(self.busy.values()) / self.seconds if self.seconds else 1.0


@dataclass(slots=True)
class _State:
    ram: RingModel
    vram: RingModel
    disk_free: float = 0.0
    link_free: float = 0.0
    clock: float = 0.0  # the end of the latest computing
    on_gpu: bool = False
    router: float = 0.0  # the end of the latest unit that is no expert


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
    full: dict[str, float] = field(default_factory=lambda: {"ssd": 0.0, "link": 0.0})


def simulate(
    costs: Costs,
    placement: Placement,
    *,
    passes: int | None = None,
    warm_up: int = 3,
    keep_tasks: int = 0,
    seed: int = 0,
) -> Simulation:
    """Replay ``warm_up`` + ``passes`` passes; figures are means over the latter.

    ``keep_tasks`` is how many of the last passes to keep the tasks of. Experts are chosen at random
    with ``seed``, all equally often.
    """
    if passes is None:
        passes = 8 if costs.shape.experts else 4
    walk = _Walk(costs, placement, seed)
    state = _State(
        RingModel(placement.ram_ring, READ_CHUNK), RingModel(placement.vram_ring, COPY_CHUNK)
    )
    sums, before, tasks = _Sums(), 0.0, list[SimulatedTask]()
    total = warm_up + passes
    for token in range(total):
        if token == warm_up:
            sums, before = _Sums(), state.clock
        walk.one_pass(state, sums, token, tasks if token >= total - keep_tasks else None)
    busy = {name: value / passes for name, value in sums.busy.items()}
    chain = sums.chain / passes
    # Over a few passes a ring that was full at first looks like speed: no schedule beats the bound.
    seconds = max((state.clock - before) / passes, chain, *busy.values())
    return Simulation(
        seconds=seconds,
        busy=busy,
        chain=chain,
        nbytes={name: value / passes for name, value in sums.nbytes.items()},
        waits={name: value / passes for name, value in sums.waits.items()},
        full={name: value / passes for name, value in sums.full.items()},
        tasks=tuple(tasks),
        total_seconds=state.clock,
    )


def _reached(room: int) -> float:
    """The share of a disk's rate with ``room`` bytes in the ring beside the largest unit.

    Two requests are on their way at a time; where only one finds room, the disk rests in between.
    Measured: 9 % with room for one.
    """
    wanted = 3 * READ_CHUNK
    return 1.0 - 0.13 * max(0.0, 1.0 - room / wanted)


class _Walk:
    """One placement's units in order, and what each costs."""

    def __init__(self, costs: Costs, placement: Placement, seed: int) -> None:
        self.costs = costs
        self.where = placement.where
        self.kv = placement.kv
        self.random = random.Random(seed)
        self.bytes_s = costs.machine.ssd_bytes_s
        # What streams from the SSD, and how fast with the room that the ring leaves beside it.
        read = [u.nbytes for u in costs.shape.units if u.macs and placement.where[u.name].read]
        room = placement.ram_ring - max(read, default=0)
        self.read_bytes_s = self.bytes_s * _reached(room) if read else self.bytes_s
        self.link_bytes_s = costs.machine.link_bytes_s or 1.0
        self.expert_costs = expert_costs(costs)
        places = [placement.where[u.name] for u in costs.shape.units if u.kind == "expert"]
        kept, off = places.count(Where.VRAM), sum(place.read for place in places)
        self.in_vram = kept / len(places) if places else 0.0
        self.on_ssd = off / (len(places) - kept) if len(places) > kept else 0.0
        self.steps: list[list[PlacedUnit]] = []  # a unit, or a layer's experts
        for unit in costs.shape.units:
            if unit.kind == "embedding":
                continue
            last = self.steps[-1][0] if self.steps else unit
            if unit.kind == last.kind == "expert" and unit.layer == last.layer:
                self.steps[-1].append(unit)
            else:
                self.steps.append([unit])

    def one_pass(
        self, state: _State, sums: _Sums, token: int, tasks: list[SimulatedTask] | None
    ) -> None:
        """Advance ``state`` by one pass and add it to ``sums``."""
        begin = state.clock
        if state.on_gpu:
            begin = self._cross(state, sums, False, token, tasks)
        extra = self.costs.per_pass()
        state.clock = begin + extra
        sums.busy["cpu"] += extra
        sums.chain += extra
        _keep(tasks, SimulatedTask("sampling", "pass", "cpu", begin, state.clock, token))
        for step in self.steps:
            if step[0].kind == "expert" and state.on_gpu:
                self._shared(step, state, sums, token, tasks)
            elif step[0].kind == "expert":
                for unit, rows, where in self._chosen(step):
                    self._unit(unit, where, rows, state, sums, token, tasks)
            else:
                self._unit(step[0], self.where[step[0].name], None, state, sums, token, tasks)
                state.router = state.clock

    def _chosen(self, experts: list[PlacedUnit]) -> list[tuple[PlacedUnit, int, Where]]:
        """The experts that a pass touches, with the rows that each sees and where each is.

        Those in memory come first: they are computed while others are read.
        """
        count = len(experts)
        share, each = self.costs.touched(sum(unit.use for unit in experts) / count)
        chosen = self.random.sample(experts, max(1, round(count * share)))
        hits = self.costs.expert_hits
        if hits is None:
            places = [self.where[unit.name] for unit in chosen]
        else:
            places = [Where.RAM if self.random.random() < hits else Where.SSD for unit in chosen]
        found = [(unit, each, place) for unit, place in zip(chosen, places, strict=True)]
        return sorted(found, key=lambda item: item[2].read)

    def _shared(
        self,
        experts: list[PlacedUnit],
        state: _State,
        sums: _Sums,
        token: int,
        tasks: list[SimulatedTask] | None,
    ) -> None:
        """A layer's experts on the card and the CPU at once, as the scheduler divides them.

        What is on the card and in RAM is the caches' business: any expert, as often as there is
        room for it. What is in neither is read before the CPU computes it.
        """
        assert self.expert_costs is not None, "there is a card, and there are experts"
        chosen = self._chosen(experts)
        hits = self.costs.expert_hits
        on_card = [self.random.random() < (self.in_vram if hits is None else hits) for _ in chosen]
        way = self.costs.crossing()
        ready = Ready(cpu=way, cpu_back=way, link=max(0.0, state.link_free - state.clock))
        cost = self.expert_costs
        plan = schedule([rows for _, rows, _ in chosen], on_card, cost, ready)
        nbytes, begin = experts[0].nbytes, state.clock
        absent = [
            i
            for i in (*plan.cpu, *plan.fetch)
            if not on_card[i] and self.random.random() < self.on_ssd
        ]
        if absent:  # only what is in RAM can be copied: the CPU computes what is read
            plan, end = self._with_absent(chosen, plan, set(absent), ready)
            start = max(state.disk_free, begin)
            cpu = begin + end - ready.cpu_back
            for i in absent:
                start += nbytes / self.read_bytes_s
                cpu = max(cpu, start) + cost.cpu.at(chosen[i][1])
            state.disk_free = start
            sums.busy["ssd"] += len(absent) * nbytes / self.bytes_s
            sums.nbytes["ssd"] += len(absent) * nbytes
            computing = sum(cost.cpu.at(chosen[i][1]) for i in absent)
            sums.waits["ssd"] += max(0.0, cpu - (begin + end - ready.cpu_back) - computing)
            sums.chain += end + computing
            state.clock = max(begin + plan.gpu_end, cpu + ready.cpu_back)
        else:
            sums.chain += plan.end
            state.clock = begin + plan.end
        by_cpu = [i for i in plan.cpu if i not in absent] + absent
        cpu_s = sum(cost.cpu.at(chosen[i][1]) for i in by_cpu)
        gpu_s = sum(cost.gpu.at(chosen[i][1]) for i in plan.gpu)
        state.link_free = begin + plan.link_end if plan.fetch else state.link_free
        sums.busy["cpu"] += cpu_s
        sums.busy["gpu"] += gpu_s
        sums.busy["link"] += len(plan.fetch) * cost.fetch
        sums.nbytes["ram"] += len(by_cpu) * nbytes
        sums.nbytes["vram"] += len(plan.gpu) * nbytes
        sums.nbytes["link"] += len(plan.fetch) * nbytes
        name = f"layers.{experts[0].layer}.experts"
        for resource, seconds in (("cpu", cpu_s), ("gpu", gpu_s)):
            if seconds:
                task = SimulatedTask(
                    name, "expert", cast(Resource, resource), begin, begin + seconds, token, nbytes
                )
                _keep(tasks, task)

    def _with_absent(
        self,
        chosen: list[tuple[PlacedUnit, int, Where]],
        plan: Assignment,
        absent: set[int],
        ready: Ready,
    ) -> tuple[Assignment, float]:
        """``plan`` without the experts that are in no memory, and when its CPU's part ends."""
        assert self.expert_costs is not None, "see _shared"
        there = [i for i in range(len(chosen)) if i not in absent]
        held = [i in plan.gpu and i not in plan.fetch for i in there]
        fetched = [i for i in there if i in plan.fetch]
        work = split_misses(
            len(fetched), [chosen[i][1] for i in there], held, self.expert_costs, ready
        )
        end = work.cpu_end + ready.cpu_back if work.cpu else 2 * ready.cpu_back
        renumbered = replace(
            work,
            cpu=[there[i] for i in work.cpu],
            gpu=[there[i] for i in work.gpu],
            fetch=[there[i] for i in work.fetch],
        )
        return renumbered, end

    def _unit(
        self,
        unit: PlacedUnit,
        where: Where,
        rows: int | None,
        state: _State,
        sums: _Sums,
        token: int,
        tasks: list[SimulatedTask] | None,
    ) -> None:
        ready, slots = 0.0, list[tuple[RingModel, Slot]]()
        asked = state.router if unit.kind == "expert" else 0.0
        nbytes = unit.nbytes
        kv = 0
        attends = unit.layer if unit.kind == "attention" else None
        if attends is not None and self.kv[attends] == "ssd":
            kv = self.costs.kv_held(attends)
        if where.read or kv:
            ready = self._read(unit, where, kv, asked, state, sums, slots, token, tasks)
        if where.copied:
            ready = self._copy(unit, max(ready, asked), state, sums, slots, token, tasks)
        if unit.macs == 0:
            compute = 0.0
        else:
            compute = self.costs.compute(unit, on_gpu=where.on_gpu, rows=rows)
        crossed = state.clock
        if unit.macs and where.on_gpu != state.on_gpu:
            crossed = self._cross(state, sums, where.on_gpu, token, tasks)
        if slots:
            ready += _WAKE_S
        start = max(crossed, ready)
        if start > crossed:
            sums.waits["link" if where.copied else "ssd"] += start - crossed
        if where.read and not where.on_gpu:
            compute += self.costs.reading_load(nbytes)
        end = start + compute
        resource: Resource = "gpu" if where.on_gpu else "cpu"
        sums.busy[resource] += compute
        sums.chain += compute
        if unit.macs:
            sums.nbytes["vram" if where.on_gpu else "ram"] += nbytes
            _keep(tasks, SimulatedTask(unit.name, unit.kind, resource, start, end, token, nbytes))
        state.clock = end
        for ring, slot in slots:
            ring.release(slot, end)

    def _read(
        self,
        unit: PlacedUnit,
        where: Where,
        kv: int,
        asked: float,
        state: _State,
        sums: _Sums,
        slots: list[tuple[RingModel, Slot]],
        token: int,
        tasks: list[SimulatedTask] | None,
    ) -> float:
        """Read a unit, and a layer's keys and values where they live on the SSD.

        These go through two small buffers of their own: their reading begins with their turn.
        """
        end = 0.0
        if where.read:
            start = max(state.disk_free, asked)
            end = start + unit.nbytes / self.read_bytes_s
            if unit.kind != "expert" or where.copied:  # experts have slots of their own
                slot, start, end, idle = state.ram.load(unit.nbytes, start, self.read_bytes_s)
                sums.full["ssd"] += idle
                slots.append((state.ram, slot))
                # Where it waits for room in its middle, the wait is shown before it.
                start = max(start, end - unit.nbytes / self.read_bytes_s)
            task = SimulatedTask(unit.name, unit.kind, "ssd", start, end, token, unit.nbytes)
            self._read_done(state, sums, task, tasks)
        if kv:
            start = max(state.disk_free, state.clock)
            end = start + kv / self.bytes_s
            task = SimulatedTask(f"{unit.name} kv", "kv", "ssd", start, end, token, kv)
            self._read_done(state, sums, task, tasks)
        return end

    def _read_done(
        self, state: _State, sums: _Sums, task: SimulatedTask, tasks: list[SimulatedTask] | None
    ) -> None:
        state.disk_free = task.end
        sums.busy["ssd"] += task.nbytes / self.bytes_s
        sums.nbytes["ssd"] += task.nbytes
        _keep(tasks, task)

    def _copy(
        self,
        unit: PlacedUnit,
        ready: float,
        state: _State,
        sums: _Sums,
        slots: list[tuple[RingModel, Slot]],
        token: int,
        tasks: list[SimulatedTask] | None,
    ) -> float:
        """Copy a unit to the GPU. Its slot in RAM is free afterwards."""
        free = max(state.link_free, ready)
        slot, start, end, idle = state.vram.load(unit.nbytes, free, self.link_bytes_s)
        sums.full["link"] += idle
        state.link_free = end
        if slots:
            ring, read = slots.pop(0)
            ring.release(read, end)
        slots.append((state.vram, slot))
        seconds = unit.nbytes / self.link_bytes_s
        sums.busy["link"] += seconds
        sums.nbytes["link"] += unit.nbytes
        begin = max(start, end - seconds)
        _keep(tasks, SimulatedTask(unit.name, unit.kind, "link", begin, end, token, unit.nbytes))
        return end

    def _cross(
        self,
        state: _State,
        sums: _Sums,
        to_gpu: bool,
        token: int,
        tasks: list[SimulatedTask] | None,
    ) -> float:
        """Activations go to the other device."""
        seconds = self.costs.crossing()
        sums.waits["crossing"] += seconds
        sums.chain += seconds
        start, state.clock = state.clock, state.clock + seconds
        state.on_gpu = to_gpu
        resource: Resource = "gpu" if to_gpu else "cpu"
        _keep(tasks, SimulatedTask("activations", "crossing", resource, start, state.clock, token))
        return state.clock


def _keep(tasks: list[SimulatedTask] | None, task: SimulatedTask) -> None:
    if tasks is not None:
        tasks.append(task)
