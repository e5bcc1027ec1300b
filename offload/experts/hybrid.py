"""Runs a sparse layer on GPU and CPU at once: each expert where it is finished first.

The router runs on the GPU, and experts in its slots are started there before the host knows which
were chosen. The host waits once, for the choice and the rows. Of the other experts some are copied
over the link while the CPU computes the rest, as the scheduler decides by cost. Slots are combined
on the GPU in the order of k: so the order of finishing has no effect. Experts in neither memory are
read from the SSD and computed by the CPU. A model whose experts are all on the GPU waits for
nothing.

Short passes are recorded, with what the host does between two graphs: a layer then takes two
launches, and what moves to or from the GPU meanwhile changes the layer's table there alone.

A long pass needs nearly all experts of every layer: those in RAM are copied one after another,
followed by the next layer's, and computed in one launch when they have arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from localrt.models.layers.moe import Routed, RoutingWatch, Turn
from localrt.models.layers.parts import PassState
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.cache import STAYS, Demand, Key
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.pool import Arrival, Demanded, GpuSlots
from localrt.offload.experts.scheduler import (
    Assignment,
    ExpertCosts,
    Ready,
    schedule,
)
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import Share
from localrt.quant.ops.protocol import Check, Ops, Recorder

_HELD_SHARE = 4  # copies ahead may hold one in so many of the RAM's slots

Scheduler = Callable[..., Assignment]


Mask = npt.NDArray[np.bool_]


class HybridExperts:
    """Runs the sparse layers whose router is on the GPU of ``slots``. See ``Experts``.

    ``memory`` holds experts for the CPU, whose ``Ops`` are ``host``; ``costs`` are seconds of an
    expert. In passes of ``gpu_rows`` rows or more (0: in none) the GPU computes all experts in RAM
    or VRAM. ``recorder`` is the GPU's. ``scheduler``, and whether an idle link ``fills`` slots, may
    be changed between passes.
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
        recorder: Recorder | None = None,
    ) -> None:
        self.watch: RoutingWatch | None = None
        self.slots, self.memory = slots, memory
        self.gpu = slots.gpu
        self.host = host
        self._clock = clock
        self._costs = costs
        # What a copy takes of the CPU's time, in uses of its expert, over the passes that it stays.
        saved = max(costs.cpu(1) - costs.gpu(1), 1e-9) * STAYS
        self._gain = (costs.start + costs.link_load * costs.fetch) / saved
        self._plans: dict[object, list[int]] = {}  # which are copied over an idle link
        self._gpu_rows = gpu_rows
        self._recorder = recorder
        self.scheduler: Scheduler = schedule
        self.fills = True
        self._answered = 0  # misses for which a slot was filled, or need not be
        self._link_free = 0.0  # about when all requested copies end
        self._copying = deque[Arrival]()  # in order; in RAM, too, they stay meanwhile
        self._arriving: dict[Key, Arrival] = {}  # of these, those that kernels do not find yet

    @property
    def hits(self) -> int:
        """Experts that were on the GPU when a layer asked for them."""
        return self.slots.cache.hits

    @property
    def uses(self) -> int:
        """All experts that layers asked for."""
        return self.slots.cache.demands

    def records(self, rows: int) -> bool | None:
        """Whether sparse layers can be recorded in a pass of so many rows; None if that is not
        known before each layer has had an expert on the GPU.
        """
        if self.watch is not None or 0 < self._gpu_rows <= rows:
            return False
        sharable = {table.sharable for table in self.slots.cache.tables}
        return False if False in sharable else None if None in sharable else True

    def begin(self, routed: Routed, state: PassState) -> Turn:
        """Begin to bring the rows and the choice to the host; ``state`` is on the GPU."""
        gpu, routing = self.gpu, routed.routing
        if self._recorder is not None:
            table = self.slots.cache.tables[routed.place]
            share = self._recorder.share(routed.rows, routing, table)
            if share is not None:
                return _RecordedTurn(self, routed, share)
        crossing = 0 < self._gpu_rows <= routing.rows
        received = None if crossing else gpu.send(routed.rows, routing)
        return _EagerTurn(self, routed, state.check, received)

    def compute(self, turn: _EagerTurn) -> Array:
        """Compute the slots of a layer's turn, on the GPU."""
        routed, cache = turn.routed, self.slots.cache
        place, routing = routed.place, routed.routing
        turn.slots_array = self.gpu.ops.expert_slots(routed.rows, routing)
        if turn.received is None:
            if turn.away:
                routed.read(self.watch)
            self._settle()
            self._cross(turn, cache.touch(place, routing.experts, routing.scores))
            return turn.slots_array
        self._settle()
        turn.there = self._there(place)
        wanted = turn.there
        if not routing.away:
            wanted = wanted & (routing.loads(len(wanted)) > 0)
        self._on_gpu(turn, wanted.nonzero()[0].tolist())
        if not self._needs_no_host(turn):
            if turn.away:
                routed.read(self.watch)
            self._share(turn, cache.touch(place, routing.experts, routing.scores))
        return turn.slots_array

    def begin_replay(self, turn: _RecordedTurn) -> None:
        """Before the graph with a layer's experts: tell the GPU which are there."""
        self._settle()
        turn.there = turn.share.begin()
        self.slots.replayed(turn.routed.place)

    def share_replay(self, turn: _RecordedTurn, check: Check | None) -> None:
        """After the graph with a layer's experts: compute the others."""
        place, share, failed = turn.routed.place, turn.share, True
        share.filled.fill(0)
        if self._needs_no_host(turn):
            return
        turn.check = check
        try:
            if check is not None:
                check()
            share.receive()
            turn.routed.read(self.watch, share.routing)
            experts, scores = share.routing.experts, share.routing.scores
            self._share(turn, self.slots.cache.touch(place, experts, scores))
            failed = False
        finally:
            self.end(place, failed=failed)
        self.fill(place)

    def end(self, place: int, *, failed: bool) -> None:
        """Release what a layer's turn has held."""
        if failed:
            self.settle()  # unawaited copies: these experts have slots already
        self.memory.pool(place).done(place)
        self.slots.cache.release(place)

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
        self._settle(wait=True)

    def _needs_no_host(self, turn: _RecordedTurn | _EagerTurn) -> bool:
        """Whether a turn is done, as all experts of the model are on the GPU for good."""
        cache, routing = self.slots.cache, turn.routed.routing
        if not (cache.complete and routing.away and turn.there.all()):
            return False
        if isinstance(turn, _EagerTurn):
            self.slots.used(turn.routed.place)
        cache.found(min(cache.count, routing.rows * routing.used))
        return True

    def _there(self, place: int) -> Mask:
        """(E,): the layer's experts that kernels find."""
        there = self.slots.cache.resident(place)
        for layer, expert in self._arriving:
            if layer == place:
                there = there.copy()
                there[expert] = False
        return there

    def _bring(self, place: int, expert: int) -> Arrival:
        """Begin to copy an expert from RAM, and note how long the link will be busy."""
        pool = self.memory.pool(place)
        arrival = self.slots.bring((place, expert), pool.data(place, expert))
        pool.cache.hold(place, [expert])
        self._copying.append(arrival)
        self._arriving[place, expert] = arrival
        self._link_free = max(self._link_free, time.perf_counter()) + self._costs.fetch
        return arrival

    def _settle(self, *, wait: bool = False) -> None:
        """Enter experts whose copies have ended, and let go of them in RAM.

        Running copies are not waited for, unless they hold too many of RAM's slots.
        """
        while self._copying:
            arrival = self._copying[0]
            (place, expert), copied = arrival.key, arrival.copied
            cache = self.memory.pool(place).cache
            if copied is not None:
                spared = len(self._copying) <= cache.capacity // _HELD_SHARE
                if spared and not wait and not copied.query():
                    return
                copied.synchronize()
            self._copying.popleft()
            cache.let_go(place, [expert])
            if self._arriving.get(arrival.key) is arrival:
                self._enter(arrival)

    def _enter(self, arrival: Arrival) -> None:
        del self._arriving[arrival.key]
        self.slots.enter(arrival)

    def fill(self, place: int) -> None:
        """If the link is idle, copy the layer's expert that is most worth a slot, if it pays: at
        most one for each miss of late, as copies cost the host time in each layer.
        """
        cache, misses = self.slots.cache, self.uses - self.hits
        if not self.fills or self._answered >= misses or self._link_free > time.perf_counter():
            return
        expert = cache.candidate(place, self._gain)
        if expert is not None and self.memory.pool(place).holds(place, expert):
            self._bring(place, expert)
            self._answered = max(self._answered + 1, misses - cache.layers * cache.used)

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
                self._bring(place, expert)
        cache.let_go(place, here)

    def _share(self, turn: _EagerTurn | _RecordedTurn, demand: Demand) -> None:
        """Compute chosen experts that the GPU has not begun, on the processor that finishes first.

        Copies begin first, then the GPU's kernels: both go on while the CPU computes.
        """
        place, there = turn.routed.place, turn.there[demand.experts].tolist()
        if all(there):
            return
        chosen = zip(demand.experts.tolist(), there, strict=True)
        absent = [expert for expert, found in chosen if not found]
        wanted = self.memory.pool(place).demand(place, turn.routing, only=absent)
        copied = self._worth_copying(demand, there)
        if copied:
            arrivals = self._fetch(turn, copied, wanted)
            self._at_once(turn, arrivals)
            fetched = {arrival.key[1] for arrival in arrivals}
            absent = [expert for expert in absent if expert not in fetched]
        if absent:
            self._on_cpu(turn, absent, wanted)

    def _worth_copying(self, demand: Demand, there: Sequence[bool]) -> list[int]:
        """Those of the experts that are not ``there`` which the scheduler copies, in its order."""
        ready = Ready(link=max(0.0, self._link_free - time.perf_counter()))
        rows = demand.rows.tolist()
        key = self.scheduler, *zip(rows, there, strict=True)
        known = None if ready.link else self._plans.get(key)
        if known is None:
            known = self.scheduler(rows, there, self._costs, ready).fetch
        if not ready.link and len(rows) == self.slots.cache.used:  # of one row: there are few
            self._plans[key] = known
        return demand.experts[known].tolist() if known else []

    def _cross(self, turn: _EagerTurn, demand: Demand) -> None:
        """Compute experts in RAM or VRAM on the GPU, the rest on the CPU."""
        place, cache = turn.routed.place, self.slots.cache
        held = demand.experts[demand.resident].tolist()
        rest = demand.experts[~demand.resident].tolist()
        wanted = self.memory.pool(place).demand(place, turn.routing, only=rest)
        keys = [(place, expert) for expert in held]
        arriving = [self._arriving[key] for key in keys if key in self._arriving]
        fetched = self._fetch(turn, rest, wanted, most=True)
        self._ahead(place + 1)
        late = {arrival.key[1] for arrival in arriving}
        self._on_gpu(turn, [expert for expert in held if expert not in late])
        self._at_once(turn, [*arriving, *fetched])
        done = {arrival.key[1] for arrival in fetched}
        rest = [expert for expert in rest if expert not in done]
        while rest:  # more experts than slots: they replace those that are done
            cache.finish(place, [*held, *done])
            more = self._fetch(turn, rest, wanted, most=True)
            if not more:
                break
            self._at_once(turn, more)
            done.update(arrival.key[1] for arrival in more)
            rest = [expert for expert in rest if expert not in done]
        if rest:
            self._on_cpu(turn, rest, wanted)

    def _at_once(self, turn: _EagerTurn | _RecordedTurn, arrivals: Sequence[Arrival]) -> None:
        """Compute all in one launch once they have arrived: the GPU waits, not the host.

        Single launches would begin sooner, but a copy takes many times as long as a product, and
        each launch costs the host the time of some products.
        """
        for arrival in arrivals:
            self.gpu.wait(arrival.copied)
            self._enter(arrival)
        self._on_gpu(turn, [arrival.key[1] for arrival in arrivals])

    def _fetch(
        self,
        turn: _EagerTurn | _RecordedTurn,
        experts: Iterable[int],
        wanted: Demanded,
        *,
        most: bool = False,
    ) -> list[Arrival]:
        """Begin to copy experts that are in RAM, as far as there is room; with ``most``, other
        layers make room.
        """
        cache, arrivals = self.slots.cache, list[Arrival]()
        present = set(wanted.present)
        for expert in sorted(present.intersection(experts)) if most else experts:
            if expert not in present:
                continue
            arrival = self._arriving.get((turn.routed.place, expert))
            if arrival and cache.slot(*arrival.key) is arrival.slot:  # else it has been evicted
                arrivals.append(arrival)
                continue
            if most and not cache.room:
                cache.widen()
            if cache.room:
                arrivals.append(self._bring(turn.routed.place, expert))
        return arrivals

    def _on_gpu(self, turn: _EagerTurn | _RecordedTurn, experts: Sequence[int]) -> None:
        """Start the GPU's kernels for those of ``experts`` that were chosen."""
        if not experts:
            return
        ops, routed = self.gpu.ops, turn.routed
        with self.gpu.task(turn.label), ops.scope():
            table = self.slots.cache.tables[routed.place]
            ops.run_experts(
                routed.rows, routed.routing, table, routed.spec, turn.slots_array, experts
            )
        self.slots.used(routed.place)

    def _on_cpu(
        self, turn: _EagerTurn | _RecordedTurn, experts: Sequence[int], wanted: Demanded
    ) -> None:
        """Compute those in RAM, then others as they arrive from the SSD; results go to the GPU."""
        place = turn.routed.place
        pool = self.memory.pool(place)
        rows = turn.rows()
        slots = turn.host_slots(rows)

        def compute(group: Sequence[int]) -> None:
            with self._clock.task("cpu", turn.label):
                table = pool.cache.tables[place]
                self.host.run_experts(rows, turn.routing, table, turn.routed.spec, slots, group)
            pool.computed(place, group)

        absent = set(wanted.absent)
        present = [expert for expert in experts if expert not in absent]
        if present:
            compute(present)
        for expert in wanted.absent:
            pool.arrive(place, expert, turn.check)
            compute([expert])
        asked = np.zeros(pool.cache.count, np.bool_)
        asked[experts] = True
        turn.deliver(slots, asked[turn.routing.chosen.reshape(-1)])


