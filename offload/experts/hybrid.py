"""Runs a sparse layer on GPU and CPU at once: each expert where it is finished first.

The router runs on the GPU, and experts in its slots are started there before the host knows which
were chosen. The host waits once, for the choice and the rows. Of the other experts some are copied
over the link while the CPU computes the rest, as the scheduler decides by cost. Slots are combined
on the GPU in the order of k: so the order of finishing has no effect. Experts in neither memory are
read from the SSD and computed by the CPU. A layer whose experts are all on the GPU waits for
nothing.

A long pass needs nearly all experts of every layer: those in RAM are copied one after another,
followed by the next layer's, and computed in one launch when they have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from localrt.models.layers.moe import Routed, RoutingWatch
from localrt.models.layers.parts import Check, PassState
from localrt.offload.device.gpu import Clock, Event
from localrt.offload.experts.cache import Demand, Key
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.pool import Demanded, GpuSlots
from localrt.offload.experts.scheduler import (
    Assignment,
    ExpertCosts,
    Ready,
    schedule,
)
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Ops

_HELD_SHARE = 4  # copies ahead may hold one in so many of the RAM's slots

Scheduler = Callable[..., Assignment]


class HybridExperts:
    """Runs the sparse layers whose router is on the GPU of ``slots``. See ``Experts``.

    ``memory`` holds experts for the CPU, whose ``Ops`` are ``host``; ``costs`` are seconds of an
    expert. In passes of ``gpu_rows`` rows or more (0: in none) the GPU computes all experts in RAM
    or VRAM. ``scheduler``, and whether an idle link ``fills`` slots, may be changed between passes.
    """

    capturable = False

    def __init__(
        self,
        slots: GpuSlots,
        memory: ExpertMemory,
        host: Ops,
        clock: Clock,
        costs: ExpertCosts,
        *,
        gpu_rows: int = 0,
    ) -> None:
        self.watch: RoutingWatch | None = None
        self.slots, self.memory = slots, memory
        self._gpu = slots.gpu
        self._host = host
        self._clock = clock
        self._costs = costs
        self._gpu_rows = gpu_rows
        self.scheduler: Scheduler = schedule
        self.fills = True
        self._link_free = 0.0  # about when all requested copies end
        self._copying: list[tuple[int, int, Event | None]] = []  # experts to keep in RAM meanwhile
        self._arriving: dict[Key, Event | None] = {}  # experts copied to slots ahead of use
        self._unread: dict[int, Routing] = {}  # routing that layers did not wait for

    @property
    def hits(self) -> int:
        """Experts that were on the GPU when a layer asked for them."""
        return self.slots.cache.hits

    @property
    def uses(self) -> int:
        """All experts that layers asked for."""
        return self.slots.cache.demands

    def begin(self, routed: Routed, state: PassState) -> _Turn:
        """Begin to bring the rows and the choice to the host; ``state`` is on the GPU."""
        gpu, routing = self._gpu, routed.routing
        crossing = 0 < self._gpu_rows <= routing.rows
        received = None if crossing else gpu.send(routed.rows, routing)
        self._read_earlier(routed.place)
        return _Turn(self, routed, state.check, received)

    def compute(self, turn: _Turn) -> Array:
        """Compute the slots of a layer's turn, on the GPU."""
        routed, gpu, cache = turn.routed, self._gpu, self.slots.cache
        place, routing = routed.place, routed.routing
        crossing = turn.received is None
        turn.slots_array = gpu.ops.expert_slots(routed.rows, routing)
        if not crossing:
            self._begin(turn)
        if not crossing and routing.away and cache.resident(place).all():
            self.slots.used(place, range(cache.count))
            self._unread[place] = routing
        else:
            if turn.away:
                routed.read(self.watch)
            self._settle(place)
            demand = cache.touch(place, routing.experts, routing.scores)
            if turn.received is None:
                self._cross(turn, demand)
            else:
                self._share(turn, demand, turn.received)
        return turn.slots_array

    def end(self, turn: _Turn, *, failed: bool) -> None:
        """Release what the turn has held; an idle link fills a slot."""
        place = turn.routed.place
        if failed:
            self.settle()  # unawaited copies: these experts have slots already
        self.memory.pool(place).done(place)
        self.slots.cache.release(place)
        if turn.received is not None and not failed:
            self._fill(place)

    @property
    def reclaimable(self) -> int:
        """Bytes that ``evict`` could free."""
        return self.slots.reclaimable

    def evict(self, nbytes: int) -> int:
        """Free ``nbytes`` of the GPU's slots, between passes; returns the bytes freed."""
        self.settle()
        return self.slots.evict(nbytes)

    def settle(self) -> None:
        """Wait until no copy to a slot is running: the slots' memory may be freed then."""
        self._settle(None)
        self._arriving.clear()

    def _bring(self, place: int, expert: int) -> Event | None:
        """Begin to copy an expert from RAM, and note how long the link will be busy."""
        data = self.memory.pool(place).data(place, expert)
        copied = self.slots.bring((place, expert), data)
        self.memory.pool(place).cache.hold(place, [expert])
        self._copying.append((place, expert, copied))
        self._link_free = max(self._link_free, time.perf_counter()) + self._costs.fetch
        return copied

    def _settle(self, turn: int | None) -> None:
        """Let go of experts in RAM whose copies have ended.

        In the ``turn`` of a layer running copies are not waited for, unless they hold too many of
        RAM's slots; for the layer's own copies the GPU waits, not the host.
        """
        left = list[tuple[int, int, Event | None]]()
        for place, expert, copied in reversed(self._copying):
            cache = self.memory.pool(place).cache
            spared = place == turn or len(left) < cache.capacity // _HELD_SHARE
            if copied is not None:
                if turn is not None and spared and not copied.query():
                    left.append((place, expert, copied))
                    continue
                copied.synchronize()
            cache.let_go(place, [expert])
        self._copying = left[::-1]

    def _read_earlier(self, place: int) -> None:
        """Note the earlier choice of a layer that did not wait for it: it has arrived long ago."""
        routing = self._unread.pop(place, None)
        if routing is not None:
            self.slots.cache.touch(place, routing.experts, routing.scores)
            self.slots.cache.release(place)

    def _fill(self, place: int) -> None:
        """If the link is idle, copy the layer's expert that is most worth a slot."""
        if not self.fills or self._link_free > time.perf_counter():
            return
        expert = self.slots.cache.candidate(place)
        if expert is not None and self.memory.pool(place).holds(place, expert):
            self._arriving[place, expert] = self._bring(place, expert)

    def _ahead(self, place: int) -> None:
        """Begin to copy the next layer's experts from RAM, as far as there is room."""
        cache = self.slots.cache
        if place >= cache.layers:
            return
        pool, resident = self.memory.pool(place), cache.resident(place)
        here, absent = np.flatnonzero(resident).tolist(), np.flatnonzero(~resident).tolist()
        most = pool.cache.capacity // _HELD_SHARE
        cache.hold(place, here)
        for expert in absent:
            if not cache.room or len(self._copying) >= most:
                break
            if pool.holds(place, expert):
                self._arriving[place, expert] = self._bring(place, expert)
        cache.let_go(place, here)

    def _begin(self, turn: _Turn) -> None:
        """Start the kernels for chosen experts that are in slots."""
        place, routing = turn.routed.place, turn.routed.routing
        resident = self.slots.cache.resident(place)
        if not routing.away:
            resident = resident & (routing.loads(len(resident)) > 0)
        held = resident.nonzero()[0].tolist()
        for expert in held if self._arriving else ():
            self._gpu.wait(self._arriving.pop((place, expert), None))
        self._compute(turn, held)

    def _share(self, turn: _Turn, demand: Demand, received: Callable[[], Array]) -> None:
        """Compute chosen experts that are not in slots, on the processor that finishes first.

        Copies begin first, then the GPU's kernels: both go on while the CPU computes.
        """
        place, costs = turn.routed.place, self._costs
        if demand.resident.any():
            self.slots.used(place, demand.experts[demand.resident].tolist())
        if demand.resident.all():
            return
        ready = Ready(link=max(0.0, self._link_free - time.perf_counter()))
        plan = self.scheduler(demand.rows, demand.resident, costs, ready)
        chosen = demand.experts.tolist()
        absent = demand.experts[~demand.resident].tolist()
        wanted = self.memory.pool(place).demand(place, turn.routed.routing, only=absent)
        fetched = self._fetch(turn, [chosen[i] for i in plan.fetch], wanted)
        self._at_once(turn, fetched)
        rest = [expert for expert in absent if expert not in fetched]
        if rest:
            self._on_cpu(turn, rest, wanted, received())

    def _cross(self, turn: _Turn, demand: Demand) -> None:
        """Compute experts in RAM or VRAM on the GPU, the rest on the CPU."""
        place = turn.routed.place
        held = demand.experts[demand.resident].tolist()
        rest = demand.experts[~demand.resident].tolist()
        wanted = self.memory.pool(place).demand(place, turn.routed.routing, only=rest)
        arriving = {e: self._arriving.pop((place, e)) for e in held if (place, e) in self._arriving}
        fetched = self._fetch(turn, rest, wanted)
        self._ahead(place + 1)
        self._on_gpu(turn, [expert for expert in held if expert not in arriving])
        self._at_once(turn, arriving | fetched)
        rest = [expert for expert in rest if expert not in fetched]
        while rest:  # more experts than slots: they replace those that are done
            self.slots.cache.finish(place, [*held, *fetched])
            more = self._fetch(turn, rest, wanted)
            if not more:
                break
            self._at_once(turn, more)
            fetched |= more
            rest = [expert for expert in rest if expert not in more]
        if rest:
            self._on_cpu(turn, rest, wanted, self._gpu.to_host(turn.routed.rows))

    def _at_once(self, turn: _Turn, arrivals: Mapping[int, Event | None]) -> None:
        """Compute all in one launch once they have arrived: the GPU waits, not the host.

        Single launches would begin sooner, but a copy takes many times as long as a product, and
        each launch costs the host the time of some products.
        """
        for copied in arrivals.values():
            self._gpu.wait(copied)
        self._on_gpu(turn, list(arrivals))

    def _fetch(
        self, turn: _Turn, experts: Sequence[int], wanted: Demanded
    ) -> dict[int, Event | None]:
        """Begin to copy experts that are in RAM and worth a slot; returns each copy's event."""
        cache, arrivals = self.slots.cache, dict[int, Event | None]()
        crossing, present = turn.received is None, set(wanted.present)
        for expert in sorted(present.intersection(experts)) if crossing else experts:
            if expert not in present:
                continue
            if crossing and not cache.room:
                cache.widen()
            if cache.room:
                arrivals[expert] = self._bring(turn.routed.place, expert)
        return arrivals

    def _on_gpu(self, turn: _Turn, experts: Sequence[int]) -> None:
        if experts:
            self._compute(turn, experts)
            self.slots.used(turn.routed.place, experts)

    def _compute(self, turn: _Turn, experts: Sequence[int]) -> None:
        """Start the GPU's kernels for those of ``experts`` that were chosen."""
        if not experts:
            return
        ops, routed = self._gpu.ops, turn.routed
        with self._clock.task("gpu", turn.label), ops.scope():
            table = self.slots.cache.tables[routed.place]
            ops.run_experts(
                routed.rows, routed.routing, table, routed.spec, turn.slots_array, experts
            )

    def _on_cpu(self, turn: _Turn, experts: Sequence[int], wanted: Demanded, normed: Array) -> None:
        """Compute those in RAM, then others as they arrive from the SSD; results go to the GPU."""
        routing, place = turn.routed.routing, turn.routed.place
        pool = self.memory.pool(place)
        same = self._host is self._gpu.ops
        slots = turn.slots_array if same else self._host.expert_slots(normed, routing)

        def compute(group: Sequence[int]) -> None:
            with self._clock.task("cpu", turn.label):
                table = pool.cache.tables[place]
                self._host.run_experts(normed, routing, table, turn.routed.spec, slots, group)
            pool.computed(place, group)

        absent = set(wanted.absent)
        present = [expert for expert in experts if expert not in absent]
        if present:
            compute(present)
        for expert in wanted.absent:
            pool.arrive(place, expert, turn.check)
            compute([expert])
        if same:
            return
        asked = np.zeros(pool.cache.count, np.bool_)
        asked[experts] = True
        index = asked[routing.chosen.reshape(-1)].nonzero()[0]
        rows = self._gpu.to_gpu(slots[index])
        with self._gpu.ops.scope():
            turn.slots_array = self._gpu.ops.put_slots(turn.slots_array, index, rows)


class _Turn:
    """One layer's turn in a pass: see ``Turn``.

    ``received`` waits for the rows on the host; it is None in a long pass, in which the GPU
    computes all experts in RAM or VRAM.
    """

    slots_array: Array = None

    def __init__(
        self,
        experts: HybridExperts,
        routed: Routed,
        check: Check | None,
        received: Callable[[], Array] | None,
    ) -> None:
        self._experts = experts
        self.routed, self.check, self.received = routed, check, received
        self.away = routed.routing.away  # the host does not know the choice yet
        self._done = False

    @property
    def label(self) -> str:
        """The label of its tasks."""
        return f"layers.{self.routed.layer}.experts"

    def slots(self) -> Array:
        """The slots of all chosen experts."""
        slots = self._experts.compute(self)
        self._done = True
        return slots

    def end(self) -> None:
        """Release what the turn has held."""
        self._experts.end(self, failed=not self._done)
