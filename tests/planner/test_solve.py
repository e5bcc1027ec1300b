"""Counts by rules, against trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from localrt.offload.placement import PlacedUnit, UnitKind, Where
from localrt.planning.solve import (
    Counts,
    Problem,
    UnitClass,
    arrange,
    cover,
    is_feasible,
    pass_time,
    solve_greedily,
)

PAGE = 4096


@st.composite
def problems(draw: st.DrawFn, *, most: int = 3) -> Problem:
    """Two or three classes of a few units, with or without a GPU, in tight memory."""
    gpu = draw(st.booleans())
    classes = []
    kinds: list[UnitKind] = ["attention", "mlp", "head"]
    for number in range(draw(st.integers(1, most))):
        count, pages = draw(st.integers(1, 3)), draw(st.integers(100, 3000))
        nbytes = pages * PAGE
        classes.append(
            UnitClass(
                names=tuple(f"{number}.{n}" for n in range(count)),
                kind=kinds[number % 3],
                nbytes=nbytes,
                use=draw(st.sampled_from((1.0, 1.0, 0.25))),
                cpu_s=nbytes / 20e9 + 1e-5,
                gpu_s=nbytes / 250e9,
                kv=draw(st.sampled_from((0, 50 * PAGE))) if number % 3 == 0 else 0,
            )
        )
    total = sum(group.count * (group.nbytes + group.kv) for group in classes)
    return Problem(
        classes=tuple(classes),
        ram=int(total * draw(st.floats(0.2, 1.2))),
        vram=int(total * draw(st.floats(0.1, 0.8))) if gpu else 0,
        readable=3000 * PAGE,
        vram_ring=3000 * PAGE,
        ssd_bytes_s=draw(st.sampled_from((5e8, 5e9))),
        link_bytes_s=12e9 if gpu else 0.0,
        visit_s=1e-5 if gpu else 0.0,
        fixed_s=1e-4,
    )


def everything(problem: Problem) -> Iterator[Counts]:
    """Every feasible answer."""
    choices = []
    for group in problem.classes:
        places = problem.places(group)
        choices.append(
            [
                {where: picked.count(where) for where in set(picked)}
                for picked in itertools.combinations_with_replacement(places, group.count)
            ]
        )
    for counts in itertools.product(*choices):
        if is_feasible(problem, counts):
            yield counts


@given(problems())
def test_near_the_best(problem: Problem) -> None:
    counts = solve_greedily(problem)
    if counts is None:
        return
    assert is_feasible(problem, counts)
    best = min(pass_time(problem, each).bound for each in everything(problem))
    assert pass_time(problem, counts).bound >= best * (1 - 1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 4)), min_size=1, max_size=4),
    st.floats(0.01, 1.1),
)
def test_cover(pairs: list[tuple[int, int]], part: float) -> None:
    sizes = [pages * PAGE for pages, _ in pairs]
    limits = [count for _, count in pairs]
    target = max(1, int(nbytes(sizes, limits) * part))
    chosen = cover(sizes, limits, target)
    assert all(0 <= n <= limit for n, limit in zip(chosen, limits, strict=True))
    if nbytes(sizes, limits) < target:
        assert chosen == limits
    else:
        taken = [size for size, n in zip(sizes, chosen, strict=True) if n]
        assert target <= nbytes(sizes, chosen) < target + min(taken)


def test_cover_of_layers_is_near_the_least() -> None:
    sizes, limits = [785 * PAGE, 760 * PAGE, 1890 * PAGE], [14, 14, 24]  # as in a model of 1.5 B
    for counts in itertools.product((1, 6, 14), (2, 9), (0, 5, 24)):
        target = nbytes(sizes, counts)
        assert nbytes(sizes, cover(sizes, limits, target)) < target + min(sizes)


def nbytes(sizes: Sequence[int], counts: Sequence[int]) -> int:
    return sum(size * count for size, count in zip(sizes, counts, strict=True))


def test_many_experts() -> None:
    expert = UnitClass(
        names=tuple(map(str, range(15_000))),
        kind="expert",
        nbytes=6000 * PAGE,
        use=8 / 256,
        cpu_s=1e-3,
    )
    problem = Problem(
        classes=(expert,),
        ram=5000 * 6000 * PAGE,
        vram=0,
        readable=1 << 30,
        ssd_bytes_s=3.5e9,
    )
    assert solve_greedily(problem) == [{Where.SSD: 10_000, Where.RAM: 5_000}]


@given(st.data())
def test_arrange(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 30))
    units = [
        PlacedUnit(name=f"{kind}.{n}", kind=kind, nbytes=PAGE * size, macs=1, format="f", layer=n)
        for n in range(layers)
        for kind, size in (("attention", 3), ("mlp", 10))
    ]
    classes = tuple(
        UnitClass(
            names=tuple(unit.name for unit in units if unit.kind == kind),
            kind=kind,
            nbytes=next(unit.nbytes for unit in units if unit.kind == kind),
            use=1.0,
            cpu_s=1.0,
        )
        for kind in ("attention", "mlp")
    )
    counts = []
    for _ in classes:
        cuts = sorted(data.draw(st.lists(st.integers(0, layers), min_size=4, max_size=4)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
        counts.append(dict(zip(Where, sizes, strict=True)))
    placed = arrange(units, classes, counts)
    for group, places in zip(classes, counts, strict=True):
        for where in Where:
            assert sum(placed[name] is where for name in group.names) == places[where]


def test_arrange_spreads() -> None:
    units = [
        PlacedUnit(name=str(n), kind="mlp", nbytes=PAGE, macs=1, format="f", layer=n)
        for n in range(20)
    ]
    group = UnitClass(
        names=tuple(unit.name for unit in units), kind="mlp", nbytes=PAGE, use=1.0, cpu_s=1.0
    )
    placed = arrange(units, [group], [{Where.SSD: 10, Where.RAM: 10}])
    read = [n for n in range(20) if placed[str(n)] is Where.SSD]
    assert all(b - a == 2 for a, b in itertools.pairwise(read))