class _EagerTurn:
    """One layer's turn in a pass: see ``Turn``.

    ``received`` waits for the rows on the host; it is None in a long pass, in which the GPU
    computes all experts in RAM or VRAM. ``there`` are those that kernels find.
    """

    slots_array: Array
    there: Mask

    def __init__(
        self,
        experts: HybridExperts,
        routed: Routed,
        check: Check | None,
        received: Callable[[], Array] | None,
    ) -> None:
        self._experts = experts
        self.routed, self.check, self.received = routed, check, received
        self.routing = routed.routing
        self.away = routed.routing.away  # the host does not know the choice yet
        self.label = f"layers.{routed.layer}.experts"
        self._done = False

    def slots(self) -> Array:
        """The slots of all chosen experts."""
        slots = self._experts.compute(self)
        self._done = True
        return slots

    def end(self) -> None:
        """Release what the turn has held; an idle link fills a slot."""
        place = self.routed.place
        self._experts.end(place, failed=not self._done)
        if self.received is not None and self._done:
            self._experts.fill(place)

    def rows(self) -> Array:
        """The rows on the host."""
        gpu = self._experts.gpu
        return gpu.to_host(self.routed.rows) if self.received is None else self.received()

    def host_slots(self, rows: Array) -> Array:
        """Where the host's experts fill slots."""
        if self._experts.host is self._experts.gpu.ops:
            return self.slots_array
        return self._experts.host.expert_slots(rows, self.routing)

    def deliver(self, slots: Array, filled: Mask) -> None:
        """Take those of the host's slots that it has ``filled`` to the GPU."""
        gpu = self._experts.gpu
        if slots is self.slots_array:
            return
        index = filled.nonzero()[0]
        rows = gpu.to_gpu(cast(Array, cast(Floats, slots)[index]))
        with gpu.ops.scope():
            self.slots_array = gpu.ops.put_slots(self.slots_array, index, rows)


class _RecordedTurn:
    """One layer's turn in all passes that replay what is recorded: see ``Turn``."""

    there: Mask
    check: Check | None = None

    def __init__(self, experts: HybridExperts, routed: Routed, share: Share[Array]) -> None:
        self._experts = experts
        self.routed, self.share = routed, share
        self.routing, self.slots_array = share.routing, share.slots
        self.label = f"layers.{routed.layer}.experts"
        share.cut(lambda check: experts.begin_replay(self))

    def slots(self) -> Array:
        """The slots of all chosen experts."""
        self.share.compute(self.routed.spec)
        self.share.cut(lambda check: self._experts.share_replay(self, check))
        return self.share.take()

    def end(self) -> None:
        """Nothing to do: each replay ends its turn itself."""

    def rows(self) -> Array:
        """The rows on the host."""
        return cast(Array, self.share.rows)

    def host_slots(self, rows: Array) -> Array:
        """Where the host's experts fill slots."""
        return cast(Array, self.share.host_slots)

    def deliver(self, slots: Array, filled: Mask) -> None:
        """The next graph takes those of the host's slots that it has ``filled``."""
        self.share.filled[:] = filled
