"""Which models make room for another: tables, any holdings at all, and days of made-up uses."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import MemoryBudgetError
from localrt.models.weight_store import GpuUse
from localrt.server import pool as pool_module
from localrt.server.memory_plan import Holding, Uses, giving_order, plan_room, stay_s
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool

GB, MINUTE, HOUR, DAY = 1 << 30, 60.0, 3600.0, 86400.0


def used(idle_s: float, every_s: float | None = None, *, background: bool = False) -> Any:
    """When a model is back that was used every so many seconds, and last ``idle_s`` ago."""
    uses = Uses()
    for now in [0.0] if every_s is None else [0.0, every_s, 2 * every_s]:
        uses.begin(now)
        uses.count, uses.last = 0, now
    back_s = uses.back_s(uses.last + idle_s)
    return {"used_s": back_s} if background else {"used_s": back_s, "wanted_s": back_s}


CHAT = used(60, 180)
EDITOR = used(4, 5)
UNUSED = used(4 * HOUR, 300)
NIGHTLY = used(12 * HOUR, DAY, background=True)
EMBEDDER = used(5, 20, background=True)


@pytest.mark.parametrize(
    ("models", "nbytes", "gifts"),
    [
        # Caches before weights, and those of the model that nobody waits for.
        (
            {
                "chat": Holding(caches=2, weights=8, **CHAT),
                "index": Holding(caches=2, weights=8, **NIGHTLY),
            },
            5,
            {"index": 5},
        ),
        # However lately it worked.
        (
            {
                "editor": Holding(caches=2, weights=8, **EDITOR),
                "embedder": Holding(caches=2, weights=8, **EMBEDDER),
            },
            12,
            {"embedder": 10, "editor": 2},
        ),
        # All of a rank shrink before one is unloaded: the one expected back last.
        (
            {
                "embedder": Holding(caches=1, rest=9, **EMBEDDER),
                "unused": Holding(caches=1, rest=9, **UNUSED),
                "index": Holding(caches=1, rest=9, **NIGHTLY),
            },
            3,
            dict.fromkeys(("index", "unused", "embedder"), 1),
        ),
        (
            {
                "embedder": Holding(caches=1, rest=9, **EMBEDDER),
                "unused": Holding(caches=1, rest=9, **UNUSED),
                "index": Holding(caches=1, rest=9, **NIGHTLY),
            },
            4,
            {"index": 10},
        ),
        # It is unloaded before a model shrinks that somebody is expected to wait for.
        (
            {"chat": Holding(weights=10, **CHAT), "index": Holding(rest=9, **NIGHTLY)},
            5,
            {"index": 9},
        ),
        # Of two that are used often the one used less often, though it was used last.
        (
            {
                "chat": Holding(rest=10, **used(1, 180)),
                "editor": Holding(rest=10, **used(20, 30)),
            },
            5,
            {"chat": 10},
        ),
        # No model goes in vain.
        (
            {"index": Holding(rest=1, **NIGHTLY), "embedder": Holding(rest=9, **EMBEDDER)},
            8,
            {"embedder": 9},
        ),
        # What a user said counts most.
        (
            {
                "chat": Holding(rest=10, **CHAT),
                "kept": Holding(rest=10, kept=True, **NIGHTLY),
                "over": Holding(rest=10, kept=False, **EDITOR),
            },
            15,
            {"over": 10, "chat": 10},
        ),
    ],
)
def test_plan_room(models: Mapping[str, Holding], nbytes: int, gifts: dict[str, int]) -> None:
    assert plan_room(models, nbytes) == gifts


sizes = st.integers(0, 20) | st.just(0)
seconds = st.floats(0, 1e5) | st.just(math.inf)
holdings = st.builds(
    Holding,
    caches=sizes,
    weights=sizes,
    rest=sizes,
    wanted_s=seconds,
    used_s=seconds,
    kept=st.none() | st.booleans(),
)


@given(st.lists(holdings, max_size=8), st.integers(1, 150))
def test_plan_any(listed: list[Holding], nbytes: int) -> None:
    models = dict(enumerate(listed))
    gifts = plan_room(models, nbytes)
    order = giving_order(models)

    def all_of(one: Holding) -> int:
        return one.most + one.rest

    for name, gift in gifts.items():
        assert 0 < gift <= models[name].most or gift == all_of(models[name])
    assert sum(gifts.values()) >= min(nbytes, sum(map(all_of, listed)))
    highest = max((models[name].rank for name in gifts), default=0)
    for name, one in models.items():
        if one.rank < highest:  # the lower ranks have given all
            assert not all_of(one) or gifts[name] == all_of(one)
    partly = [n for n in order if n in gifts and gifts[n] <= models[n].most]
    for name in partly[:-1]:  # one after the other
        assert gifts[name] == models[name].most
    gone = [
        n for n in order if n in gifts and gifts[n] > models[n].most and models[n].rank == highest
    ]
    lower = sum(all_of(one) for one in listed if one.rank < highest)
    shrunk = lower + sum(one.most for one in listed if one.rank == highest)
    assert not gone or shrunk < nbytes
    for name in gone:  # each of them is needed
        assert shrunk + sum(models[n].rest for n in gone if n != name) < nbytes


def test_stay() -> None:
    assert stay_s([], 300) == 300
    assert stay_s([20, 420, 500], 300) == 500
    assert stay_s([20, DAY], 300) == 300  # it would be for nothing
    assert stay_s([420], 0) == 0


def test_uses() -> None:
    uses = Uses()
    assert uses.back_s(5.0) == math.inf
    for now in (100.0, 103.0, 403.0, 404.0):  # with what follows at once
        uses.begin(now)
        assert uses.back_s(now) == 0.0
        uses.count, uses.last = 0, now
    assert list(uses.away) == [300.0]
    assert uses.back_s(504.0) == 200.0
    assert uses.back_s(804.0) == 400.0
    uses.begin(1000.0)
    uses.begin(1500.0)  # while it is used
    assert len(uses.away) == 2


# -- through the pool, with models of no content -------------------------------------------------


class Model:
    """A model of so many bytes; one that is ``streamed`` can leave all but its tables."""

    gpu_use: Any = None

    def __init__(self, machine: Machine, nbytes: int, tables: int | None) -> None:
        self.machine, self.tables = machine, nbytes if tables is None else tables
        streamed = tables is not None
        self.info = SimpleNamespace(
            streamed=streamed, device="cpu", weight_bytes=nbytes, ctx=512, sees=False
        )
        self.weights_in_ram = min(nbytes, machine.free) if streamed else nbytes
        self.spare_ram = self.kv_bytes = self.parked_bytes = 0
        self.closed = False
        machine.models.append(self)

    def leave_ram(self, nbytes: int) -> int:
        nbytes = min(nbytes, self.weights_in_ram - self.tables)
        nbytes = max(nbytes, self.weights_in_ram - self.info.weight_bytes)
        self.weights_in_ram -= nbytes
        return nbytes

    def live(self, **_: Any) -> Any:
        return self

    def stats(self) -> Any:
        return SimpleNamespace(kv_bytes=self.kv_bytes, parked_bytes=self.parked_bytes)

    def park(self, to: str = "disk") -> None:
        self.kv_bytes = self.parked_bytes = 0

    def close(self) -> None:
        pass

    def unload(self) -> None:
        self.machine.models.remove(self)


class GpuModel(Model):
    """A model of so many bytes on a GPU; one that is ``shrinkable`` can leave them for RAM."""

    def __init__(self, machine: Machine, nbytes: int, *, shrinkable: bool) -> None:
        self.on_gpu, free = 0, machine.vram - machine.vram_used
        super().__init__(machine, nbytes, nbytes)
        self.info.streamed, self.info.device = shrinkable, "cuda:0"
        self.weights_in_ram = 0
        self.on_gpu, self.limit = min(nbytes, free), free

    @property
    def gpu_use(self) -> GpuUse:
        leavable = self.on_gpu if self.info.streamed else 0
        used, missing = self.on_gpu + self.kv_bytes, self.info.weight_bytes - self.on_gpu
        return GpuUse(used, self.limit, leavable, missing)

    def leave_ram(self, nbytes: int) -> int:
        return 0

    def park(self, to: str = "disk") -> None:
        self.parked_bytes = self.parked_bytes + self.kv_bytes if to == "ram" else 0
        self.kv_bytes = 0

    def set_budget(self, *, gpu_memory: int) -> None:
        now = min(self.info.weight_bytes, gpu_memory)
        if not self.info.streamed and now < self.on_gpu:
            raise MemoryBudgetError("it was loaded whole")
        self.on_gpu, self.weights_in_ram = now, max(self.weights_in_ram, self.on_gpu - now)


class Machine:
    """Models of 4 GB in memory for two of them and a half, and a clock."""

    def __init__(self, tables: Mapping[str, int | None]) -> None:
        self.models: list[Model] = []
        self.now, self.nbytes = 1000.0, 10 * GB
        self.loaded: list[str] = []
        self.tables = tables
        self.vram = 0
        self.fast_on_cpu = False
        files = [LocalFile(name, name, 4 * GB) for name in tables]
        self.pool = ModelPool(
            self.load,
            lambda: files,
            ServeOptions(),
            fast_on_cpu=lambda model, ram: self.fast_on_cpu,
        )

    def load(self, name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int | None) -> Any:
        self.loaded.append(name)
        if self.vram and on_gpu is not None:
            assert on_gpu == self.vram_used
            return GpuModel(self, 4 * GB, shrinkable=shrinkable)
        return Model(self, 4 * GB, self.tables[name])

    @property
    def free(self) -> int:
        return self.nbytes - sum(
            model.weights_in_ram
            + (model.parked_bytes if isinstance(model, GpuModel) else model.kv_bytes)
            for model in self.models
        )

    @property
    def vram_used(self) -> int:
        return sum(model.gpu_use.used for model in self.models if isinstance(model, GpuModel))

    @property
    def on_gpu(self) -> dict[str, float]:
        """The gigabytes of the GPU that each model takes."""
        return {
            served.name: 0 if served.model.gpu_use is None else served.model.on_gpu / GB
            for served in self.pool.at_work()
        }

    @property
    def held(self) -> dict[str, float]:
        """The gigabytes of weights that each model holds, rounded."""
        return {
            served.name: round(served.model.weights_in_ram / GB) for served in self.pool.at_work()
        }

    async def use(self, name: str, *, background: bool = False) -> None:
        async with self.pool.using(name, background=background):
            pass

    async def use_often(self, *names: str, background: bool = False) -> None:
        for _ in range(3):
            for name in names:
                self.now += 30
                await self.use(name, background=background)


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(request.param)
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(pool_module, "ram_budget", lambda ram: made.nbytes)
    monkeypatch.setattr(pool_module, "current_rss", lambda: made.nbytes - made.free)
    for name in ("GROWTH_NBYTES", "MARGIN_NBYTES"):
        monkeypatch.setattr(pool_module, name, 0)
    yield made
    made.pool.close()


whole = pytest.mark.parametrize("machine", [dict.fromkeys("abc")], indirect=True)
streamed = pytest.mark.parametrize("machine", [dict.fromkeys("abc", GB)], indirect=True)


@streamed
async def test_background_shrinks_first(machine: Machine) -> None:
    await machine.use_often("a")
    await machine.use_often("b", background=True)
    await machine.use("c")
    assert machine.held == {"a": 4, "b": 2, "c": 4}
    assert machine.loaded == ["a", "b", "c"]


@streamed
async def test_background_takes_nothing_back(machine: Machine) -> None:
    await machine.use_often("a", "c")
    await machine.use("b", background=True)
    await machine.use_often("c", "a")
    assert machine.held == {"a": 4, "b": 2, "c": 4}
    await machine.use_often("b", background=True)
    assert machine.held == {"a": 4, "b": 2, "c": 4}
    machine.now += HOUR  # nobody waits for the others any more
    await machine.use_often("b", background=True)
    assert machine.held["b"] == 4
    await machine.use("a")
    assert machine.held["a"] == 4


@streamed
async def test_running_background_shrinks(machine: Machine) -> None:
    await machine.use_often("a")
    async with machine.pool.using("b", background=True):
        await machine.use("c")
        assert machine.held == {"a": 4, "b": 2, "c": 4}


@streamed
async def test_running_answers_keep_their_memory(machine: Machine) -> None:
    await machine.use_often("a")
    async with machine.pool.using("b"):
        await machine.use("c")
        assert machine.held == {"a": 2, "b": 4, "c": 4}


@whole
async def test_caches_before_weights(machine: Machine) -> None:
    await machine.use_often("a")
    machine.models[0].kv_bytes = 1 * GB
    await machine.use_often("b")
    machine.nbytes = int(12.6 * GB)
    await machine.use("c")
    assert machine.models[0].kv_bytes == 0
    assert machine.loaded == ["a", "b", "c"]


@whole
async def test_unload_what_is_expected_last(machine: Machine) -> None:
    for _ in range(3):
        machine.now += 5 * MINUTE
        await machine.use("a")
        await machine.use("b")
        machine.now += 20
        await machine.use("b")
    machine.now += 15
    await machine.use("a")  # the last one used, but not often
    await machine.use("c")
    assert set(machine.held) == {"b", "c"}


@whole
async def test_client_keeps_a_model(machine: Machine) -> None:
    await machine.use_often("a")
    await machine.use_often("b")
    machine.pool.keep("a", -1)
    machine.now += DAY
    await machine.use_often("b")
    await machine.use("c")
    assert set(machine.held) == {"a", "c"}
    machine.pool.keep("c", 0)
    await machine.use("b")
    assert set(machine.held) == {"a", "b"}


@whole
async def test_stay_for_the_usual_pause(machine: Machine) -> None:
    async def tended(after: float) -> set[str]:
        machine.now += after
        machine.pool.tend()
        assert machine.pool._tending is not None
        await machine.pool._tending
        return set(machine.held)

    await machine.use("a")
    assert await tended(5 * MINUTE) == set()  # not known yet
    await machine.use("a")
    await tended(3 * MINUTE)
    machine.now += 4 * MINUTE
    await machine.use("a")
    assert await tended(6 * MINUTE) == {"a"}
    assert machine.pool.find("a").unload_s == pytest.approx(MINUTE)
    assert await tended(2 * MINUTE) == set()
    await machine.use("a")
    machine.pool.keep("a", 60)
    assert await tended(2 * MINUTE) == set()


# -- on a GPU --------------------------------------------------------------------------------------

RESERVE = 1 / 16  # of a gigabyte, which an answer has for growing


@whole
@pytest.mark.parametrize(
    ("vram", "uses", "on_gpu", "loaded"),
    [
        # Both fit: nothing is unloaded, or leaves.
        (9, "ababa", {"a": 4, "b": 4}, "ab"),
        # They do not: each was loaded whole at first, and then so that it can shrink.
        (6, "abab", {"a": 1.5, "b": 4}, "abab"),
        (6, "ababababab", {"a": 2 - RESERVE, "b": 4}, "abab"),
        (6, "abababababa", {"a": 4, "b": 2 - RESERVE}, "abab"),
        (4.5, "ababab", {"a": 0.5 - RESERVE, "b": 4}, "abab"),
        # The one that is expected last leaves more.
        (9, "abcabcabc", {"a": 1 - RESERVE, "b": 4, "c": 4}, "abcab"),
    ],
)
async def test_by_turns_on_gpu(
    machine: Machine, vram: float, uses: str, on_gpu: dict[str, float], loaded: str
) -> None:
    machine.nbytes, machine.vram = 64 * GB, round(vram * GB)
    for name in uses:
        machine.now += 30
        await machine.use(name)
        assert machine.vram_used <= machine.vram
    assert machine.on_gpu == on_gpu
    assert "".join(machine.loaded) == loaded


@whole
@pytest.mark.parametrize(
    ("fast", "idle_s", "on_gpu"),
    [
        (True, 30, {"a": 4, "b": 0}),
        (False, 30, {"b": 4}),  # too slow there
        (True, HOUR, {"b": 4}),  # nobody is expected to wait for the other
    ],
)
async def test_fast_enough_on_cpu(
    machine: Machine, fast: bool, idle_s: float, on_gpu: dict[str, float]
) -> None:
    machine.nbytes, machine.vram, machine.fast_on_cpu = 64 * GB, 6 * GB, fast
    await machine.use("a")
    machine.now += idle_s
    await machine.use("b")
    assert machine.on_gpu == on_gpu


@whole
async def test_answers_keep_the_gpu(machine: Machine) -> None:
    """While a model answers, another has what is left of the GPU; afterwards it has its share."""
    machine.nbytes, machine.vram = 64 * GB, 6 * GB
    for name in "abab":
        machine.now += 30
        await machine.use(name)
    async with machine.pool.using("a"):
        assert machine.on_gpu == {"a": 4, "b": 2 - RESERVE}
        await machine.use("b")
        assert machine.on_gpu["a"] == 4
        assert machine.vram_used <= machine.vram
    await machine.use("b")
    assert machine.on_gpu["b"] == 4


@whole
async def test_caches_leave_the_gpu_for_ram(machine: Machine) -> None:
    """And RAM for the disk, when another model needs that."""
    machine.nbytes, machine.vram = 9 * GB, 10 * GB
    await machine.use_often("a")
    one = machine.models[0]
    one.kv_bytes = 3 * GB
    await machine.use("b")
    assert machine.on_gpu == {"a": 4, "b": 4}
    assert (one.kv_bytes, one.parked_bytes) == (0, 3 * GB)
    machine.nbytes, machine.fast_on_cpu = 6 * GB, True
    await machine.use("c")
    assert machine.on_gpu["a"] == 4
    assert one.parked_bytes == 0


@whole
async def test_idle_model_leaves_the_gpu(machine: Machine) -> None:
    """First for RAM; later it is unloaded."""
    machine.nbytes, machine.vram = 64 * GB, 6 * GB
    for name in "aba":
        machine.now += 30
        await machine.use(name)
    for after, on_gpu in ((5 * MINUTE, {"a": 0}), (5 * MINUTE, {})):
        machine.now += after
        machine.pool.tend()
        assert machine.pool._tending is not None
        await machine.pool._tending
        assert machine.on_gpu == on_gpu


def days(number: int) -> list[tuple[float, str, bool]]:
    """The uses of some working days: a chat every few minutes, completions every few seconds while
    somebody types, a summary of the mail every hour, and an index that is renewed every night.
    """
    rng, uses = random.Random(7), []
    for day in range(number):
        nine, end = day * DAY + 9 * HOUR, day * DAY + 18 * HOUR
        now = nine + rng.uniform(0, 10) * MINUTE
        while now < end:
            uses.append((now, "chat", False))
            now += rng.uniform(2, 6) * MINUTE
        now = nine + rng.uniform(0, 10) * MINUTE
        while now < end:
            for _ in range(rng.randint(10, 60)):
                uses.append((now, "editor", False))
                now += rng.uniform(2, 9)
            now += rng.uniform(0.5, 8) * MINUTE
        uses += [(nine + (hour + rng.random() / 4) * HOUR, "mail", True) for hour in range(9)]
        uses += [(day * DAY + 2 * HOUR + 5 * work, "index", True) for work in range(100)]
    return sorted(uses)


def loads_of(names: list[str], *, least: bool) -> int:
    """Count the loads with room for two, if the least recently used model is unloaded for another,
    or at ``least``: the one used again last (Belady 1966).
    """
    held: list[str] = []
    loads = 0
    for at, name in enumerate(names):
        if name not in held:
            loads += 1
            if len(held) == 2:
                later = names[at:] + held
                held.remove(max(held, key=later.index) if least else held[0])
        else:
            held.remove(name)
        held.append(name)
    return loads


@pytest.mark.parametrize(
    "machine", [dict.fromkeys(("chat", "editor", "mail", "index"))], indirect=True
)
@pytest.mark.parametrize("classes", [True, False])
async def test_fewer_loads_than_least_recently_used(machine: Machine, classes: bool) -> None:
    """More than half of the loads that least recently used makes in vain are avoided, also if
    clients do not say what is background work.
    """
    trace = days(5)
    for now, name, background in trace:
        machine.now = 1000.0 + now
        await machine.use(name, background=background and classes)
    names = [name for _, name, _ in trace]
    lru, best = loads_of(names, least=False), loads_of(names, least=True)
    assert best <= len(machine.loaded) < lru - (lru - best) // 2
