"""Mixtures on GPU and CPU at once: the GPU computes the experts in its slots, the CPU the others.

No card has run its recorded passes yet.

The router runs on the GPU, which starts the chosen experts in its slots before the host knows the
routing. Experts in neither memory are read from the SSD and computed by the CPU. Results are summed
on the GPU in the order of k, so the order of finishing has no effect. Experts that are worth a slot
are copied to the GPU for later layers and passes, never for the layer at hand.

Short passes are recorded as graphs of many layers, beside which the host works. Each layer's
kernels give the host a ticket when its rows and choice are in RAM, compute the experts in the
layer's table, and wait until the host has computed the others: one launch for many layers, and
Python does nothing in between if the experts are in RAM. Tables change between passes only, so GPU
and host agree on who computes. What the routers chose is learned after the pass. In other passes
the host waits once a layer, for the routing and the rows. If all experts are on the GPU, the host
does not wait.

A long pass needs nearly all experts of every layer: those in RAM are copied one after another,
followed by the next layer's, and computed in one launch when they have arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from localrt.models.layers.moe import ExpertPass, Routed
from localrt.models.layers.parts import PassState
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.cache import Demand, ExpertCosts, Key
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.pool import Arrival, Demanded, ExpertPool, GpuSlots
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import ExpertTable, HostShare, SharedLayers
from localrt.quant.ops.protocol import Check, Ops, PassLostError, Recorder

_COPY_SHARE = 4  # running copies lock at most a quarter of the slots in RAM


class ExpertCopies:
    """Copies to ``slots``, one after another, of ``seconds`` each.

    ``arriving`` are the experts being copied that are not yet in their tables.
    """

    def __init__(self, slots: GpuSlots, memory: ExpertMemory, seconds: float) -> None:
        self._slots, self._memory, self._seconds = slots, memory, seconds
        self.arriving: dict[Key, Arrival] = {}
        self._running = deque[Arrival]()  # in order; their experts are locked in RAM
        self._end = 0.0  # estimated

    def __len__(self) -> int:
        return len(self._running)

    def wait_s(self, now: float | None = None) -> float:
        """Estimated seconds until the link is idle."""
        return max(0.0, self._end - (time.perf_counter() if now is None else now))

    def bring(self, place: int, expert: int) -> Arrival:
        """Begin to copy an expert from RAM to the GPU."""
        pool = self._memory.pool(place)
        arrival = self._slots.bring((place, expert), pool.data(place, expert))
        pool.cache.lock(place, [expert])
        self._running.append(arrival)
        self.arriving[place, expert] = arrival
        self._end = max(self._end, time.perf_counter()) + self._seconds
        return arrival

    def settle(self, *, wait: bool = False) -> None:
        """Enter experts whose copies have ended, and unlock them in RAM.

        Waits for running copies only if they lock too many slots in RAM, or with ``wait``.
        """
        while self._running:
            arrival = self._running[0]
            (place, expert), copied = arrival.key, arrival.copied
            pool = self._memory.pool(place)
            if copied is not None and not copied.query():
                if not wait and len(self) <= copies_at_once(pool):
                    return
                copied.synchronize()
            self._running.popleft()
            pool.cache.unlock(place, [expert])
            if self.arriving.get(arrival.key) is arrival:
                self.enter(arrival)

    def enter(self, arrival: Arrival) -> None:
        """Put an expert into its table, once it has arrived or kernels wait for it."""
        del self.arriving[arrival.key]
        self._slots.enter(arrival)


def copies_at_once(pool: ExpertPool) -> int:
    """How many copies may run that read from the pool."""
    return pool.cache.capacity // _COPY_SHARE


_LOOK_S = 0.05  # after so long, the host looks whether the GPU has failed


class RecordedPass:
    """One layer in all passes that replay a recording: see ``ExpertPass``.

    ``findable`` are the experts that the GPU computes in the current replay; for ``demanded``
    layers the others were asked for in it, as some were not in RAM.
    """

    findable: npt.NDArray[np.bool_]
    demanded = False
    check: Check | None = None

    def __init__(self, routed: Routed, share: HostShare) -> None:
        self.routed, self.share = routed, share
        self.routing, self.slots_array = share.routing, share.slots
        self.label = f"layers.{routed.layer}.experts"

    def absent(self) -> list[int]:
        """The chosen experts that the host computes."""
        chosen = np.unique(self.routing.chosen)
        return cast("list[int]", chosen[~self.findable[chosen]].tolist())

    def slots(self) -> Array:
        """The slots of all chosen experts."""
        self.share.compute(self.routed.spec)
        return self.share.take()

    def end(self) -> None:
        """Nothing to do: no copies were begun."""

    def rows(self) -> Array:
        """The rows on the host."""
        return cast(Array, self.share.rows)

    def host_slots(self, rows: Array) -> Array:
        """The array for the host's results."""
        return cast(Array, self.share.host_slots)

    def deliver(self, slots: Array, filled: npt.NDArray[np.bool_]) -> None:
        """Nothing to do: the GPU reads the slots where they are."""


