"""Searches for the best placement of one model on one machine within its budgets.

The fixed parts are subtracted from the budgets; the rest is placed. Ring sizes and slots are
searched, counts are solved, schedules are replayed. A small ring leaves more room for resident
weights; a large one hides more of the gaps between reads. Only the replay shows which is better.
Streaming only small units may allow a small ring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from localrt.common.files import PAGE
from localrt.offload.account import (
    PREFILL_ROWS,
    activation_nbytes,
    fitting_rows,
    gpu_rows_choices,
    gpu_scratch_nbytes,
    kv_buffer_nbytes,
    kv_tail_nbytes,
)
from localrt.offload.placement import KvPlace, Placement, Where
from localrt.planning.costs import Costs, with_long_passes
from localrt.planning.forecast import PlanRequest
from localrt.planning.simulate import simulate
from localrt.planning.solve import (
    AttentionPlace,
    Counts,
    Problem,
    UnitClass,
    arrange,
    bound,
    classes_of,
    is_feasible,
    solve_greedily,
)
from localrt.quant.formats.tiled import TILE_ROWS

_NEARLY = 1.1  # up to this multiple of the minimum counts as nearly minimal


_MOST_SLOTS = 6
_LEAST_SHARE = 0.01  # smallest share of an MLP that is worth the exchange between GPU and CPU
_LINK_PARTS = (1.0, 0.9, 0.8)  # shares of what the link can copy without a pause
# Prompt tokens per answer token: 2,048 to 256.
_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Bytes for weights, KV caches and rings: each budget without its fixed parts.

    ``kv``: bytes of each layer's cache at the full context. ``kv_ssd``: layers with it on the SSD.
    """

    ram: int
    vram: int
    kv: tuple[int, ...]
    kv_ssd: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds per pass and per prompt token (0 without a GPU)."""

    pass_s: float
    prompt_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a pass and of its share of prompt tokens: what the search minimizes."""
        return self.pass_s + _PROMPT_TOKENS * self.prompt_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Times):
    """A placement and its times."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class Ring:
    """Bytes of a ring, and of the largest unit that may pass through it."""

    nbytes: int
    slot: int


@dataclass(frozen=True, slots=True)
class Solution:
    """Counts that fit along with these rings. ``costs`` are those of the units as split."""

    costs: Costs
    problem: Problem
    counts: Counts
    ram: Ring
    vram: Ring
    split: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def placement(self, rooms: Rooms, prefill_rows: int) -> Placement:
        """Arrange the counts in the order of a pass."""
        costs = self.costs
        where = arrange(costs.shape.units, self.problem.classes, self.counts)
        moved = any(where[unit.name].read for unit in costs.shape.units if unit.macs)
        copied = any(place.copied for place in where.values())
        placement = with_long_passes(
            costs,
            Placement(
                where=_with_small_units(costs, where),
                kv=_kv_places(costs, where, rooms),
                ram_ring=self.ram.nbytes if moved else 0,
                vram_ring=self.vram.nbytes,
                prefill_rows=prefill_rows,
                split=self.split,
            ),
        )
        if not (copied or placement.crossing):  # leave out an unused ring
            placement = replace(placement, vram_ring=0)
        return placement


def quick_solutions(costs: Costs, rooms: Rooms, expert_times: int = 1) -> Iterator[Solution]:
    """Yield rule-based counts for usual rings. Each listed expert stands for ``expert_times``."""
    if rooms.ram <= 0 or rooms.vram < 0:
        return
    search = _Search(costs, rooms, prefill_rows=1, expert_times=expert_times)
    # Try no ring first; then the smallest ring that the largest unit may pass through.
    none, *others = search.ram_rings
    for ram in (none, *sorted(others, key=lambda ring: (-ring.slot, ring.nbytes))):
        found = [each for vram in search.vram_rings for each in search.solutions(ram, vram)]
        yield from found
        if found:
            return


def split_solutions(
    costs: Costs, rooms: Rooms, parts: Sequence[float] = (1.0,)
) -> Iterator[Solution]:
    """Yield placements in which GPU and CPU share all MLPs of a dense model: nothing is copied, or
    ``parts`` of what the link has time for.

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
        most = (fixed + by_cpu * (1 - gpu)) / (copying + by_cpu)
        for link in (0.0, *(part * most for part in parts)):
            if gpu > 0 and 1 - gpu - link >= _LEAST_SHARE:
                shares = {unit.name: (gpu, link) for unit in mlps}
                found = _split(costs, rooms, shares, int(ring))
                if found is not None:
                    yield found


