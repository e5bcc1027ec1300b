"""A sparse layer on a card and the CPU at once: each expert where it is done soonest.

The router runs on the card, and experts in its slots are started there before the host knows who
was chosen. It waits once, for that and for the rows: of the other experts some are copied over the
link first and the CPU computes the rest meanwhile, as the scheduler finds by what each takes. Slots
are combined on the card in the order of k: nothing depends on who was first. What is in neither
memory is read from the SSD, and computed by the CPU. A layer whose experts are all on the card
waits for nothing.

A long pass needs nearly all experts of every layer: those in RAM are copied one behind the other,
those of the next layer behind them, and computed at once when they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from localrt.models.layers.moe import Routed, RoutingWatch, SparseMlp
from localrt.models.timing import Clock, Mark
from localrt.offload.cards.clock import later
from localrt.offload.experts.cache import Demand, Key
from localrt.offload.experts.card import CardSlots
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.pool import Demanded
from localrt.offload.experts.scheduler import (
    Assignment,
    ExpertCosts,
    Ready,
    schedule,
)
from localrt.offload.pipeline.lane import StreamedState
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["HybridStage", "Scheduler"]

_HELD_SHARE = 4  # of the RAM's slots, what copies ahead may keep from being given away

Scheduler = Callable[..., Assignment]


@dataclass(slots=True)
class _Turn:
    """One layer's turn in a pass. ``rows`` are those of each expert that is asked for, once known.

    ``crossing``: the card computes all that any memory holds.
    """

    part: SparseMlp
    state: StreamedState
    routed: Routed
    slots: Array
    crossing: bool
    rows: Mapping[int, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Of its tasks."""
        return f"layers.{self.part.layer}.experts"