class HostExperts(Protocol):
    """What recorded layers ask of the owner of the experts."""

    def begin_recorded(self, first: int) -> Sequence[Any]:
        """Before a graph whose first layer is ``first``: learn from the last pass, and enter
        experts that have arrived. Returns the tables that may have changed.
        """

    def compute_absent(self, layer_pass: RecordedPass) -> None:
        """Compute the chosen experts that the GPU does not, reading those that are on the SSD."""

    def served(self, layers: Sequence[RecordedPass], busy_s: float) -> None:
        """Note that the host's part of a graph's layers is done, in ``busy_s`` seconds."""


class RecordedLayers:
    """The host's part of the layers of one graph: see ``HostWork``. ``quick`` does all of it that
    can be done without Python.
    """

    def __init__(
        self, experts: HostExperts, layers: Sequence[RecordedPass], quick: SharedLayers | None
    ) -> None:
        self._experts, self._layers, self._quick = experts, list(layers), quick
        self._shares = [layer.share for layer in layers]

    def begin(self, check: Check | None) -> None:
        """Fix which experts the GPU computes."""
        if check is not None:
            check()
        tables = self._experts.begin_recorded(self._layers[0].routed.place)
        for number, layer in enumerate(self._layers):
            layer.findable, layer.demanded = layer.share.present(), False
            if self._quick is not None:
                self._quick.present(number, layer.findable)
        self._shares[0].begin(self._shares, tables)

    def __call__(self, check: Check | None) -> None:
        """Compute the other experts of each layer.

        Raises:
            PassLostError: the GPU has waited too long.
        """
        quick, at = self._quick, 0
        before = 0.0 if quick is None else quick.busy_s
        try:
            while at < len(self._layers):
                if quick is not None:
                    at = quick.run(at)
                if at < len(self._layers):
                    self._serve(self._layers[at], check)
                    at += 1
            if self._shares[0].words.stop[0]:
                raise _lost()
        except BaseException:
            self._shares[0].give_up()
            raise
        self._experts.served(self._layers, 0.0 if quick is None else quick.busy_s - before)

    def _serve(self, layer: RecordedPass, check: Check | None) -> None:
        """Compute one layer's experts, which may be on the SSD."""
        self._await(layer.share, check)
        layer.check = check
        self._experts.compute_absent(layer)
        layer.share.words.done[0] = layer.share.words.turn[0]

    def _await(self, share: HostShare, check: Check | None) -> None:
        """Wait for the GPU's ticket."""
        words, looked = share.words, time.perf_counter()
        while words.ticket[0] != words.turn[0]:
            if words.stop[0]:
                raise _lost()
            time.sleep(0)
            if time.perf_counter() - looked > _LOOK_S:
                looked = time.perf_counter()
                share.check()
                if check is not None:
                    check()


def _lost() -> PassLostError:
    return PassLostError("the GPU has waited too long for the CPU, which others need: ask again")


Mask = npt.NDArray[np.bool_]


