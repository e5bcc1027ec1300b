"""Which models make room for another, with models of no content."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from localrt.common.errors import MemoryBudgetError
from localrt.models.weight_store import GpuUse
from localrt.server import pool as pool_module
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool

GB, MINUTE, HOUR = 1 << 30, 60.0, 3600.0


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
        files = [LocalFile(name, name, 4 * GB) for name in tables]
        self.pool = ModelPool(self.load, lambda: files, ServeOptions())

    def load(self, name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int) -> Any:
        self.loaded.append(name)
        if self.vram:
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

    async def use(self, *names: str) -> None:
        for name in names:
            self.now += 30
            async with self.pool.using(name):
                pass


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
async def test_running_answers_keep_their_memory(machine: Machine) -> None:
    await machine.use("a")
    async with machine.pool.using("b"):
        await machine.use("c")
        assert machine.held == {"a": 2, "b": 4, "c": 4}


@whole
async def test_caches_before_weights(machine: Machine) -> None:
    await machine.use("a")
    machine.models[0].kv_bytes = 1 * GB
    await machine.use("b")
    machine.nbytes = int(12.6 * GB)
    await machine.use("c")
    assert machine.models[0].kv_bytes == 0
    assert machine.loaded == ["a", "b", "c"]


@whole
async def test_least_recently_used_is_unloaded(machine: Machine) -> None:
    await machine.use("a", "b", "a", "c")
    assert set(machine.held) == {"a", "c"}


@streamed
async def test_least_recently_used_shrinks(machine: Machine) -> None:
    await machine.use("b", "a", "c")
    assert machine.held == {"a": 4, "b": 2, "c": 4}
    await machine.use("b")
    assert machine.held == {"a": 2, "b": 4, "c": 4}
    assert machine.loaded == ["b", "a", "c"]


@whole
async def test_client_says_how_long_a_model_stays(machine: Machine) -> None:
    await machine.use("a", "b")
    machine.pool.keep("a", -1)
    machine.now += HOUR
    machine.pool.tend()
    assert machine.pool._tending is not None
    await machine.pool._tending
    assert set(machine.held) == {"a"}


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
    await machine.use("a")
    one = machine.models[0]
    one.kv_bytes = 3 * GB
    await machine.use("b")
    assert machine.on_gpu == {"a": 4, "b": 4}
    assert (one.kv_bytes, one.parked_bytes) == (0, 3 * GB)
    machine.nbytes = 6 * GB
    await machine.use("c")
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