class HybridStage:
    """Runs the sparse layers whose router is on the card of ``slots``. See ``Experts``.

    ``memory`` holds experts for the CPU, whose ``Ops`` are ``host``; ``costs`` are seconds of an
    expert. In passes of ``card_rows`` rows or more (0: in none) the card computes all that any
    memory holds. ``scheduler``, and whether an idle link ``fills`` slots, may be changed between
    passes.
    """

    hostless = False

    def __init__(
        self,
        slots: CardSlots,
        memory: ExpertMemory,
        host: Ops,
        clock: Clock,
        costs: ExpertCosts,
        *,
        card_rows: int = 0,
    ) -> None:
        self.watch: RoutingWatch | None = None
        self._slots, self._memory = slots, memory
        self._card = slots.card
        self._host = host
        self._clock = clock
        self._costs = costs
        self._card_rows = card_rows
        self.scheduler: Scheduler = schedule
        self.fills = True
        self._link_free = 0.0  # when all copies that were asked for are done, about
        self._copying: list[tuple[int, int, Mark]] = []  # what the RAM must keep meanwhile
        self._arriving: dict[Key, Mark] = {}  # to slots, before anything asked for it
        self._unread: dict[int, Routing] = {}  # of layers that did not need to know

    @property
    def hits(self) -> int:
        """Experts that were on the card when a layer asked for them."""
        return self._slots.cache.hits

    @property
    def uses(self) -> int:
        """All that were asked for."""
        return self._slots.cache.demands

    def run(self, part: SparseMlp, state: StreamedState) -> Array:
        """See ``Experts``: ``state`` is on the card, and so is the sum."""
        place, card, cache = part.place, self._card, self._slots.cache
        routed = part.route(card.ops, state.x)
        routing, away = routed.routing, routed.routing.away
        crossing = 0 < self._card_rows <= routing.rows
        received = None if crossing else card.send(routed.rows, routing, state.mark)
        self._read_earlier(place)
        shared = part.shared_rows(card.ops, routed)
        slots = card.ops.expert_slots(routed.rows, routing)
        turn = _Turn(part, state, routed, slots, crossing)
        try:
            begun = state.mark if crossing else self._begin(turn)
            if not crossing and routing.away and cache.resident(place).all():
                self._slots.used(place, range(cache.count), begun)
                self._unread[place] = routing
                state.mark = begun
            else:
                if away:
                    part.read(routing)
                self._settle(place)
                demand = cache.touch(place, routing.experts, routing.scores)
                turn.rows = dict(zip(demand.experts.tolist(), demand.rows.tolist(), strict=True))
                if received is None:
                    state.mark = self._cross(turn, demand, state.mark)
                else:
                    state.mark = self._share(turn, demand, received, begun)
        except BaseException:
            self.settle()  # copies that nobody has waited for yet: they have slots already
            raise
        finally:
            self._memory.pool(place).done(place)
            cache.release(place)
        if not crossing:
            self._fill(place, state.mark)
        return part.combine(card.ops, turn.slots, routing, shared)

    @property
    def reclaimable(self) -> int:
        """Bytes that ``give_back`` could free."""
        return self._slots.reclaimable

    def give_back(self, nbytes: int) -> int:
        """Have ``nbytes`` less of the card's slots, between passes; the bytes freed."""
        self.settle()
        return self._slots.give_back(nbytes)

    def settle(self) -> None:
        """Return when nothing is on its way to a slot: their memory may be given back then."""
        self._settle(None)
        self._arriving.clear()

    def _time(self, mark: Mark) -> float:
        """Seconds on the clock: a virtual one's are those of the mark."""
        return mark if isinstance(mark, float) else self._clock.now()

    def _bring(self, place: int, expert: int, mark: Mark) -> Mark:
        """Copy an expert that is in RAM; how long the link has to do is kept count of."""
        data = self._memory.pool(place).data(place, expert)
        there = self._slots.bring((place, expert), data, mark)
        self._memory.pool(place).cache.hold(place, [expert])
        self._copying.append((place, expert, there))
        begin = max(self._link_free, self._time(mark))
        self._link_free = there if isinstance(there, float) else begin + self._costs.fetch
        return there

    def _settle(self, turn: int | None) -> None:
        """Copies have ended: RAM need not keep what they read.

        In the ``turn`` of a layer those on their way are not waited for, unless RAM has too little
        that may go; for those of the layer itself the card waits, not the host.
        """
        left = list[tuple[int, int, Mark]]()
        for place, expert, there in reversed(self._copying):
            cache = self._memory.pool(place).cache
            spared = place == turn or len(left) < cache.capacity // _HELD_SHARE
            if turn is not None and spared and not self._card.ended(there):
                left.append((place, expert, there))
                continue
            self._card.settled(there)
            cache.let_go(place, [expert])
        self._copying = left[::-1]

    def _read_earlier(self, place: int) -> None:
        """What a layer that waited for nothing chose in the pass before: it has come long ago."""
        routing = self._unread.pop(place, None)
        if routing is not None:
            self._slots.cache.touch(place, routing.experts, routing.scores)
            self._slots.cache.release(place)

    def _fill(self, place: int, mark: Mark) -> None:
        """While the link has nothing to do: the layer's expert that is most worth a slot."""
        if not self.fills or self._link_free > self._time(mark):
            return
        expert = self._slots.cache.candidate(place)
        if expert is not None and self._memory.pool(place).holds(place, expert):
            self._arriving[place, expert] = self._bring(place, expert, mark)

    def _ahead(self, place: int, mark: Mark) -> None:
        """What the next layer will want of RAM follows at once, as far as there is room for it."""
        cache = self._slots.cache
        if place >= cache.layers:
            return
        pool, resident = self._memory.pool(place), cache.resident(place)
        here, absent = np.flatnonzero(resident).tolist(), np.flatnonzero(~resident).tolist()
        most = pool.cache.capacity // _HELD_SHARE
        cache.hold(place, here)
        for expert in absent:
            if not cache.room or len(self._copying) >= most:
                break
            if pool.holds(place, expert):
                self._arriving[place, expert] = self._bring(place, expert, mark)
        cache.let_go(place, here)

    def _begin(self, turn: _Turn) -> Mark:
        """Start what is in slots, whoever was chosen of it; returns when it is done."""
        place, routing, mark = turn.part.place, turn.routed.routing, turn.state.mark
        resident = self._slots.cache.resident(place)
        if routing.away:
            held = resident.nonzero()[0].tolist()
        else:
            loads = routing.loads(len(resident))
            turn.rows = dict(enumerate(loads.tolist()))
            held = (resident & (loads > 0)).nonzero()[0].tolist()
        for expert in held if self._arriving else ():
            if (arrived := self._arriving.pop((place, expert), None)) is not None:
                self._card.wait(arrived)
                mark = later(mark, arrived)
        return self._compute(turn, held, mark)

    def _share(
        self, turn: _Turn, demand: Demand, received: Callable[[], tuple[Array, Mark]], begun: Mark
    ) -> Mark:
        """What is not in slots, by whoever is the first to have it; returns when all is done.

        Copies begin first, then the card's kernels: both go on while the CPU computes.
        """
        place, mark, costs = turn.part.place, turn.state.mark, self._costs
        if demand.resident.any():
            self._slots.used(place, demand.experts[demand.resident].tolist(), begun)
        if demand.resident.all():
            return begun
        ready = Ready(link=max(0.0, self._link_free - self._time(mark)))
        plan = self.scheduler(demand.rows, demand.resident, costs, ready)
        chosen = demand.experts.tolist()
        absent = demand.experts[~demand.resident].tolist()
        wanted = self._memory.pool(place).demand(place, turn.routed.routing, mark, only=absent)
        fetched = self._fetch(turn, [chosen[i] for i in plan.fetch], wanted, mark)
        on_card = self._at_once(turn, fetched, begun)
        rest = [expert for expert in absent if expert not in fetched]
        if not rest:
            return on_card
        return later(on_card, self._on_cpu(turn, rest, wanted, *received()))

    def _cross(self, turn: _Turn, demand: Demand, mark: Mark) -> Mark:
        """All by the card that any memory holds, the rest by the CPU; returns when it is done."""
        place = turn.part.place
        held = demand.experts[demand.resident].tolist()
        rest = demand.experts[~demand.resident].tolist()
        wanted = self._memory.pool(place).demand(place, turn.routed.routing, mark, only=rest)
        arriving = {e: self._arriving.pop((place, e)) for e in held if (place, e) in self._arriving}
        fetched = self._fetch(turn, rest, wanted, mark)
        self._ahead(place + 1, mark)
        on_card = self._on_card(turn, [expert for expert in held if expert not in arriving], mark)
        on_card = self._at_once(turn, arriving | fetched, on_card)
        rest = [expert for expert in rest if expert not in fetched]
        while rest:  # more than there are slots: the next ones take the place of what is done
            self._slots.cache.finish(place, [*held, *fetched])
            more = self._fetch(turn, rest, wanted, mark)
            if not more:
                break
            on_card = self._at_once(turn, more, on_card)
            fetched |= more
            rest = [expert for expert in rest if expert not in more]
        if not rest:
            return on_card
        sent = self._card.to_host(turn.routed.rows, mark)
        return later(on_card, self._on_cpu(turn, rest, wanted, *sent))

    def _at_once(self, turn: _Turn, arrivals: Mapping[int, Mark], mark: Mark) -> Mark:
        """All are computed by one launch, when they are there: the card waits, not the host.

        One by one they would begin sooner, but a copy takes many times as long as a product, and
        each launch takes the host as long as some products.
        """
        for arrived in arrivals.values():
            self._card.wait(arrived)
            mark = later(mark, arrived)
        return self._on_card(turn, list(arrivals), mark)

    def _fetch(
        self, turn: _Turn, experts: Sequence[int], wanted: Demanded, mark: Mark
    ) -> dict[int, Mark]:
        """Begin to copy those that are in RAM and worth a slot: when each is there."""
        cache, arrivals, present = self._slots.cache, dict[int, Mark](), set(wanted.present)
        for expert in sorted(present.intersection(experts)) if turn.crossing else experts:
            if expert not in present:
                continue
            if turn.crossing and not cache.room:
                cache.widen()
            if cache.room:
                arrivals[expert] = self._bring(turn.part.place, expert, mark)
        return arrivals

    def _on_card(self, turn: _Turn, experts: Sequence[int], mark: Mark) -> Mark:
        if experts:
            mark = self._compute(turn, experts, mark)
            self._slots.used(turn.part.place, experts, mark)
        return mark

    def _compute(self, turn: _Turn, experts: Sequence[int], mark: Mark) -> Mark:
        """Start the card's kernels for those of ``experts`` that were chosen."""
        if not experts:
            return mark
        card, routed, part = self._card, turn.routed, turn.part
        nbytes, macs = self._slots.expert_size

        def seconds(rows: int) -> float | None:
            return card.cost_s(nbytes, macs, rows, unpacks=False)

        # A virtual card's; a real one's kernels take theirs, whoever was chosen.
        cost = None
        if seconds(1) is not None:
            cost = sum(seconds(turn.rows[expert]) or 0.0 for expert in experts)
        started = self._clock.begin("gpu")
        with card.ops.scope():
            table = self._slots.cache.tables[part.place]
            card.ops.run_experts(
                routed.rows, routed.routing, table, part.spec.expert, turn.slots, experts
            )
        return self._clock.end("gpu", turn.label, started, after=mark, cost_s=cost)

    def _on_cpu(
        self, turn: _Turn, experts: Sequence[int], wanted: Demanded, normed: Array, mark: Mark
    ) -> Mark:
        """Those in RAM, then each as it comes from the SSD; their results go to the card."""
        routing, place = turn.routed.routing, turn.part.place
        pool = self._memory.pool(place)
        same = self._host is self._card.ops
        slots = turn.slots if same else self._host.expert_slots(normed, routing)

        def compute(group: Sequence[int], after: Mark) -> Mark:
            started = self._clock.begin("cpu")
            table, spec = pool.cache.tables[place], turn.part.spec.expert
            self._host.run_experts(normed, routing, table, spec, slots, group)
            mark = self._clock.end("cpu", turn.label, started, after=after)
            pool.computed(place, group, mark)
            return mark

        absent = set(wanted.absent)
        present = [expert for expert in experts if expert not in absent]
        if present:
            mark = compute(present, mark)
        for expert in wanted.absent:
            there = pool.arrive(place, expert, mark, turn.state.check)
            mark = compute([expert], later(mark, there))
        if same:
            return self._card.to_card(normed, mark)[1]
        asked = np.zeros(pool.cache.count, np.bool_)
        asked[experts] = True
        index = asked[routing.chosen.reshape(-1)].nonzero()[0]
        rows, mark = self._card.to_card(slots[index], mark)
        with self._card.ops.scope():
            turn.slots = self._card.ops.put_slots(turn.slots, index, rows)
        return mark
