"""Placement by rules, in milliseconds.

VRAM takes what saves most per byte. The deficit of RAM, and only the deficit, goes to the SSD:
first what few rows use, then a subset of the rest whose bytes come closest from above. What is left
in RAM is computed by the CPU or copied, so that link and computing end together.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrt.offload.placement import Where
from localrt.offload.planner.problem import Counts, Problem, UnitClass, compute_seconds, is_feasible

# A subset's sum is exact to one step a unit: small beside the smallest, and not too many in all.
_STEPS_OF_A_UNIT = 256
_MOST_STEPS = 1 << 22
_MOST_SHORT = 64  # steps that rounding down may take from a sum
_PAGE = 4096


def solve_greedily(problem: Problem) -> Counts | None:
    """Counts that fit, or None where nothing does."""
    kept = _fill_vram(problem)
    rest = [group.count - count for group, count in zip(problem.classes, kept, strict=True)]
    read = _choose_reads(problem, rest)
    if read is None:
        return None
    copied = _balance(problem, kept, rest, read)
    counts: list[dict[Where, int]] = []
    for vram, left, ssd, link in zip(kept, rest, read, copied, strict=True):
        # What is copied comes from RAM first.
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
    """How many of each class stay on the GPU."""
    kept, room = [0] * len(problem.classes), problem.vram
    if not problem.link_bytes_s:
        return kept

    def gain(number: int) -> float:
        """Seconds saved per byte, at the least of what the other places cost."""
        group = problem.classes[number]
        seconds = min(group.cpu_s, group.nbytes / problem.link_bytes_s) - group.gpu_s
        return group.use * seconds / (group.nbytes + group.kv)

    candidates = [n for n, g in enumerate(problem.classes) if Where.VRAM in problem.places(g)]
    candidates.sort(key=gain, reverse=True)
    if problem.attention in ("card", "card first"):
        candidates.sort(key=lambda n: not problem.attends(problem.classes[n]))
    for number in candidates:
        group = problem.classes[number]
        kept[number] = min(group.count, room // (group.nbytes + group.kv))
        room -= kept[number] * (group.nbytes + group.kv)
    return kept


def _choose_reads(problem: Problem, rest: Sequence[int]) -> list[int] | None:
    """How many of each class live on the SSD, of those that are not in VRAM."""
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
        sizes = [problem.classes[number].nbytes for number in members]
        limits = [rest[number] for number in members]
        chosen = closest_subset(sizes, limits, deficit)
        for number, count in zip(members, chosen or limits, strict=True):
            read[number] = count
            deficit -= count * problem.classes[number].nbytes
    return read if deficit <= 0 else None


def closest_subset(sizes: Sequence[int], limits: Sequence[int], target: int) -> list[int] | None:
    """Counts of each size, within ``limits``, whose sum is the least that reaches ``target``.

    Sums are taken in steps, rounded so that the answer never falls short. None where all together
    do not reach it.
    """
    if sum(size * limit for size, limit in zip(sizes, limits, strict=True)) < target:
        return None
    fine = min((size for size in sizes if size), default=_PAGE) // _STEPS_OF_A_UNIT
    step = max(_PAGE, fine // _PAGE * _PAGE, target // _MOST_STEPS)
    goal = -(-target // step)
    floors = [size // step for size in sizes]
    # Halves, quarters, ... of every class: as many items as the counts have digits.
    items = [
        (number, count)
        for number, limit in enumerate(limits)
        for count in _halves(limit)
        if floors[number]
    ]
    reached = [1]  # bit n: some subset has n steps
    mask = (1 << (goal + max((floors[n] * count for n, count in items), default=0) + 1)) - 1
    for number, count in items:
        reached.append((reached[-1] | reached[-1] << (floors[number] * count)) & mask)
    beyond = reached[-1] >> goal
    if beyond == 0:  # only rounding keeps it from reaching the target
        return list(limits)
    most = goal + (beyond & -beyond).bit_length() - 1
    # Sizes were rounded down: a sum a few steps short may well reach the target.
    least = max(0, goal - min(sum(limits), _MOST_SHORT))
    best: tuple[int, list[int]] | None = None
    for total in range(least, most + 1):
        if not reached[-1] >> total & 1:
            continue
        counts = _decoded(reached, items, floors, total)
        if sum(size * n for size, n in zip(sizes, counts, strict=True)) < target:
            continue
        counts = _without_surplus(sizes, counts, target)
        found = sum(size * n for size, n in zip(sizes, counts, strict=True))
        if best is None or found < best[0]:
            best = found, counts
    assert best is not None, "the sum rounded down reaches it"
    return best[1]


def _decoded(
    reached: Sequence[int], items: Sequence[tuple[int, int]], floors: Sequence[int], total: int
) -> list[int]:
    """The counts behind a sum of ``total`` steps."""
    chosen = [0] * len(floors)
    for index in range(len(items) - 1, -1, -1):
        if reached[index] >> total & 1:
            continue
        number, count = items[index]
        chosen[number] += count
        total -= floors[number] * count
    return chosen


def _without_surplus(sizes: Sequence[int], chosen: list[int], target: int) -> list[int]:
    """Give back what rounding took too much."""
    surplus = sum(size * count for size, count in zip(sizes, chosen, strict=True)) - target
    for number in sorted(range(len(sizes)), key=lambda n: sizes[n], reverse=True):
        if sizes[number]:
            spare = min(chosen[number], surplus // sizes[number])
            chosen[number] -= spare
            surplus -= spare * sizes[number]
    return chosen


def _halves(count: int) -> list[int]:
    """Numbers whose subsets sum to every number up to ``count``."""
    parts, size = [], 1
    while count > 0:
        parts.append(min(size, count))
        count -= parts[-1]
        size *= 2
    return parts


def _balance(
    problem: Problem, kept: Sequence[int], rest: Sequence[int], read: Sequence[int]
) -> list[int]:
    """How many of each class, of those not in VRAM, are copied rather than computed by the CPU."""
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
    for group, vram, left in zip(groups, kept, rest, strict=True):
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
    """Copy what the link can carry in ``seconds``, and as much as brings the chain below them."""
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
