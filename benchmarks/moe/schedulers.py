"""Simulated passes of a mixture under each way to place and schedule experts, on a trace.

Attention, routers and shared experts are on the GPU in all of them: the router's choice goes to the
CPU, shared experts are computed meanwhile, and what the CPU computes comes back. Copies go over one
link, one after another, and go on past the layer that asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.moe.costs import LayerCosts
from benchmarks.moe.policies import POLICIES
from benchmarks.moe.routing_trace import RoutingTrace
from benchmarks.moe.rules import all_on, greedy, q_star
from localrt.offload.experts.assignment import (
    Assignment,
    Device,
    ExpertCosts,
    Ready,
    split_misses,
)
from localrt.offload.experts.cache import Demand, ExpertCache
from localrt.offload.experts.scheduler import schedule

__all__ = ["SCHEDULERS", "Outcome", "Scheduler", "hottest", "simulate", "spread"]

Assign = Callable[[Demand, ExpertCosts, Ready], Assignment]


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How a layer's experts are assigned, and what the cache does.

    ``starts`` is what it holds at first: nothing, experts of every layer alike, or those used most
    in the passes that are not measured. ``fixed`` never changes that. ``fills`` uses the idle link
    to bring in the layer's best absent expert, if it is worth more than what goes.
    """

    assign: Assign
    policy: str = "learned"
    starts: str = "spread"
    fixed: bool = False
    fills: bool = False


def _q_star(demand: Demand, costs: ExpertCosts, ready: Ready) -> Assignment:
    misses = int(np.count_nonzero(~demand.resident))
    # In experts per second; what the CPU reaches beside the copies, and they, make the host's.
    link = 1 / costs.fetch
    host = (1 - costs.link_load) / costs.cpu.at(round(demand.rows.mean())) + link
    fetched = q_star(misses, link_bytes_s=link, host_bytes_s=host)
    return split_misses(fetched, demand.rows, demand.resident, costs, ready)


def _all(device: Device) -> Assign:
    return lambda d, costs, ready: all_on(device, d.rows, d.resident, costs, ready)


def _schedule(demand: Demand, costs: ExpertCosts, ready: Ready) -> Assignment:
    return schedule(demand.rows, demand.resident, costs, ready)


SCHEDULERS: Mapping[str, Scheduler] = {
    "static": Scheduler(_all(Device.GPU), fixed=True),
    "static, most used": Scheduler(_all(Device.GPU), starts="hottest", fixed=True),
    "all CPU": Scheduler(_all(Device.CPU), starts="nothing", fixed=True),
    "all streamed": Scheduler(_all(Device.FETCH), starts="nothing", fixed=True),
    "streamed, LRU": Scheduler(_all(Device.FETCH), policy="lru"),
    "q*": Scheduler(_q_star),
    "greedy": Scheduler(lambda d, c, r: greedy(d.rows, d.resident, c, r)),
    "hybrid, fixed": Scheduler(_schedule, fixed=True),
    "hybrid, MRS": Scheduler(_schedule, policy="mrs"),
    "hybrid": Scheduler(_schedule),
    "hybrid, fills": Scheduler(_schedule, fills=True),
}


@dataclass(slots=True)
class Outcome:
    """Sums over the passes that were measured; seconds are simulated."""

    passes: int = 0
    rows: int = 0
    seconds: float = 0.0
    hits: int = 0
    demands: int = 0
    copies: int = 0
    busy: dict[str, float] = field(default_factory=lambda: {"cpu": 0.0, "gpu": 0.0, "link": 0.0})

    @property
    def hit_rate(self) -> float:
        """Of demands that found their expert on the GPU."""
        return self.hits / max(1, self.demands)

    def add(self, other: Outcome) -> None:
        """The passes of another trace too."""
        for name in ("passes", "rows", "seconds", "hits", "demands", "copies"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.busy = {key: value + other.busy[key] for key, value in self.busy.items()}


def spread(trace: RoutingTrace, slots: int) -> list[tuple[int, int]]:
    """As many experts of every layer, whichever: what is known without having routed anything."""
    header = trace.header
    ordered = [(layer, e) for e in range(header.count) for layer in range(header.layers)]
    return ordered[:slots]


def hottest(trace: RoutingTrace, slots: int) -> list[tuple[int, int]]:
    """The experts that a trace uses most."""
    header = trace.header
    counts = np.zeros((header.layers, header.count), np.int64)
    for layer in range(header.layers):
        chosen = trace.experts[:, layer, : header.used].reshape(-1)
        counts[layer] = np.bincount(chosen, minlength=header.count)
    best = np.argsort(-counts.reshape(-1), kind="stable")[:slots]
    return [divmod(int(key), header.count) for key in best]


def simulate(
    scheduler: Scheduler,
    trace: RoutingTrace,
    costs: LayerCosts,
    *,
    slots: int,
    known: RoutingTrace,
    warm_up: int = 0,
) -> Outcome:
    """The passes of ``trace``, of which the first ``warm_up`` are not counted.

    ``known`` is what a static choice may have been made from.
    """
    header = trace.header
    cache = ExpertCache(
        header.layers,
        header.count,
        header.used,
        max(1, slots),
        policy=POLICIES["lru" if scheduler.fixed else scheduler.policy](
            header.layers, header.count, header.used
        ),
    )
    if scheduler.starts != "nothing":
        for key in (spread if scheduler.starts == "spread" else hottest)(known, slots):
            cache.admit(*key)
    outcome, now, link_free, begun = Outcome(), 0.0, 0.0, 0.0
    for step in trace.steps():
        measured = step.number >= warm_up
        if step.layer == 0:
            begun = now
            now += costs.once
        now += costs.between + costs.crossing
        demand = cache.touch(step.layer, step.experts, step.scores)
        link = max(0.0, link_free - now)
        ready = Ready(gpu=costs.shared, link=link, cpu_back=costs.crossing)
        found = scheduler.assign(demand, costs.experts, ready)
        if found.fetch:
            link_free = now + found.link_end
            if not scheduler.fixed:
                for place in found.fetch:
                    expert = int(demand.experts[place])
                    if cache.room and cache.keeps(step.layer, expert):
                        cache.admit(step.layer, expert)
        copies = len(found.fetch)
        layer_s = max(found.end, costs.shared)
        now += layer_s
        if scheduler.fills and link_free < now:
            # It began when the link became free; it goes on while the next layer is computed.
            best = cache.candidate(step.layer)
            if best is not None:
                cache.admit(step.layer, best)
                link_free = max(link_free, now - layer_s) + costs.experts.fetch
                copies += 1
        cache.release(step.layer)
        if measured:
            outcome.hits += int(np.count_nonzero(demand.resident))
            outcome.demands += len(demand.experts)
            outcome.copies += copies
            outcome.busy["link"] += copies * costs.experts.fetch
            outcome.busy["cpu"] += max(0.0, found.cpu_end) if found.cpu else 0.0
            outcome.busy["gpu"] += (
                costs.between
                + costs.shared
                + sum(costs.experts.gpu.at(int(demand.rows[place])) for place in found.gpu)
            )
            if step.layer == header.layers - 1:
                outcome.seconds += now - begun
                outcome.passes += 1
                outcome.rows += len(step.experts)
    return outcome
