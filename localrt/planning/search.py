"""Placement search: for at most six choices of rings the best counts, and a replay of the winner.

The fixed parts are subtracted from the budgets; the rest is placed. A small ring leaves more room
for resident weights; a large one hides more of the gaps between reads. What a placement takes is
first a formula's (``solve.pass_time``): that is all that tables of many models use. The plan of a
model on this machine has the times of a replay (``simulate.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from localrt.common.files import PAGE
from localrt.common.formatting import format_bytes
from localrt.offload.account import (
    PREFILL_ROWS,
    activation_nbytes,
    fitting_rows,
    gpu_rows_choices,
    gpu_scratch_nbytes,
    kv_buffer_nbytes,
    kv_tail_nbytes,
    placed_account,
)
from localrt.offload.placement import KvPlace, Placement, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import RESOURCES, Costs, PassTime, disk_share, with_long_passes
from localrt.planning.forecast import PROMPT_TOKENS, Forecast, PlanRequest, Prediction
from localrt.planning.simulate import simulate
from localrt.planning.solve import (
    AttentionPlace,
    Counts,
    Problem,
    UnitClass,
    arrange,
    classes_of,
    is_feasible,
    pass_time,
    solve_greedily,
)
from localrt.quant.formats.tiled import TILE_ROWS

EVEN_EXPERTS = "experts are taken to be chosen evenly: a cache that follows the text reads less"
"""The note on the plan of every mixture."""

_NEARLY = 1.1  # up to this multiple of the minimum counts as nearly minimal
_MOST_SLOTS = 6
_LEAST_SHARE = 0.01  # smallest share of an MLP that is worth the exchange between GPU and CPU
# Prompt tokens per answer token: 2,048 to 256.
_PROMPT_TOKENS = 8
# Rings, as a search over many sizes chose them for the models of the table on six PCs: a dense
# model's in RAM has half a unit more than the largest (with 10 MB more reads have no gaps), a
# mixture's two units that are not experts; in GPU memory one unit, or two.
_RING_TIMES, _RING_MORE, _MIXTURE_RING_TIMES = 1.5, 10 << 20, 2
_GPU_RING_TIMES = (1.05, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Bytes for weights, KV caches and rings: each budget without its fixed parts.

    ``kv``: bytes of each layer's cache at the full context. ``kv_ssd``: layers with it on the SSD.
    """

    ram: int
    vram: int
    kv: tuple[int, ...]
    kv_ssd: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RingSize:
    """Bytes of a ring, and of the largest unit that may pass through it."""

    nbytes: int = 0
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Counts that fit with these rings, and their times by formulas: of a token's pass, and seconds
    per token of a prompt (0 without a GPU).

    ``costs`` are those of the units as split. ``rows``: those of a prompt's pass.
    """

    costs: Costs
    rooms: Rooms
    problem: Problem
    counts: Counts
    ram: RingSize
    vram: RingSize
    rows: int
    split: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    token: PassTime
    prompt_s: float

    @property
    def seconds(self) -> float:
        """Seconds of a pass and of its share of prompt tokens: what the search minimizes."""
        return self.token.seconds + _PROMPT_TOKENS * self.prompt_s

    def placement(self) -> Placement:
        """Arrange the counts in the order of a pass."""
        costs = self.costs
        where = arrange(costs.shape.units, self.problem.classes, self.counts)
        moved = any(where[unit.name].read for unit in costs.shape.units if unit.macs)
        copied = any(place.copied for place in where.values())
        placement = with_long_passes(
            costs,
            Placement(
                where=_with_small_units(costs, where),
                kv=_kv_places(costs, where, self.rooms),
                ram_ring=self.ram.nbytes if moved else 0,
                vram_ring=self.vram.nbytes,
                prefill_rows=self.rows,
                split=self.split,
            ),
        )
        if not (copied or placement.crossing):  # leave out an unused ring
            placement = replace(placement, vram_ring=0)
        return placement

    def with_held(self, held: int) -> PassTime:
        """Return the time of a token's pass with ``held`` tokens in the cache."""
        classes = classes_of(replace(self.costs, held=held), _kv_in_memory(self.rooms))
        return pass_time(replace(self.problem, classes=classes), self.counts)

    def prompt(self, rows: int) -> float:
        """Return the seconds of a prompt's pass: the CPU computes its units, or the GPU if
        faster.
        """
        costs, problem = self.costs, self.problem
        many = costs.of_rows(rows)
        units = {unit.name: unit for unit in costs.shape.units}
        read = copied = by_cpu = crossing = by_gpu = stays = 0.0
        for group, places in zip(problem.classes, self.counts, strict=True):
            unit, share, each = units[group.names[0]], group.use, rows
            movable = group.kind == "mlp" and group.nbytes <= self.vram.nbytes
            if group.kind == "expert":
                share, each = many.touched(unit.use)
                movable = bool(problem.link_bytes_s)
            for where, count in places.items():
                used = count * share
                read += used * group.nbytes * where.read
                copied += used * group.nbytes * where.copied
                if where.on_gpu:
                    stays += used * many.gpu(unit, each)
                elif movable:
                    by_cpu += used * many.cpu(unit, each)
                    by_gpu += used * many.gpu(unit, each)
                    crossing += used * group.nbytes
                else:
                    stays += used * many.cpu(unit, each)
        disk, link = read / problem.ssd_bytes_s, problem.link_bytes_s
        ways = [max(disk, copied / link if link else 0.0, stays + by_cpu)]
        if crossing:
            ways.append(max(disk, (copied + crossing) / link, stays + by_gpu))
        return min(ways) + costs.per_pass()


