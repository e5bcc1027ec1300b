"""Heuristic solver of the placement problem: how many units of each class go where.

Units of equal cost form a class, so that 15,000 experts are one entry. A pass takes at least as
long as its disk reads, its copies, or its computing: the rules minimize the longest of the three
(FlexGen's cost model, with the CPU's computing added). VRAM takes the units that save most time per
byte. Only units that do not fit in RAM go to the SSD, the least used first. Units in RAM are either
computed by the CPU or copied, such that link and computing end at the same time. ``arrange`` then
spreads reads and copies evenly over the pass, because bursts need large rings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from localrt.common.files import PAGE
from localrt.offload.placement import KvPlace, PlacedUnit, Placement, UnitKind, Where
from localrt.planning.costs import Costs, PassTime, disk_share, layer_seconds, with_long_passes
from localrt.quant.formats.tiled import TILE_ROWS

AttentionPlace = Literal["gpu", "gpu first", "anywhere", "host"]
Counts = Sequence[Mapping[Where, int]]
"""For each class, the number of units at each place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitClass:
    """Equal units, in the order of a pass, with the seconds that one takes on CPU and GPU.

    ``kv``: bytes of a layer's KV cache, which is kept where its attention is computed; ``unpacked``
    as in ``PlacedUnit``. ``shared`` units (experts) are computed by CPU and GPU at once: ``cpu_s``
    and ``gpu_s`` are a unit's equal share of the layer's seconds with no experts on the GPU, and
    with all of them. Pieces of split MLPs have ``only`` one place; the CPU piece's ``cpu_s`` is its
    time beyond the GPU's.
    """

    names: tuple[str, ...]
    kind: UnitKind
    nbytes: int
    use: float
    cpu_s: float
    gpu_s: float = 0.0
    reading_s: float = 0.0  # CPU time for reading the unit
    copying_s: float = 0.0  # host time for copying the unit to the GPU
    kv: int = 0
    unpacked: int = 0
    shared: bool = False
    only: Where | None = None

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self.names)

    @property
    def gpu_nbytes(self) -> int:
        """Bytes of GPU memory that a unit takes."""
        return self.nbytes + self.unpacked + self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The placement problem: room for weights and KV caches in bytes, rates in bytes per second.

    Units of up to ``readable`` bytes may be read, through a ring of ``ram_ring`` bytes in RAM;
    those that are copied pass through one of ``vram_ring`` bytes. Without a GPU ``link_bytes_s`` is
    0. ``visit_s``: seconds of a visit to the CPU between units of the GPU; ``link_loss`` and
    ``cpu_loss``: the share by which each slows down while the other works.

    ``attention`` may force attention (and a mixture's routers) onto the GPU, or place it there
    first, since prefill needs it there and KV caches cannot move. It may force all attention onto
    the CPU if layers share KV caches.
    """

    classes: tuple[UnitClass, ...]
    ram: int
    vram: int
    ssd_bytes_s: float
    readable: int = 0
    ram_ring: int = 0
    vram_ring: int = 0
    link_bytes_s: float = 0.0
    visit_s: float = 0.0
    link_loss: float = 0.0
    cpu_loss: float = 0.0
    fixed_s: float = 0.0
    attention: AttentionPlace = "anywhere"

    @property
    def read_bytes_s(self) -> float:
        """The rate of reads through the ring."""
        return self.ssd_bytes_s * disk_share(self.ram_ring - self.readable)

    def attends(self, group: UnitClass) -> bool:
        """Whether a class is attention, or a mixture's routers."""
        mixture = any(other.kind == "expert" for other in self.classes)
        return group.kind == "attention" or (mixture and group.kind == "mlp")

    def places(self, group: UnitClass) -> tuple[Where, ...]:
        """Return the places where a class may go, the fastest first."""
        if group.only is not None:
            return (group.only,)
        readable = group.nbytes <= self.readable or group.use == 0
        if group.kind == "embedding" or not self.link_bytes_s:
            return (Where.RAM, Where.SSD) if readable else (Where.RAM,)
        places = [Where.VRAM, Where.RAM]
        if group.shared:  # never copied for the layer at hand
            return (*places, Where.SSD) if readable else tuple(places)
        if group.nbytes <= self.vram_ring:
            places.append(Where.LINK)
            if readable:
                places.append(Where.SSD_LINK)
        if readable:
            places.append(Where.SSD)
        if self.attention == "gpu" and self.attends(group):
            return tuple(place for place in places if place.on_gpu)
        if self.attention == "host" and group.kind == "attention":
            return tuple(place for place in places if not place.on_gpu)
        return tuple(places)


def classes_of(costs: Costs, kv: Sequence[int]) -> tuple[UnitClass, ...]:
    """Group a model's units into classes; ``kv`` are bytes per layer at the full context.

    Leaves out norms (no arithmetic, and not read by row): they are kilobytes.
    """
    groups: dict[tuple[object, ...], list[PlacedUnit]] = {}
    for unit in costs.shape.units:
        if unit.macs == 0 and unit.kind != "embedding":
            continue
        layer_kv = kv[unit.layer] if unit.kind == "attention" and unit.layer is not None else 0
        groups.setdefault(
            (
                *(unit.kind, unit.nbytes, unit.unpacked, unit.macs, unit.format, unit.use),
                *(unit.only, layer_kv),
            ),
            [],
        ).append(unit)
    return tuple(_class(costs, units, kv) for units in groups.values())


def _class(costs: Costs, units: Sequence[PlacedUnit], kv: Sequence[int]) -> UnitClass:
    first = units[0]
    use, rows, shared = first.use, costs.rows, False
    if first.kind == "expert":
        use, rows = costs.touched(use)
        shared = costs.machine.gpu is not None
    if shared:
        cpu_s, gpu_s = layer_seconds(costs, first)
    else:
        cpu_s = costs.cpu(first, rows)
        gpu_s = costs.gpu(first, rows) if costs.machine.gpu else 0.0
        if first.only is Where.RAM:
            beside = (u for u in costs.shape.units if u.layer == first.layer and u.only)
            gpu_s = sum(costs.gpu(u, rows) for u in beside if u is not first)
            cpu_s = max(0.0, cpu_s + costs.splitting() - gpu_s)
    attends = first.kind == "attention" and first.layer is not None
    return UnitClass(
        names=tuple(unit.name for unit in units),
        kind=first.kind,
        nbytes=first.nbytes,
        use=use,
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        reading_s=costs.reading_load(first.nbytes),
        copying_s=costs.streaming(first),
        kv=kv[first.layer or 0] if attends else 0,
        unpacked=first.unpacked,
        shared=shared,
        only=first.only,
    )


def pass_time(problem: Problem, counts: Counts) -> PassTime:
    """Return the time of a token's pass by a formula: it takes as long as its reads, its copies or
    its computing, whichever is longest, and waits for what cannot be read ahead.

    An expert is read once its router has chosen it. The head's slices lie together at the end of a
    pass: what of them the ring does not hold is read while nothing else is computed.
    """
    nbytes = dict.fromkeys(("ssd", "link", "ram", "vram"), 0.0)
    by_cpu, by_gpu = problem.fixed_s, 0.0
    working = experts = slices = head_s = 0.0  # CPU's seconds in units; bytes read; seconds
    for group, places in zip(problem.classes, counts, strict=True):
        for where, count in places.items():
            used = count * group.use
            size, seconds = used * group.nbytes, used * compute_seconds(problem, group, where)
            nbytes["vram" if where.on_gpu else "ram"] += size
            if where.on_gpu:
                by_gpu += seconds
            else:
                by_cpu += seconds
                working += used * group.cpu_s
            nbytes["link"] += size * where.copied
            nbytes["ssd"] += size * where.read
            experts += size * (where.read and group.kind == "expert")
            slices += size * (where.read and group.kind == "head")
            head_s += seconds * (group.kind == "head")
    chain, link, rate = by_cpu + by_gpu, 0.0, problem.read_bytes_s
    if nbytes["link"]:
        # Copies and the CPU slow each other down while both work.
        link = nbytes["link"] / problem.link_bytes_s
        pass_s = max(nbytes["ssd"] / rate, link, chain)
        slower = working * problem.cpu_loss * link / pass_s
        link *= 1 + problem.link_loss * working / pass_s
        chain, by_cpu = chain + slower, by_cpu + slower
    burst = (slices - problem.ram_ring) / rate
    steady = max((nbytes["ssd"] - experts) / rate, link, chain, chain - head_s + burst)
    pass_s = steady + experts / rate
    return PassTime(
        seconds=pass_s,
        busy={
            "ssd": nbytes["ssd"] / problem.ssd_bytes_s,
            "link": link,
            "cpu": by_cpu,
            "gpu": by_gpu,
        },
        chain=chain,
        nbytes=nbytes,
        waits={
            "ssd": pass_s - max(link, chain),
            "link": max(0.0, link - chain),
            "crossing": 0.0,
        },
    )


def compute_seconds(problem: Problem, group: UnitClass, where: Where) -> float:
    """Return a unit's computing seconds at a place, with its share of a visit to the CPU."""
    if where.on_gpu:
        return group.gpu_s + (group.copying_s if where.copied else 0.0)
    seconds = group.cpu_s + (group.reading_s if where is Where.SSD else 0.0)
    if not problem.link_bytes_s or group.shared or group.only is not None:
        return seconds
    if group.kind == "head":  # its slices are one product
        return seconds + problem.visit_s / group.count
    # If all attention is on the GPU, each MLP is a visit; otherwise usually a layer's units
    # together are one.
    alone = problem.attention == "gpu" and group.kind == "mlp"
    return seconds + problem.visit_s * (1.0 if alone else 0.5)


def held_bytes(group: UnitClass, where: Where) -> tuple[int, int]:
    """Return the bytes of (RAM, VRAM) that one unit occupies at a place."""
    if where is Where.VRAM:
        return 0, group.gpu_nbytes
    ram = group.nbytes if where in (Where.RAM, Where.LINK) else 0
    return (ram, group.kv) if where.on_gpu else (ram + group.kv, 0)


def is_feasible(problem: Problem, counts: Counts) -> bool:
    """Whether every unit is at an allowed place, and all fit."""
    ram = vram = 0
    for group, places in zip(problem.classes, counts, strict=True):
        if sum(places.values()) != group.count or min(places.values(), default=0) < 0:
            return False
        allowed = problem.places(group)
        for where, count in places.items():
            if count and where not in allowed:
                return False
            here, there = held_bytes(group, where)
            ram, vram = ram + count * here, vram + count * there
    return ram <= problem.ram and vram <= problem.vram


def solve_greedily(problem: Problem) -> Counts | None:
    """Return counts that fit, or None if nothing does."""
    kept = _fill_vram(problem)
    rest = [group.count - count for group, count in zip(problem.classes, kept, strict=True)]
    read = _choose_reads(problem, rest)
    if read is None:
        return None
    copied = _balance(problem, kept, rest, read)
    counts: list[dict[Where, int]] = []
    for vram, left, ssd, link in zip(kept, rest, read, copied, strict=True):
        # Copy units in RAM first, then those on the SSD.
        from_ram = min(link, left - ssd)
        places = {
            Where.VRAM: vram,
            Where.LINK: from_ram,
            Where.SSD_LINK: link - from_ram,
            Where.RAM: left - ssd - from_ram,
            Where.SSD: ssd - (link - from_ram),
        }
        counts.append({where: count for where, count in places.items() if count})
    return counts if is_feasible(problem, counts) else None


def _fill_vram(problem: Problem) -> list[int]:
    """Return how many units of each class stay on the GPU."""
    kept, room = [0] * len(problem.classes), problem.vram
    if not problem.link_bytes_s:
        return kept

    def gain(number: int) -> float:
        """Seconds saved per byte, compared with the cheapest other place."""
        group = problem.classes[number]
        seconds = min(group.cpu_s, group.nbytes / problem.link_bytes_s) - group.gpu_s
        return group.use * seconds / group.gpu_nbytes

    candidates = [n for n, g in enumerate(problem.classes) if Where.VRAM in problem.places(g)]
    candidates.sort(key=gain, reverse=True)
    if problem.attention in ("gpu", "gpu first"):
        candidates.sort(key=lambda n: not problem.attends(problem.classes[n]))
    for number in candidates:
        group = problem.classes[number]
        kept[number] = min(group.count, room // group.gpu_nbytes)
        room -= kept[number] * group.gpu_nbytes
    return kept


def _choose_reads(problem: Problem, rest: Sequence[int]) -> list[int] | None:
    """Return how many units of each class that are not in VRAM stay on the SSD."""
    read = [0] * len(rest)
    deficit = -problem.ram + sum(
        left * (group.nbytes + group.kv) for left, group in zip(rest, problem.classes, strict=True)
    )
    uses = sorted({group.use for group in problem.classes})
    for use in uses:
        if deficit <= 0:
            return read
        members = [
            number
            for number, group in enumerate(problem.classes)
            if group.use == use and rest[number] and Where.SSD in problem.places(group)
        ]
        # The head's slices last: its reads come one after another at the end of a pass, while those
        # of layers are spread over it. Qwen2.5 1.5B in 1 GB made 13.2 tokens a second with the
        # whole head read first, 15.1 with most of the layers' attention.
        members.sort(key=lambda n: (problem.classes[n].kind == "head", -problem.classes[n].nbytes))
        sizes = [problem.classes[number].nbytes for number in members]
        limits = [rest[number] for number in members]
        for number, count in zip(members, cover(sizes, limits, deficit), strict=True):
            read[number] = count
            deficit -= count * problem.classes[number].nbytes
    return read if deficit <= 0 else None


def cover(sizes: Sequence[int], limits: Sequence[int], target: int) -> list[int]:
    """Return counts per size, within ``limits``, whose sum is ``target`` or little more; all if
    they do not reach it.

    The first come first as far as the target goes, then the last until it is reached, less those
    that are then too many.
    """
    order = range(len(sizes))
    chosen, missing = [0] * len(sizes), target
    for number in order:
        chosen[number] = min(limits[number], missing // sizes[number])
        missing -= chosen[number] * sizes[number]
    for number in reversed(order):
        more = min(limits[number] - chosen[number], max(0, -(-missing // sizes[number])))
        chosen[number] += more
        missing -= more * sizes[number]
    for number in order:
        spare = min(chosen[number], max(0, -missing // sizes[number]))
        chosen[number] -= spare
        missing += spare * sizes[number]
    return chosen


def _balance(
    problem: Problem, resident: Sequence[int], rest: Sequence[int], read: Sequence[int]
) -> list[int]:
    """Return how many units of each class outside VRAM are copied to the GPU to be computed."""
    none = [0] * len(rest)
    if not problem.link_bytes_s:
        return none
    groups = problem.classes
    reading = sum(ssd * group.use * group.nbytes for ssd, group in zip(read, groups, strict=True))
    order = sorted(
        (
            number
            for number, group in enumerate(groups)
            if rest[number] and group.kv == 0 and Where.LINK in problem.places(group)
        ),
        key=lambda number: (groups[number].cpu_s - groups[number].gpu_s) / groups[number].nbytes,
        reverse=True,
    )
    base = problem.fixed_s
    for group, vram, left in zip(groups, resident, rest, strict=True):
        base += group.use * vram * group.gpu_s
        base += group.use * left * compute_seconds(problem, group, Where.RAM)
    low, best = reading / problem.ssd_bytes_s, none
    if base <= low:
        return none
    high = base
    for _ in range(40):
        middle = (low + high) / 2
        copied, chain = _copy_within(problem, order, rest, base, middle)
        if chain <= middle:
            high, best = middle, copied
        else:
            low = middle
    return best


def _copy_within(
    problem: Problem, order: Sequence[int], rest: Sequence[int], chain: float, seconds: float
) -> tuple[list[int], float]:
    """Copy units until the chain takes at most ``seconds``, as far as the link can carry them."""
    copied, room = [0] * len(rest), seconds * problem.link_bytes_s
    for number in order:
        group: UnitClass = problem.classes[number]
        saved = group.use * (compute_seconds(problem, group, Where.RAM) - group.gpu_s)
        if chain <= seconds or saved <= 0 or group.use == 0:
            continue
        wanted = int((chain - seconds) / saved) + 1
        count = min(rest[number], wanted, int(room / (group.use * group.nbytes)))
        copied[number] = count
        room -= count * group.use * group.nbytes
        chain -= count * saved
    return copied, chain


_SPECIAL = (
    frozenset(where for where in Where if where.on_gpu),
    frozenset(where for where in Where if where.read),
    frozenset(where for where in Where if where.copied),
)


def arrange(
    units: Sequence[PlacedUnit], classes: Sequence[UnitClass], counts: Counts
) -> dict[str, Where]:
    """Assign a place to every unit of the classes, in the order of the pass.

    Units on the GPU, units that are read and units that are copied are each spread over the pass as
    evenly as possible, by bytes.
    """
    quotas: dict[str, tuple[Mapping[Where, int], dict[Where, int]]] = {}  # all counts, counts left
    for group, places in zip(classes, counts, strict=True):
        quotas |= dict.fromkeys(group.names, (places, dict(places)))
    lags, found = [0.0] * len(_SPECIAL), dict[str, Where]()
    for unit in units:
        if unit.name not in quotas:
            continue
        whole, left = quotas[unit.name]
        among = [where for where, count in left.items() if count]
        for number, special in enumerate(_SPECIAL):
            taken = [where for where in among if where in special]
            if not taken or len(taken) == len(among):
                continue
            share = sum(whole[where] for where in taken) / sum(whole[where] for where in among)
            lags[number] += unit.nbytes * share
            if lags[number] >= unit.nbytes / 2:
                lags[number] -= unit.nbytes
                among = taken
            else:
                among = [where for where in among if where not in special]
        (found[unit.name],) = among
        left[found[unit.name]] -= 1
    return found


# -- rings, and the best counts for each -----------------------------------------------------------

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


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Counts that fit, and their times by formulas. ``costs`` are those of the units as split;
    ``rows``, those of a prompt's pass.
    """

    costs: Costs
    rooms: Rooms
    problem: Problem
    counts: Counts
    rows: int
    split: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def token(self) -> PassTime:
        """The time of a token's pass."""
        return pass_time(self.problem, self.counts)

    @cached_property
    def prompt_s(self) -> float:
        """Seconds per token of a prompt; 0 without a GPU."""
        return self.prompt(self.rows) / self.rows if self.problem.link_bytes_s else 0.0

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
                ram_ring=self.problem.ram_ring if moved else 0,
                vram_ring=self.problem.vram_ring,
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
            movable = group.kind == "mlp" and group.nbytes <= problem.vram_ring
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


class Problems:
    """The placement problems of one model in ``rooms``, which rings turn into solutions.

    Each listed expert stands for ``expert_times``.
    """

    def __init__(self, costs: Costs, rooms: Rooms, rows: int = 1, expert_times: int = 1) -> None:
        self._costs, self._rooms, self._rows = costs, rooms, rows
        self._gpu = costs.machine.gpu is not None and rooms.vram > 0
        self._classes = tuple(
            replace(group, names=group.names * (expert_times if group.kind == "expert" else 1))
            for group in classes_of(costs, _kv_in_memory(rooms))
        )
        # Sizes of the units of a pass, descending.
        self._sizes = sorted({g.nbytes for g in self._classes if g.use > 0}, reverse=True)

    def solutions(self) -> list[Solution]:
        """Return solutions for a few choices of rings: without reads if that fits, else with the
        usual rings, else with the smallest.
        """
        tight = [(size, size) for size in self._sizes]
        usual, in_gpu = [(self._usual_ring(size), size) for size in self._sizes[:3]], [0]
        if self._gpu and self._sizes:
            times = _GPU_RING_TIMES[1:] if self._costs.shape.experts else _GPU_RING_TIMES
            rings = (_whole(each * self._sizes[0]) for each in times)
            in_gpu += [ring for ring in rings if ring <= self._rooms.vram / 2]
        for choices in (
            itertools.product([(0, 0)], in_gpu),
            itertools.product([*usual, *tight[:1]], in_gpu[:2]),
            itertools.product(tight, [0]),
        ):
            found = [each for ring, vram in choices for each in self._solved(*ring, vram)]
            if found:
                return found
        return []

    def fits(self) -> bool:
        """Whether any placement fits, without looking for a good one."""
        return any(any(self._solved(size, size, 0)) for size in (0, *self._sizes))

    def _usual_ring(self, size: int) -> int:
        wanted = max(size + _RING_MORE, int(_RING_TIMES * size))
        if self._costs.shape.experts:
            wanted = _MIXTURE_RING_TIMES * size
        return max(size, min(_whole(wanted), self._rooms.ram // 2 // PAGE * PAGE))

    def _solved(self, ram_ring: int, readable: int, vram_ring: int) -> Iterator[Solution]:
        """Yield counts that fit with these rings.

        Attention and KV caches of all layers go to the GPU if they fit; otherwise as many as fit,
        or as many as are best for a token.
        """
        problem = self.problem(ram_ring, readable, vram_ring)
        ways: list[AttentionPlace] = ["anywhere"]
        if self._gpu:
            on_gpu = (group for group in self._classes if problem.attends(group))
            whole = sum(g.count * (g.nbytes + g.kv) for g in on_gpu) <= problem.vram
            ways = ["gpu" if whole else "gpu first", "anywhere"]
            if self._costs.shape.shares_caches:
                ways = ["gpu", "host"] if whole else ["host"]
        for way in ways:
            counts = solve_greedily(tried := replace(problem, attention=way))
            if counts is not None:
                yield Solution(
                    costs=self._costs,
                    rooms=self._rooms,
                    problem=tried,
                    counts=counts,
                    rows=self._rows,
                )
                if way == "gpu":
                    return

    def problem(self, ram_ring: int, readable: int, vram_ring: int) -> Problem:
        """Return the placement problem that these rings leave."""
        costs, gpu = self._costs, self._gpu
        machine, (link, cpu) = costs.machine, costs.beside()
        return Problem(
            classes=self._classes,
            ram=self._rooms.ram - ram_ring,
            vram=self._rooms.vram - vram_ring if gpu else 0,
            ssd_bytes_s=machine.ssd_bytes_s,
            readable=readable,
            ram_ring=ram_ring,
            vram_ring=vram_ring,
            link_bytes_s=costs.link_bytes_s if gpu else 0.0,
            visit_s=costs.visit() + 2 * costs.crossing() if gpu else 0.0,
            link_loss=1 / link - 1,
            cpu_loss=1 / cpu - 1,
            fixed_s=costs.per_pass(),
        )


def split_solutions(costs: Costs, rooms: Rooms, rows: int) -> Iterator[Solution]:
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
    problem = Problems(costs, rooms).problem(0, 0, ring // PAGE * PAGE)
    problem = replace(problem, attention="gpu")
    tables = {"embedding": Where.RAM}
    counts = [
        {group.only or tables.get(group.kind, Where.VRAM): group.count} for group in problem.classes
    ]
    if not is_feasible(problem, counts):
        return None
    return Solution(
        costs=costs, rooms=rooms, problem=problem, counts=counts, rows=rows, split=shares
    )


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