def _split(
    costs: Costs, rooms: Rooms, shares: Mapping[str, tuple[float, float]], ring: int
) -> Solution | None:
    """Return the placement with these pieces, if they fit."""
    costs = replace(costs, shape=costs.shape.split(shares))
    size = ring // PAGE * PAGE
    search = _Search(costs, rooms, prefill_rows=1)
    problem = replace(search.problem(Ring(0, 0), Ring(size, size)), attention="gpu")
    tables = {"embedding": Where.RAM}
    counts = [
        {group.only or tables.get(group.kind, Where.VRAM): group.count} for group in problem.classes
    ]
    if not is_feasible(problem, counts):
        return None
    return Solution(costs, problem, counts, Ring(0, 0), Ring(size, size), shares)


class _Search:
    """Tries RAM rings with a medium VRAM ring first, then VRAM rings with the best RAM ring."""

    def __init__(
        self, costs: Costs, rooms: Rooms, prefill_rows: int, expert_times: int = 0
    ) -> None:
        self._costs, self._rooms, self._prefill_rows = costs, rooms, prefill_rows
        kv = tuple(0 if layer in rooms.kv_ssd else size for layer, size in enumerate(rooms.kv))
        self._classes = classes_of(costs, kv)
        self._gpu = costs.machine.gpu is not None and rooms.vram > 0
        slots = _slots(self._classes)
        few = bool(costs.shape.experts or expert_times)
        if expert_times > 1:
            self._classes = tuple(
                replace(group, names=group.names * (expert_times if group.kind == "expert" else 1))
                for group in self._classes
            )
        self.ram_rings = list(_ram_rings(slots, rooms, few=few))
        self.vram_rings = list(_vram_rings(slots, rooms, few=few)) if self._gpu else [Ring(0, 0)]
        self.tried: dict[tuple[Ring, Ring], Candidate] = {}

    def best(self) -> Candidate | None:
        """Return the fastest placement found, or None if nothing fits."""
        middle = self.vram_rings[len(self.vram_rings) // 2]
        for ram in self.ram_rings:
            found = self._try(ram, middle)
            if found is None and not self.tried:
                found = self._try(ram, self.vram_rings[0])
            if found is not None and not found.placement.ram_ring:
                break  # nothing is read: no larger ring can help
        if self.tried:
            ram, _ = min(self.tried, key=lambda rings: self.tried[rings].seconds)
            for vram in self.vram_rings:
                self._try(ram, vram)
        return min(self.tried.values(), key=lambda found: found.seconds, default=None)

    def solutions(self, ram: Ring, vram: Ring) -> Iterator[Solution]:
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
                yield Solution(self._costs, tried, counts, ram, vram)
                if way == "gpu":
                    return

    def problem(self, ram: Ring, vram: Ring) -> Problem:
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
        )

    def _try(self, ram: Ring, vram: Ring) -> Candidate | None:
        if (ram, vram) in self.tried:
            return self.tried[ram, vram]
        for each in self.solutions(ram, vram):
            fastest = min((other.seconds for other in self.tried.values()), default=float("inf"))
            shared = any(group.shared for group in each.problem.classes)
            if not shared and bound(each.problem, each.counts) >= fastest:
                continue  # a replay is never faster than the bound
            found = _replay(each, self._rooms, self._prefill_rows)
            if (ram, vram) not in self.tried or found.seconds < fastest:
                self.tried[ram, vram] = found
        return self.tried.get((ram, vram))


def _replay(solution: Solution, rooms: Rooms, prefill_rows: int) -> Candidate:
    """Return the solution's placement with its times."""
    costs, placement = solution.costs, solution.placement(rooms, prefill_rows)
    passes, prompt_s = 2 if costs.shape.experts else 3, 0.0
    if costs.machine.gpu is not None and rooms.vram > 0:
        many = costs.of_rows(placement.prefill_rows)
        prompt_s = simulate(many, placement, passes=2, warm_up=1).seconds / many.rows
    return Candidate(
        placement=placement,
        pass_s=simulate(costs, placement, passes=passes, warm_up=2).seconds,
        prompt_s=prompt_s,
    )