class _Problems:
    """The placement problems of one model in ``rooms``, which rings turn into solutions.

    Each listed expert stands for ``expert_times``.
    """

    def __init__(self, costs: Costs, rooms: Rooms, rows: int = 1, expert_times: int = 1) -> None:
        self._costs, self._rooms, self._rows = costs, rooms, rows
        self._classes = classes_of(costs, _kv_in_memory(rooms))
        self._gpu = costs.machine.gpu is not None and rooms.vram > 0
        self._mixture = bool(costs.shape.experts)
        self._slots = _slots(self._classes)
        if expert_times > 1:
            self._classes = tuple(
                replace(group, names=group.names * (expert_times if group.kind == "expert" else 1))
                for group in self._classes
            )

    def solutions(self) -> list[Solution]:
        """Return solutions for at most six choices of rings: without reads if that fits, else with
        the usual rings, else with the smallest.
        """
        gpu_rings = [RingSize()]
        if self._gpu and self._slots:
            times = _GPU_RING_TIMES[1:] if self._mixture else _GPU_RING_TIMES
            sizes = (_whole(each * self._slots[0]) for each in times)
            half = self._rooms.vram / 2
            gpu_rings += [RingSize(size, self._slots[0]) for size in sizes if size <= half]
        tight = [RingSize(slot, slot) for slot in self._slots]
        rings = [self._usual_ring(slot) for slot in self._slots]
        usual = itertools.product([*rings[:1], *tight[:1], *rings[1:2]], gpu_rings[:2])
        for choices in (
            itertools.product([RingSize()], gpu_rings),
            usual,
            itertools.product(tight, [RingSize()]),
        ):
            found = [each for rings in choices for each in self._solved(*rings)]
            if found:
                return found
        return []

    def fits(self) -> bool:
        """Whether any placement fits, without looking for a good one."""
        rings = [RingSize(), *(RingSize(slot, slot) for slot in self._slots)]
        return any(next(self._solved(ring, RingSize()), None) is not None for ring in rings)

    def _usual_ring(self, slot: int) -> RingSize:
        times = _MIXTURE_RING_TIMES * slot
        wanted = times if self._mixture else max(slot + _RING_MORE, int(_RING_TIMES * slot))
        return RingSize(max(slot, min(_whole(wanted), self._rooms.ram // 2 // PAGE * PAGE)), slot)

    def _solved(self, ram: RingSize, vram: RingSize) -> Iterator[Solution]:
        """Yield the placement problems for these rings, with counts that fit.

        Attention and KV caches of all layers go to the GPU if they fit; otherwise as many as fit,
        or as many as are best for a token.
        """
        problem = self.problem(ram, vram)
        ways: list[AttentionPlace] = ["anywhere"]
        if self._gpu:
            on_gpu = (group for group in self._classes if problem.attends(group))
            whole = sum(g.count * (g.nbytes + g.kv) for g in on_gpu) <= problem.vram
            ways = ["gpu", "anywhere"] if whole else ["gpu first", "anywhere"]
            if self._costs.shape.shares_caches:
                ways = ["gpu", "host"] if whole else ["host"]
        for way in ways:
            counts = solve_greedily(tried := replace(problem, attention=way))
            if counts is not None:
                yield self.solution(tried, counts, ram, vram)
                if way == "gpu":
                    return

    def problem(self, ram: RingSize, vram: RingSize) -> Problem:
        """Return the placement problem that these rings leave."""
        costs, gpu = self._costs, self._gpu
        machine, (link, cpu) = costs.machine, costs.beside()
        return Problem(
            classes=self._classes,
            ram=self._rooms.ram - ram.nbytes,
            vram=self._rooms.vram - vram.nbytes if gpu else 0,
            ram_slot=ram.slot,
            vram_slot=vram.slot,
            ssd_bytes_s=machine.ssd_bytes_s,
            link_bytes_s=costs.link_bytes_s if gpu else 0.0,
            visit_s=costs.visit() + 2 * costs.crossing() if gpu else 0.0,
            link_loss=1 / link - 1,
            cpu_loss=1 / cpu - 1,
            fixed_s=costs.per_pass(),
            ram_ring=ram.nbytes,
            reached=disk_share(ram.nbytes - ram.slot),
        )

    def solution(
        self,
        problem: Problem,
        counts: Counts,
        ram: RingSize,
        vram: RingSize,
        split: Mapping[str, tuple[float, float]] | None = None,
    ) -> Solution:
        """Return a solution with its times."""
        found = Solution(
            costs=self._costs,
            rooms=self._rooms,
            problem=problem,
            counts=counts,
            ram=ram,
            vram=vram,
            rows=self._rows,
            split=split or {},
            token=pass_time(problem, counts),
            prompt_s=0.0,
        )
        return (
            replace(found, prompt_s=found.prompt(self._rows) / self._rows) if self._gpu else found
        )


def _split_solutions(costs: Costs, rooms: Rooms, rows: int) -> Iterator[Solution]:
    """Yield placements in which GPU and CPU share all MLPs of a dense model: nothing is copied, or
    what the link has time for.

    Everything else is on the GPU, and the rest of its memory is for the GPU's share. The ring has
    room for the pieces of one or two layers that long passes copy.
    """
    shape, machine = costs.shape, costs.machine
    mlps = [unit for unit in shape.units if unit.kind == "mlp"]
    tiled = not (shape.sizes.hidden % TILE_ROWS or shape.sizes.inner % TILE_ROWS)
    if machine.gpu is None or machine.link_bytes_s is None or shape.experts or not (mlps and tiled):
        return
    whole, largest = sum(unit.nbytes for unit in mlps), max(unit.nbytes for unit in mlps)
    others = [unit for unit in shape.units if unit.kind in ("attention", "head")]
    room = rooms.vram - sum(unit.nbytes for unit in others) - sum(rooms.kv)
    if not largest < room < whole:
        return
    # A pass without the pieces of the CPU and the link.
    fixed = costs.per_pass() + sum(costs.gpu(unit) for unit in others)
    fixed += len(mlps) * costs.splitting()
    by_cpu, copying = sum(costs.cpu(unit) for unit in mlps), costs.copy(whole)
    edges = 3 * PAGE + 3 * TILE_ROWS / shape.sizes.inner * largest  # rounding of a layer's pieces
    for layers in (1, 2):
        if whole <= layers * largest:
            return
        gpu = (room - layers * (largest + edges)) / (whole - layers * largest)
        ring = layers * ((1 - gpu) * largest + edges)
        gpu = (room - ring - len(mlps) * PAGE) / whole
        for link in (0.0, (fixed + by_cpu * (1 - gpu)) / (copying + by_cpu)):
            if gpu > 0 and 1 - gpu - link >= _LEAST_SHARE:
                shares = {unit.name: (gpu, link) for unit in mlps}
                found = _split(costs, rooms, rows, shares, int(ring))
                if found is not None:
                    yield found


def _split(
    costs: Costs, rooms: Rooms, rows: int, shares: Mapping[str, tuple[float, float]], ring: int
) -> Solution | None:
    """Return the placement with these pieces, if they fit."""
    costs = replace(costs, shape=costs.shape.split(shares))
    vram = RingSize(ring // PAGE * PAGE, ring // PAGE * PAGE)
    problems = _Problems(costs, rooms, rows)
    problem = replace(problems.problem(RingSize(), vram), attention="gpu")
    tables = {"embedding": Where.RAM}
    counts = [
        {group.only or tables.get(group.kind, Where.VRAM): group.count} for group in problem.classes
    ]
    if not is_feasible(problem, counts):
        return None
    return problems.solution(problem, counts, RingSize(), vram, shares)


def _slots(classes: Sequence[UnitClass]) -> list[int]:
    """Return at most six sizes of units that may be read in a pass, descending."""
    sizes = sorted({group.nbytes for group in classes if group.use > 0})
    while len(sizes) > _MOST_SLOTS:
        # Two sizes that are nearly the same need nearly the same ring: keep the larger.
        ratios = [high / low for low, high in itertools.pairwise(sizes)]
        del sizes[ratios.index(min(ratios))]
    return sizes[::-1]


def _whole(nbytes: float) -> int:
    """Round up to whole pages."""
    return -(-int(nbytes) // PAGE) * PAGE


def _kv_in_memory(rooms: Rooms) -> tuple[int, ...]:
    return tuple(0 if layer in rooms.kv_ssd else size for layer, size in enumerate(rooms.kv))


def _with_small_units(costs: Costs, where: Mapping[str, Where]) -> dict[str, Where]:
    """Add the small units (norms), placed with the head; return all units in order."""
    head = next((unit for unit in costs.shape.units if unit.kind == "head"), None)
    on_gpu = head is not None and where[head.name].on_gpu
    small = Where.VRAM if on_gpu else Where.RAM
    return {unit.name: where.get(unit.name, small) for unit in costs.shape.units}


def _kv_places(costs: Costs, where: Mapping[str, Where], rooms: Rooms) -> tuple[KvPlace, ...]:
    places: list[KvPlace] = ["ram"] * costs.shape.layers
    for unit in costs.shape.units:
        if unit.kind == "attention" and unit.layer is not None:
            if unit.layer in rooms.kv_ssd:
                places[unit.layer] = "ssd"
            elif where[unit.name].on_gpu:
                places[unit.layer] = "vram"
    return tuple(places)


# -- within the budgets of a request ---------------------------------------------------------------


def fits(request: PlanRequest) -> bool:
    """Whether a plan exists; faster than finding the best one."""
    if request.uses_gpu and fits(request.without_gpu()):
        return True
    request, rooms, _ = _prepared(request)
    if _can_place(request, rooms):
        return True
    if not request.kv_on_ssd or request.uses_gpu:
        return False
    return _can_place(request, _with_kv_on_ssd(request, rooms, request.shape.layers))


def _can_place(request: PlanRequest, rooms: Rooms) -> bool:
    return rooms.ram > 0 and rooms.vram >= 0 and _Problems(request.costs(), rooms).fits()


def find_solution(request: PlanRequest) -> Solution | None:
    """Return the solution that takes least time by the formulas; None if nothing fits."""
    tried: dict[int, Solution] = {}
    for most in _rows_choices(request):
        placed, rooms, rows = _prepared(request, most)
        found = _best(placed, rooms, rows)
        if found is None and request.kv_on_ssd and not request.uses_gpu and request.shape.on_ssd:
            layers = _layers_on_ssd(placed, rooms)
            found = _best(placed, _with_kv_on_ssd(placed, rooms, layers), rows)
        if found is not None:
            tried[most] = found
    return tried.get(_best_rows(tried))


def best_solution(costs: Costs, rooms: Rooms, rows: int, *, splits: bool = True) -> Solution | None:
    """Return the best solution for prompts' passes of ``rows`` rows; None if nothing fits."""
    if rooms.ram <= 0 or rooms.vram < 0:
        return None
    found = _Problems(costs, rooms, rows, expert_times(costs.shape)).solutions()
    found += _split_solutions(costs, rooms, rows) if splits else ()
    return min(found, key=lambda each: each.seconds, default=None)


def _best(request: PlanRequest, rooms: Rooms, rows: int) -> Solution | None:
    return best_solution(request.costs(), rooms, rows, splits=request.splits)


def _rows_choices(request: PlanRequest) -> tuple[int, ...]:
    """Return the most rows that a prompt's pass may have with a GPU."""
    if not request.uses_gpu:
        return (PREFILL_ROWS,)
    sizes, most = request.shape.sizes, request.most_prefill_rows
    return (*gpu_rows_choices(sizes, request.budgets, most), PREFILL_ROWS)


def _best_rows(found: Mapping[int, Solution]) -> int:
    """Choose the most rows of a prompt's pass from the solutions with each.

    More rows make prefill faster, but take memory from weights. The result is the fewest rows with
    nearly the fastest prefill, among those with nearly the least total time and time of a token.
    """
    least = _NEARLY * min((each.seconds for each in found.values()), default=0.0)
    token = _NEARLY * min((each.token.seconds for each in found.values()), default=0.0)
    able = {
        rows: each.prompt_s
        for rows, each in found.items()
        if each.seconds <= least and each.token.seconds <= token
    }
    quickest = _NEARLY * min(able.values(), default=0.0)
    return min((rows for rows, each in able.items() if each <= quickest), default=PREFILL_ROWS)


def _layers_on_ssd(request: PlanRequest, rooms: Rooms) -> int:
    """Return the fewest layers whose KV caches have to be on the SSD."""
    low, high = 0, len(request.shape.on_ssd)
    while high - low > 1:
        middle = (low + high) // 2
        enough = _can_place(request, _with_kv_on_ssd(request, rooms, middle))
        low, high = (low, middle) if enough else (middle, high)
    return high


def _with_kv_on_ssd(request: PlanRequest, rooms: Rooms, layers: int) -> Rooms:
    """Move the KV caches of the first ``layers`` to the SSD, except those that layers share, and
    subtract the RAM that they still need.
    """
    shape, kv_format = request.shape, request.kv_format
    kept = {layer.reads for layer in shape.kv} | {
        number for number, layer in enumerate(shape.kv) if layer.reads is not None
    }
    buffers = kv_buffer_nbytes(shape, kv_format, request.ctx)
    tails = request.sequences * kv_tail_nbytes(shape, kv_format, layers)
    on_ssd = frozenset(shape.on_ssd[:layers]) - kept
    return replace(rooms, ram=rooms.ram - buffers - tails, kv_ssd=on_ssd)


def _prepared(request: PlanRequest, longest: int = PREFILL_ROWS) -> tuple[PlanRequest, Rooms, int]:
    """Return the request without a GPU that is not used, the bytes left by the fixed parts, and the
    rows of a prompt's pass, at most ``longest``.
    """
    if not request.uses_gpu:
        request = replace(request, machine=request.machine.without_gpu())
    shape, budgets = request.shape, request.budgets
    most = max(min(request.most_prefill_rows, longest), request.rows)
    prefill_rows = most
    if most <= PREFILL_ROWS or not request.uses_gpu:
        prefill_rows = fitting_rows(shape.sizes, budgets.ram, most)
    rows = max(prefill_rows, request.rows, request.sequences)
    activations = activation_nbytes(shape.sizes, rows)
    small = sum(unit.nbytes for unit in shape.units if unit.kind == "norm")
    process = budgets.process_bytes(shape.sizes.vocab)
    ram = budgets.ram - process - budgets.scratch - activations - small
    vram = 0
    if request.uses_gpu:
        scratch = gpu_scratch_nbytes(shape.sizes, rows)
        vram = budgets.vram - budgets.context_bytes() - scratch - small
    # KV caches of all sequences at the full context.
    sizes = shape.kv_nbytes(request.kv_format, request.ctx)
    kv = tuple(request.sequences * size for size in sizes)
    return request, Rooms(ram=ram, vram=vram, kv=kv), prefill_rows


def expert_times(shape: ModelShape) -> int:
    """Return how many experts each listed expert represents; 1 if all are listed."""
    if shape.experts is None:
        return 1
    listed = len(shape.routed) / len({unit.layer for unit in shape.routed})
    return round(shape.experts.count / listed)


def whole_nbytes(shape: ModelShape) -> int:
    """Return the packed bytes of a whole model, including experts that are not listed."""
    times = expert_times(shape)
    return sum(unit.nbytes * (times if unit.kind == "expert" else 1) for unit in shape.units)


# -- forecasts -------------------------------------------------------------------------------------


def estimate(request: PlanRequest) -> Prediction | None:
    """Return the speed of the best placement by formulas, in milliseconds; None if nothing fits."""
    request = request.with_usable_gpu()
    found = find_solution(request)
    if found is None and request.uses_gpu:
        found = find_solution(request := request.without_gpu())
    return None if found is None else _estimated(request, found)


def find_forecast(request: PlanRequest) -> Forecast | None:
    """Return the best plan, or None if nothing fits.

    The times of a model whose file is not here (``request.quantization``) are the formulas', as in
    tables of models; others are a replay's.
    """
    solution, notes = (
        find_solution(request),
        list(filter(None, (request.note, *request.shape.notes))),
    )
    if solution is None:
        plan = find_forecast(request.without_gpu()) if request.uses_gpu else None
        if plan is None:
            return None
        note = f"{format_bytes(request.budgets.vram)} of GPU memory are too little to be of use"
        return replace(plan, notes=(*plan.notes, note))
    if not request.uses_gpu:
        request = replace(request, machine=request.machine.without_gpu())
    shape, placement = request.shape, solution.placement()
    if layers := placement.kv.count("ssd"):
        notes.append(f"keys and values of {layers} layers live on the SSD: they do not fit in RAM")
    if shape.experts is not None:
        notes.append(EVEN_EXPERTS)
    if placement.prefill_rows < min(PREFILL_ROWS, request.most_prefill_rows):
        notes.append(f"prompts go {placement.prefill_rows} tokens at a time, to fit the budget")
    return Forecast(
        request=request,
        placement=placement,
        prediction=(
            _estimated(request, solution, whole=True)
            if request.quantization
            else _replayed(request, solution, placement)
        ),
        memory=placed_account(
            shape,
            request.budgets,
            placement,
            ctx=request.ctx,
            kv_format=request.kv_format,
            sequences=request.sequences,
            rows=max(placement.prefill_rows, request.rows, request.sequences),
        ),
        notes=tuple(notes),
    )


def _estimated(request: PlanRequest, solution: Solution, *, whole: bool = False) -> Prediction:
    """Return the formulas' times; ``whole``: also those with a full context."""
    rows = solution.rows
    page = solution.prompt(PREFILL_ROWS)
    return _predicted(
        request,
        solution,
        token=solution.token,
        full=solution.with_held(request.ctx) if whole else None,
        prefill_tok_s=rows / (page if rows == PREFILL_ROWS else solution.prompt(rows)),
        page_s=page * PROMPT_TOKENS / PREFILL_ROWS,
    )


def _replayed(request: PlanRequest, solution: Solution, placement: Placement) -> Prediction:
    """Replay a token, prompts, and a token at the full context."""

    def prompt_seconds(rows: int) -> float:
        held = max(0, min(request.ctx, 512) - rows) // 2
        costs = request.costs(rows=rows, held=held)
        return simulate(costs, placement, passes=2, warm_up=1).seconds

    rows = placement.prefill_rows
    prompt, page_rows = prompt_seconds(rows), min(PROMPT_TOKENS, rows)
    page = prompt if page_rows == rows else prompt_seconds(page_rows)
    return _predicted(
        request,
        solution,
        token=simulate(request.costs(), placement),
        full=simulate(request.costs(held=request.ctx), placement),
        prefill_tok_s=rows / prompt,
        page_s=page * PROMPT_TOKENS / page_rows,
    )


def _predicted(
    request: PlanRequest,
    solution: Solution,
    *,
    token: PassTime,
    full: PassTime | None,
    prefill_tok_s: float,
    page_s: float,
) -> Prediction:
    placed = [
        (where, count * group.nbytes, group.use)
        for group, places in zip(solution.problem.classes, solution.counts, strict=True)
        for where, count in places.items()
    ]
    return Prediction(
        tok_s=request.sequences / token.seconds,
        ceiling_tok_s=request.sequences / token.bound,
        bottleneck=max(RESOURCES, key=lambda name: token.busy[name]),
        efficiency=token.efficiency,
        prefill_tok_s=prefill_tok_s,
        page_s=page_s,
        held=request.held_tokens,
        full_context_tok_s=None if full is None else request.sequences / full.seconds,
        nbytes=token.nbytes,
        busy=token.busy,
        waits=token.waits,
        pass_s=token.seconds,
        weights=sum(nbytes for _, nbytes, _ in placed),
        needed=round(sum(nbytes * use for _, nbytes, use in placed)),
        on_gpu=sum(nbytes for where, nbytes, _ in placed if where is Where.VRAM),
        by_cpu=round(sum(nbytes * use for where, nbytes, use in placed if where is Where.RAM)),
        thinks=request.thinks,
        gpu_unused=request.gpu_unused,
    )
