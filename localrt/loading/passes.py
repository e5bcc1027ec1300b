"""Measures passes of a placed model, once for each GPU, to correct forecasts.

Rates are measured for kernels and copies alone. In a pass these run at the same time, and the host
adds work around each of them. The corrections are what passes took by the pipeline's own clock, as
multiples of what the rates predict.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from threading import Event
from typing import NamedTuple

from localrt.common.formatting import format_rate
from localrt.engine.sampling import Sampling, distribution, draw
from localrt.loading.context import LoadContext
from localrt.models.decoder import Decoder
from localrt.models.weight_store import Task
from localrt.offload.pipeline.streamed import StreamedWeights
from localrt.offload.placement import Placement, Where
from localrt.planning.advice import LEAST_GAIN, make_forecast
from localrt.planning.costs import Costs
from localrt.planning.forecast import Forecast, placed_shape
from localrt.planning.machine import Corrections
from localrt.planning.measure import is_busy, keep_corrections
from localrt.planning.predict import on_machine
from localrt.planning.simulate import simulate
from localrt.quant.ops.protocol import RECORDED_PARTS, Batch

_WARM, _MEASURED = 2, 3  # passes; GPU steps are recorded when they recur
_MOST_S = 0.25  # no pass begins later
_LONG_S = 0.2  # longer planned passes are not measured
_TASKS = 10_000  # of a pass, at most
_TURNS = ("cpu", "gpu")
_WITHIN = (".experts", ".host")  # the CPU's tasks within those of the GPU
_SEEN = 0.02  # least share of a pass that the rest of it is given to


def measured(plan: Forecast, streamed: StreamedWeights, context: LoadContext) -> Forecast:
    """Return ``plan`` with its forecast corrected by measured passes; corrections are cached.

    Passes are measured once, only if a GPU works together with CPU or link, and not while other
    programs compute. Notes say if that fails, and if the next load would place units better.
    """
    request, placement = plan.request, plan.placement
    machine, shape = request.machine, placed_shape(plan)
    known = machine.corrections[shape.experts is not None] is not None
    places = (placement.where[unit.name] for unit in shape.units if unit.macs)
    if known or machine.gpu is None or not machine.gpu.kernels:
        return plan
    if all(place is Where.VRAM for place in places) or plan.prediction.pass_s > _LONG_S:
        return plan
    try:
        if is_busy() or not (passes := run_passes(streamed, request.ctx, context.cancel)).seconds:
            return plan
        found = corrections_of(passes, request.costs(held=_WARM + _MEASURED), placement)
        machine = keep_corrections(
            machine, found, shape.experts is not None, context.settings.cache_dir
        )
        plan = on_machine(plan, machine)
        if shape.experts is None:  # a mixture's dense part does not move
            best = make_forecast(plan.request).tok_s
            if best > LEAST_GAIN * plan.tok_s:
                context.notes.append(
                    f"{format_rate(plan.tok_s)} tok/s are expected as measured; when it is loaded "
                    f"again, with weights in other places, about {format_rate(best)}"
                )
    except Exception as error:  # noqa: BLE001 - whatever it is, the model can answer without
        context.notes.append(f"its passes could not be measured: {error}")
    return plan


class Passes(NamedTuple):
    """Measured passes: their tasks, after those of the pass before them; the seconds of each; and
    the share of experts that were in memory.
    """

    tasks: Sequence[Sequence[Task]]
    seconds: Sequence[float]
    expert_hits: float | None


def run_passes(weights: StreamedWeights, capacity: int, cancel: Event | None = None) -> Passes:
    """Decode a few tokens in a cache of their own, without counting them in any statistics."""
    assert weights.gpu is not None, "only passes with a GPU are measured"
    assert weights.gpu.gpu is not None, "the GPU's lane has a GPU"
    gpu, recorder, decoder = weights.gpu.gpu, weights.gpu.recorder, Decoder(weights)
    cache, token, tasks, ended = decoder.cache(capacity), 0, list[list[Task]](), list[float]()
    before, begun = weights.counts(), time.perf_counter()
    if recorder is not None:
        recorder.most_new = _TASKS  # nobody waits for these passes
    try:
        while len(tasks) < _WARM + _MEASURED and not (cancel and cancel.is_set()):
            if len(tasks) > _WARM and ended[-1] - begun > _MOST_S:
                break
            weights.tasks(keep=0)
            weights.tasks(keep=_TASKS)
            logits = decoder.forward(Batch.extend([(cache, [token])]), rows=[0])
            token = draw(distribution(logits[0], Sampling()), 0.5)
            if (last := gpu.record()) is not None:
                last.synchronize()
            gpu.count_times()
            tasks.append(weights.tasks())
            ended.append(time.perf_counter())
            before = weights.counts() if len(tasks) <= _WARM else before
        used = weights.counts().since(before)
    finally:
        weights.tasks(keep=0)
        weights.forget_counts()
        if recorder is not None:
            recorder.most_new = RECORDED_PARTS
    seconds = [later - earlier for earlier, later in pairwise(ended[_WARM - 1 :])]
    hits = used.expert_hits / used.expert_uses if used.expert_uses else None
    return Passes(tasks[_WARM - 1 :], seconds, hits)


def corrections_of(passes: Passes, costs: Costs, placement: Placement) -> Corrections:
    """Return what passes took, as multiples of what ``costs`` predict for ``placement``.

    In mixtures and split MLPs, GPU and host have one measured time together. In a mixture's
    recorded passes the host's part is assumed to be as planned, since it is small, and the GPU's is
    the rest; with split MLPs it is the other way round.
    """
    mixture, costs = costs.shape.experts is not None, costs.of(placement)
    shared = mixture or bool(placement.split)
    plain = replace(costs, expert_hits=passes.expert_hits)
    plain = replace(plain, machine=replace(costs.machine, shared_s=0.0))
    planned, later = simulate(plain, placement), passes.tasks[1:]
    nbytes = {unit.name: unit.nbytes for unit in costs.shape.units}
    copies = [each for tasks in later for each in tasks if each.resource == "link"]
    copied = sum(nbytes[each.name] for each in copies)
    visits, tokens = _host_seconds(passes.tasks, list(nbytes), placement)
    ways = 2 * plain.crossing()

    def busy(resource: str) -> float:
        return median(_seconds(t for t in tasks if t.resource == resource) for tasks in later)

    link = _ratio(planned.busy["link"], planned.nbytes["link"])
    found = Corrections(
        link=_ratio(_seconds(copies), copied * link),
        cpu=_ratio(busy("cpu"), planned.busy["cpu"] - plain.per_pass()),
        gpu=1.0 if shared else _ratio(busy("gpu"), planned.busy["gpu"]),
        visit=_ratio(median(visits) - ways, plain.visit()) if visits else 1.0,
        token=_ratio(median(tokens) - ways, plain.per_pass()) if tokens else 1.0,
    )
    if shared:
        kind = "gpu" if mixture else "visit"
        both = [replace(found, **{kind: times}) for times in (1.0, 2.0)]
        one, two = (
            simulate(replace(plain, machine=replace(costs.machine, corrections=each)), placement)
            for each in ((None, once) if mixture else (once, None) for once in both)
        )
        if two.seconds - one.seconds > _SEEN * one.seconds:  # else other work hides it
            rest = median(passes.seconds) - one.seconds
            found = replace(found, **{kind: 1 + rest / (two.seconds - one.seconds)})
    return found


def _ratio(measured: float, planned: float) -> float:
    return measured / planned if measured > 0 and planned > 0 else 1.0


def _seconds(tasks: Iterable[Task]) -> float:
    return sum(task.end - task.start for task in tasks)


def _host_seconds(
    passes: Sequence[Sequence[Task]], order: Sequence[str], placement: Placement
) -> tuple[list[float], list[float]]:
    """Return the host's seconds around the CPU's work between two tasks of the GPU, and from a
    token's last task to the next token's first.
    """
    places = {name: number for number, name in enumerate(order)}
    visits, tokens, before, by_cpu = list[float](), list[float](), None, 0.0
    for number, tasks in enumerate(passes):
        chain = [t for t in tasks if t.resource in _TURNS and not t.name.endswith(_WITHIN)]
        chain.sort(key=lambda task: places.get(task.name.partition(" to ")[0], len(places)))
        begins = True
        for task in chain:
            where = placement.where.get(task.name, Where.VRAM)
            if task.resource == "cpu":  # a unit that is read also waits: its time is unknown
                by_cpu += float("inf") if where.read else task.end - task.start
                continue
            host = 0.0 if before is None else task.start - before.end - by_cpu
            # A copied unit may have waited for its copy, and a token for the CPU's head.
            if number and host > 0 and not where.copied and begins is not (by_cpu > 0):
                (tokens if begins else visits).append(host)
            before, by_cpu, begins = task, 0.0, False
    return visits, tokens