def _vram_rings(slots: Sequence[int], rooms: Rooms, *, few: bool) -> Iterator[Ring]:
    """Yield no ring first, then rings in ascending size."""
    yield Ring(0, 0)
    if not slots:
        return
    sizes = {(2 * slots[0], slots[0])} if slots[0] < slots[-1] / 4 and not few else set()
    times = (2.0,) if few else (1.05, 1.25, 1.5, 2, 3, 4)
    sizes |= {(int(slots[-1] * each), slots[-1]) for each in times}
    for size, slot in sorted(sizes):
        ring = -(-size // PAGE) * PAGE
        if ring <= rooms.vram / 2:
            yield Ring(ring, slot)


def _slots(classes: Sequence[UnitClass]) -> list[int]:
    """Return at most six sizes of units that may be read in a pass, ascending."""
    sizes = sorted({group.nbytes for group in classes if group.use > 0})
    while len(sizes) > _MOST_SLOTS:
        # Two sizes that are nearly the same need nearly the same ring: keep the larger.
        ratios = [high / low for low, high in itertools.pairwise(sizes)]
        del sizes[ratios.index(min(ratios))]
    return sizes


def _ram_rings(slots: Sequence[int], rooms: Rooms, *, few: bool) -> Iterator[Ring]:
    """Yield no ring first, for models that fit; then rings for each slot size."""
    yield Ring(0, 0)
    for slot in slots[-2:] if few else slots:
        # The reader fills free space chunk by chunk, so a ring may be only slightly larger than a
        # unit.
        extra = () if few else (2 << 20, 4 << 20, 6 << 20, 10 << 20)
        times = (2, 6, 16) if few else (1.5, 2, 3, 4, 6)
        sizes = {slot, *(slot + more for more in extra), *(int(slot * each) for each in times)}
        for size in sorted(sizes):
            ring = -(-size // PAGE) * PAGE
            if ring == slot or ring <= rooms.ram / 2:
                yield Ring(ring, slot)


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


def fits(request: PlanRequest) -> bool:
    """Whether a plan exists; faster than finding the best one."""
    if request.uses_gpu and fits(request.without_gpu()):
        return True
    request, rooms, _ = prepare(request)
    if _can_place(request, rooms):
        return True
    if not request.kv_on_ssd or request.uses_gpu:
        return False
    return _can_place(request, _with_kv_on_ssd(request, rooms, request.shape.layers))


def _can_place(request: PlanRequest, rooms: Rooms) -> bool:
    """Whether any placement fits, without looking for a good one."""
    return next(quick_solutions(request.costs(), rooms), None) is not None


def best_placement(request: PlanRequest) -> tuple[PlanRequest, Candidate | None, tuple[str, ...]]:
    """Return the request (without an unused GPU), the fastest placement found, and notes."""
    tried: dict[int, tuple[PlanRequest, Candidate, tuple[str, ...]]] = {}
    for rows in rows_choices(request):
        placed, rooms, prefill_rows = prepare(request, rows)
        notes = list[str]()
        if (best := _search(placed, rooms, prefill_rows, notes)) is not None:
            tried[rows] = placed, best, tuple(notes)
    if not tried:
        return request, None, ()
    return tried[best_rows({rows: found for rows, (_, found, _) in tried.items()})]


def rows_choices(request: PlanRequest) -> tuple[int, ...]:
    """Return the most rows that a prompt's pass may have with a GPU."""
    if not request.uses_gpu:
        return (PREFILL_ROWS,)
    sizes, most = request.shape.sizes, request.most_prefill_rows
    return (*gpu_rows_choices(sizes, request.budgets, most), PREFILL_ROWS)


def best_rows(times: Mapping[int, Times]) -> int:
    """Choose the most rows of a prompt's pass from the times with each.

    More rows make prefill faster, but take memory from weights. The result is the fewest rows with
    nearly the fastest prefill, among those with nearly the least total time.
    """
    least = _NEARLY * min((each.seconds for each in times.values()), default=0.0)
    able = {rows: each.prompt_s for rows, each in times.items() if each.seconds <= least}
    quickest = _NEARLY * min(able.values(), default=0.0)
    return min((rows for rows, each in able.items() if each <= quickest), default=PREFILL_ROWS)


def _search(
    request: PlanRequest, rooms: Rooms, prefill_rows: int, notes: list[str]
) -> Candidate | None:
    """Find the best placement with as few layers' KV caches on the SSD as possible."""
    if rooms.ram <= 0 or rooms.vram < 0:
        return None
    best = best_of(request, rooms, prefill_rows)
    attending = request.shape.on_ssd
    if best is not None or not request.kv_on_ssd or request.uses_gpu or not attending:
        return best
    low, high = 0, len(attending)
    while high - low > 1:
        middle = (low + high) // 2
        enough = _can_place(request, _with_kv_on_ssd(request, rooms, middle))
        low, high = (low, middle) if enough else (middle, high)
    notes.append(f"keys and values of {high} layers live on the SSD: they do not fit in RAM")
    return _Search(request.costs(), _with_kv_on_ssd(request, rooms, high), prefill_rows).best()


def best_of(request: PlanRequest, rooms: Rooms, prefill_rows: int) -> Candidate | None:
    """Find the best placement of whole units or, if some are on the CPU, with split MLPs."""
    costs = request.costs()
    best = _Search(costs, rooms, prefill_rows).best()
    if best is None:
        return None
    found = [best]
    if request.splits:
        for each in split_solutions(costs, rooms, _LINK_PARTS):
            if bound(each.problem, each.counts) < best.seconds:
                found.append(_replay(each, rooms, prefill_rows))
    return min(found, key=lambda each: each.seconds)


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


def prepare(request: PlanRequest, longest: int = PREFILL_ROWS) -> tuple[PlanRequest, Rooms, int]:
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