class HybridExperts:
    """Runs the sparse layers whose router is on the GPU of ``slots``. See ``Experts``.

    ``memory`` has the experts in RAM, ``host`` computes on the CPU; ``costs`` are those of the
    largest expert. In passes of ``gpu_rows`` rows or more (0: in none) the GPU computes all experts
    in RAM or VRAM. ``recorder`` records the GPU's graphs. ``fills`` (whether an idle link fills
    slots) may be changed between passes.
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
        self.slots, self.memory = slots, memory
        self.gpu = slots.gpu
        self.host = host
        self.clock = clock
        self._costs = costs
        self._gpu_rows = gpu_rows
        self._recorder = recorder
        self._served: list[RecordedPass] = []  # whose choices are to be learned
        self._learned = 0.0  # when choices were learned last
        if recorder is not None:
            recorder.while_waiting = self.learn
        self.fills = True
        self._filled = 0  # misses already used for filling a slot
        self.copies = ExpertCopies(slots, memory, costs.fetch)

    @property
    def divided(self) -> bool:
        """Whether it depends on earlier choices which processor computes an expert."""
        cache = self.slots.cache
        return bool(self.copies.arriving) or len(cache) < cache.layers * cache.count

    @property
    def hits(self) -> int:
        """Uses of experts that were already on the GPU."""
        return self.slots.cache.hits

    @property
    def uses(self) -> int:
        """All uses of experts, one per layer and pass."""
        return self.slots.cache.demands

    def records(self, rows: int) -> bool | None:
        """Whether sparse layers can be recorded in a pass of ``rows``; None until each layer has
        had an expert on the GPU.
        """
        if 0 < self._gpu_rows <= rows:
            return False
        sharable = {table.sharable for table in self.slots.cache.tables}
        return False if False in sharable else None if None in sharable else True

    def begin(self, routed: Routed, state: PassState) -> ExpertPass:
        """Begin to copy the rows and the choice to the host; ``state`` is on the GPU."""
        gpu, routing = self.gpu, routed.routing
        if self._recorder is not None:
            table = self.slots.cache.tables[routed.place]
            share = self._recorder.share(routed.rows, routing, table)
            if share is not None:
                layer = RecordedPass(routed, share)
                share.serve(self._make_work, layer)
                return layer
        crossing = 0 < self._gpu_rows <= routing.rows
        received = None if crossing else gpu.send(routed.rows, routing)
        return _EagerPass(self, routed, state.check, received)

    def compute(self, layer_pass: _EagerPass) -> Array:
        """Compute the slots of a layer."""
        routed, cache = layer_pass.routed, self.slots.cache
        place, routing = routed.place, routed.routing
        layer_pass.slots_array = self.gpu.ops.expert_slots(routed.rows, routing)
        self.copies.settle()
        crossing = layer_pass.received is None
        if not crossing:
            layer_pass.findable = self._findable(place)
            found = layer_pass.findable
            if not routing.away:
                found = found & (routing.loads(len(found)) > 0)
            self._on_gpu(layer_pass, found.nonzero()[0].tolist())
            if self._all_on_gpu(layer_pass):
                return layer_pass.slots_array
        if layer_pass.unread:
            routed.read()
        demand = cache.touch(place, routing.experts, routing.scores)
        if crossing:
            self._run_crossing(layer_pass, demand)
        elif absent := demand.experts[~layer_pass.findable[demand.experts]].tolist():
            wanted = self.memory.pool(place).demand(place, routing, only=absent)
            self._on_cpu(layer_pass, absent, wanted)
        return layer_pass.slots_array

    def _make_work(self, layers: Sequence[RecordedPass]) -> RecordedLayers:
        pools = [(layer, self.memory.pool(layer.routed.place)) for layer in layers]
        parts = [
            (layer.share, pool.cache.tables[layer.routed.place], layer.routed.spec)
            for layer, pool in pools
        ]
        make = getattr(self.host, "shared_layers", None)  # of ``HostOps``
        return RecordedLayers(self, layers, None if make is None else make(parts))

    def begin_recorded(self, first: int) -> Sequence[ExpertTable]:
        if not self._served or self._served[-1].routed.place >= first:  # another pass
            self.learn()
        self.copies.settle()
        return self.slots.cache.tables

    def compute_absent(self, layer_pass: RecordedPass) -> None:
        absent, place = layer_pass.absent(), layer_pass.routed.place
        if not absent:
            return
        layer_pass.demanded = True
        pool = self.memory.pool(place)
        try:
            self._on_cpu(layer_pass, absent, pool.demand(place, layer_pass.routing, only=absent))
        finally:
            pool.done(place)

    def served(self, layers: Sequence[RecordedPass], busy_s: float) -> None:
        if busy_s:
            first, last = layers[0].label, layers[-1].label
            name = first if first == last else f"{first.removesuffix('.experts')} to {last}"
            self.clock.span("cpu", name, time.perf_counter() - busy_s, busy_s)
        self._served += layers

    def learn(self) -> None:
        """Learn from the recorded layers of the last pass, and copy experts to slots if that pays:
        no more than that pass missed, nor than the link can copy in such a pass.

        Called while the host would otherwise wait for logits, or before the next pass.
        """
        layers, self._served = self._served, []
        if not layers:
            return
        if not np.isfinite(np.stack([layer.routing.weights for layer in layers]).sum()):
            for layer in layers:
                layer.routed.read(layer.routing)  # raises
        cache = self.slots.cache
        misses_before = self.uses - self.hits
        if layers[0].routing.rows == 1:
            places = np.array([layer.routed.place for layer in layers])
            experts = np.stack([layer.routing.experts[0] for layer in layers])
            scores = np.stack([layer.routing.scores[0] for layer in layers])
            found = np.stack([layer.findable for layer in layers])
            cache.touch_rows(places, experts, scores, found)
        else:
            for layer in layers:
                place = layer.routed.place
                cache.touch(place, layer.routing.experts, layer.routing.scores)
                cache.release(place)
        misses = self.uses - self.hits - misses_before
        if not self.memory.complete:
            for layer in layers:
                absent, place = layer.absent(), layer.routed.place
                if absent and not layer.demanded:
                    self.memory.pool(place).learn(place, layer.routing, absent)
        now = time.perf_counter()
        room = (now - self._learned - self.copies.wait_s(now)) / self._costs.fetch
        self._learned = now
        if self.fills and misses and room >= 1:
            for key in cache.candidates(min(misses, int(room)), self._costs.min_gain):
                if self.memory.pool(key[0]).holds(*key):
                    self.copies.bring(*key)

    def end(self, place: int, *, failed: bool) -> None:
        """Unlock the experts of a layer."""
        if failed:
            self.settle()  # nothing waits for these copies, but their experts have slots
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

    def grow(self, nbytes: int) -> None:
        """Take freed slots again, as far as ``nbytes`` go, and begin to fill them."""
        count = self.slots.grow(nbytes)
        if count and self.fills:
            for key in self.slots.cache.candidates(count):
                if self.memory.pool(key[0]).holds(*key):
                    self.copies.bring(*key)

    def settle(self) -> None:
        """Wait for all copies to slots, so that the slots' memory may be freed."""
        self.copies.settle(wait=True)

    def _all_on_gpu(self, layer_pass: _EagerPass) -> bool:
        """Whether the GPU computes a layer alone: it permanently has all experts of the model."""
        cache, routing = self.slots.cache, layer_pass.routed.routing
        if not (cache.complete and routing.away and layer_pass.findable.all()):
            return False
        self.slots.used(layer_pass.routed.place)
        cache.count_hits(min(cache.count, routing.rows * routing.used))
        return True

    def _findable(self, place: int) -> Mask:
        """(E,): the layer's experts that are in its table on the GPU."""
        findable = self.slots.cache.resident(place)
        for layer, expert in self.copies.arriving:
            if layer == place:
                findable = findable.copy()
                findable[expert] = False
        return findable

    def fill(self, place: int) -> None:
        """If the link is idle, copy the layer's most valuable expert, if that pays off: at most one
        per recent miss, since copies cost host time in each layer.
        """
        cache, misses = self.slots.cache, self.uses - self.hits
        if not self.fills or self._filled >= misses or self.copies.wait_s() > 0:
            return
        expert = cache.candidate(place, self._costs.min_gain)
        if expert is not None and self.memory.pool(place).holds(place, expert):
            self.copies.bring(place, expert)
            self._filled = max(self._filled + 1, misses - cache.layers * cache.used)

    def _ahead(self, place: int) -> None:
        """Begin to copy the next layer's experts from RAM, as far as there is room."""
        cache = self.slots.cache
        if place >= cache.layers:
            return
        pool, resident = self.memory.pool(place), cache.resident(place)
        here, absent = np.flatnonzero(resident).tolist(), np.flatnonzero(~resident).tolist()
        most = copies_at_once(pool)
        cache.lock(place, here)
        for expert in absent:
            if not cache.room or len(self.copies) >= most:
                break
            if pool.holds(place, expert):
                self.copies.bring(place, expert)
        cache.unlock(place, here)

    def _run_crossing(self, layer_pass: _EagerPass, demand: Demand) -> None:
        """Compute experts in RAM or VRAM on the GPU, the rest on the CPU."""
        place, cache = layer_pass.routed.place, self.slots.cache
        done = demand.experts[demand.resident].tolist()
        rest = demand.experts[~demand.resident].tolist()
        wanted = self.memory.pool(place).demand(place, layer_pass.routing, only=rest)
        here, queued = set(done), deque(sorted(wanted.present))
        late = [a for a in self.copies.arriving.values() if a.key[0] == place and a.key[1] in here]
        late += self._fetch(place, queued)
        self._ahead(place + 1)
        self._on_gpu(layer_pass, sorted(here.difference(arrival.key[1] for arrival in late)))
        self._run_arrived(layer_pass, late)
        while queued:  # if there are more experts than slots, they replace computed ones
            done += (arrival.key[1] for arrival in late)
            cache.finish(place, done)
            if not (late := self._fetch(place, queued)):
                break
            self._run_arrived(layer_pass, late)
        if left := [*queued, *wanted.absent]:
            self._on_cpu(layer_pass, left, wanted)

    def _run_arrived(self, layer_pass: _EagerPass, arrivals: Sequence[Arrival]) -> None:
        """Compute all arrived experts in one launch: the GPU waits for them, not the host.

        One launch per expert would begin sooner, but a copy takes many times as long as a product,
        and a launch costs the host as much time as a few products.
        """
        for arrival in arrivals:
            self.gpu.wait(arrival.copied)
            self.copies.enter(arrival)
        self._on_gpu(layer_pass, [arrival.key[1] for arrival in arrivals])

    def _fetch(self, place: int, queued: deque[int]) -> list[Arrival]:
        """Begin to copy ``queued`` experts, which are in RAM, as far as there is room; other
        layers' experts are evicted.
        """
        cache, arrivals = self.slots.cache, list[Arrival]()
        while queued:
            if not cache.room:
                cache.widen()
            if not cache.room:
                break
            arrivals.append(self.copies.bring(place, queued.popleft()))
        return arrivals

    def _on_gpu(self, layer_pass: _EagerPass, experts: Sequence[int]) -> None:
        """Start the GPU's kernels for ``experts``; those that no row chose are skipped."""
        if not experts:
            return
        ops, routed = self.gpu.ops, layer_pass.routed
        with self.gpu.task(layer_pass.label), ops.scope():
            table = self.slots.cache.tables[routed.place]
            ops.run_experts(
                routed.rows, routed.routing, table, routed.spec, layer_pass.slots_array, experts
            )
        self.slots.used(routed.place)

    def _on_cpu(
        self, layer_pass: _EagerPass | RecordedPass, experts: Sequence[int], demanded: Demanded
    ) -> None:
        """Compute experts in RAM, then others as they arrive from the SSD; send results to the
        GPU.
        """
        place = layer_pass.routed.place
        pool = self.memory.pool(place)
        rows = layer_pass.rows()
        slots = layer_pass.host_slots(rows)

        def compute(group: Sequence[int]) -> None:
            with self.clock.task("cpu", layer_pass.label):
                table = pool.cache.tables[place]
                self.host.run_experts(
                    rows, layer_pass.routing, table, layer_pass.routed.spec, slots, group
                )
            pool.computed(place, group)

        absent = set(demanded.absent)
        present = [expert for expert in experts if expert not in absent]
        if present:
            compute(present)
        for expert in demanded.absent:
            pool.arrive(place, expert, layer_pass.check)
            compute([expert])
        computed = np.zeros(pool.cache.count, np.bool_)
        computed[experts] = True
        layer_pass.deliver(slots, computed[layer_pass.routing.chosen.reshape(-1)])


class _EagerPass:
    """One layer in a pass that is not recorded: see ``ExpertPass``.

    ``received`` waits for the rows on the host; it is None in a long pass, in which the GPU
    computes all experts in RAM or VRAM. ``findable`` are the experts in the GPU's table.
    """

    slots_array: Array
    findable: Mask

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
        self.unread = routed.routing.away  # the host does not know the routing yet
        self.label = f"layers.{routed.layer}.experts"
        self._finished = False

    def slots(self) -> Array:
        """The slots of all chosen experts."""
        slots = self._experts.compute(self)
        self._finished = True
        return slots

    def end(self) -> None:
        """Unlock the layer's experts; an idle link fills a slot."""
        place = self.routed.place
        self._experts.end(place, failed=not self._finished)
        if self.received is not None and self._finished:
            self._experts.fill(place)

    def rows(self) -> Array:
        """The rows on the host."""
        gpu = self._experts.gpu
        return gpu.to_host(self.routed.rows) if self.received is None else self.received()

    def host_slots(self, rows: Array) -> Array:
        """The array for the host's results."""
        return self._experts.host.expert_slots(rows, self.routing)

    def deliver(self, slots: Array, filled: Mask) -> None:
        """Copy the host's ``filled`` slots to the GPU."""
        gpu = self._experts.gpu
        index = filled.nonzero()[0]
        rows = gpu.to_gpu(cast(Array, cast(Floats, slots)[index]))
        with gpu.ops.scope():
            self.slots_array = gpu.ops.put_slots(self.slots_array, index, rows)
