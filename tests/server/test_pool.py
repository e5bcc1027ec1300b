"""Several models behind one server: which are loaded, who leaves memory to whom, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import localrt
from localrt.common.errors import CancelledError, MemoryBudgetError
from localrt.server import pool as pool_module
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from tests.conftest import write_tiny_model
from tests.server.conftest import WIDE, serving

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


class Pool:
    """A pool of tiny models, and what has become of them."""

    def __init__(self, folder: Path, names: Sequence[str] = "ab", **options: Any) -> None:
        self.folder = folder
        self.loaded: list[tuple[str, bool]] = []
        self.said: list[str] = []
        self.before_load: Callable[[str], None] = lambda name: None
        files = [LocalFile(name, name, 1 << 20) for name in names]
        self.pool = ModelPool(
            self.load, lambda: files, ServeOptions(**options), on_change=self.said.append
        )

    def load(
        self, name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int
    ) -> localrt.Model:
        self.before_load(name)
        self.loaded.append((name, shrinkable))
        return localrt.load(self.folder, ctx=512)

    @property
    def states(self) -> dict[str, str]:
        return {model.name: model.state for model in self.pool.offered()}


@pytest.fixture
def pool(tiny_folder: Path) -> Iterator[Pool]:
    made = Pool(tiny_folder)
    yield made
    made.pool.close()


async def tended(pool: Pool | Machine) -> None:
    """What a server does once a second, to its end."""
    pool.pool.tend()
    assert pool.pool._tending is not None
    await pool.pool._tending


async def test_load_on_request(pool: Pool) -> None:
    assert pool.states == {"a": "unloaded", "b": "unloaded"}
    assert pool.pool.find(None).name == "a"  # the first that is listed
    for _ in range(2):
        async with pool.pool.using("b") as served:
            assert served.name == "b"
    assert pool.states == {"b": "loaded", "a": "unloaded"}
    async with pool.pool.using(None) as served:
        assert served.name == "b"  # the one used last

    assert pool.loaded == [("b", False)]


@pytest.mark.parametrize(
    ("used", "first"),
    [
        ({}, "a"),
        ({"b": 1.0}, "b"),
        ({"base": 2.0, "b": 1.0}, "b"),  # no base model by itself
        ({"gone": 2.0}, "a"),
    ],
)
def test_default(tiny_folder: Path, tmp_path: Path, used: dict[str, float], first: str) -> None:
    base = write_tiny_model(tmp_path, template=None, wide=WIDE)
    files = [
        LocalFile(name, name, 1, base if name == "base" else tiny_folder, used=used.get(name, 0.0))
        for name in ("a", "b", "base")
    ]

    def chosen(files: list[LocalFile]) -> str:
        pool = ModelPool(lambda *_: localrt.load(tiny_folder), lambda: files, ServeOptions())
        return pool.find(None).name

    assert chosen(files) == first
    assert chosen(files[2:]) == "base"  # unless there is no other


async def test_one_load_for_many_requests(pool: Pool) -> None:
    async def ask() -> str:
        async with pool.pool.using("a") as served:
            return served.name

    go_on, began = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        began.set()
        assert go_on.wait(60)

    pool.before_load = wait
    first = asyncio.ensure_future(ask())
    others = [asyncio.ensure_future(ask()) for _ in range(4)]
    await asyncio.to_thread(began.wait, 60)
    first.cancel()  # the others are not to suffer from it
    go_on.set()
    assert set(await asyncio.gather(*others)) == {"a"}
    assert len(pool.loaded) == 1


async def test_failed_load(pool: Pool) -> None:
    def fail(name: str) -> None:
        raise localrt.CheckpointError("/home/jane/models/b.gguf: truncated")

    async with pool.pool.using("a"):
        pass
    pool.before_load = fail
    with pytest.raises(localrt.CheckpointError, match="truncated"):
        async with pool.pool.using("b"):
            pass
    assert pool.said[-1] == "could not load b: b.gguf: truncated"
    assert pool.pool.find(None).name == "a"
    pool.before_load = lambda name: None
    async with pool.pool.using("b") as served:
        assert served.live.generate("hi", **GREEDY).token_ids


async def test_close_while_loading(pool: Pool) -> None:
    began = threading.Event()

    def load(name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int) -> localrt.Model:
        began.set()
        assert cancel.wait(60)
        raise CancelledError("loading was cancelled")

    pool.pool._load = load

    async def ask() -> None:
        async with pool.pool.using("a"):
            pass

    asking = asyncio.ensure_future(ask())
    await asyncio.to_thread(began.wait, 60)
    await asyncio.to_thread(pool.pool.close)
    with pytest.raises(CancelledError):
        await asking
    with pytest.raises(CancelledError, match="stopping"):
        await ask()
    assert pool.pool.at_work() == []


async def test_wait_for_memory(pool: Pool) -> None:
    order: list[str] = []
    refused = threading.Event()

    def refuse(name: str) -> None:
        if pool.states["a"] == "loaded":
            refused.set()
            raise MemoryBudgetError("there is no room beside a")

    async def ask() -> None:
        async with pool.pool.using("b"):
            order.append("b")

    async with pool.pool.using("a"):
        pool.before_load = refuse
        waiting = asyncio.ensure_future(ask())
        await asyncio.to_thread(refused.wait, 60)
        order.append("a")
    await waiting
    assert order == ["a", "b"]
    assert pool.states == {"b": "loaded", "a": "unloaded"}


async def test_too_large_model(pool: Pool) -> None:
    def refuse(name: str) -> None:
        raise MemoryBudgetError("it is too large")

    pool.before_load = refuse
    with pytest.raises(MemoryBudgetError, match="too large"):
        async with pool.pool.using("b"):
            pass


async def test_unload_idle_model(tiny_folder: Path) -> None:
    pool = Pool(tiny_folder, keep_alive_s=0)
    with closing(pool.pool):
        async with pool.pool.using("b"):
            pool.pool.keep("b", -1)
        async with pool.pool.using("a"):
            for _ in range(3):
                await tended(pool)
            assert pool.states["a"] == "loaded"
        await tended(pool)
        assert pool.states == {"b": "loaded", "a": "unloaded"}


def test_keep_alive_of_requests(pool: Pool) -> None:
    with serving(pool.pool) as running:
        body = {"model": "a", "keep_alive": 0}  # it is not loaded
        status, said, _ = running.request("POST", "/api/generate", body)
        assert (status, said["done_reason"]) == (200, "unload")
        assert running.chat(model="a", max_tokens=1)[0] == 200
        left = pool.pool.find("a").unload_s
        assert left is not None
        assert left > 100
        for seconds in (b"1e999", b"-1"):
            asked = b'{"model": "a", "keep_alive": %s}' % seconds
            assert running.request("POST", "/api/generate", asked)[0] == 200
            (listed,) = running.request("GET", "/api/ps")[1]["models"]
            assert listed["name"] == "a"
            assert pool.pool.find("a").unload_s is None
            assert running.request("GET", "/v1/models")[0] == 200


def test_offer_all_models(pool: Pool) -> None:
    with serving(pool.pool) as running:
        status, listed, _ = running.request("GET", "/v1/models")
        assert status == 200
        assert [(m["id"], m["status"]["value"]) for m in listed["data"]] == [
            ("a", "unloaded"),
            ("b", "unloaded"),
        ]
        for name in "ab":
            status, answer, _ = running.chat(model=name, **GREEDY)
            assert (status, answer["model"]) == (200, name)
        assert running.chat(model="c")[0] == 404
        text = running.request("GET", "/metrics")[1]
        assert 'localrt_generated_tokens_total{model="a"} 4' in text
        assert 'localrt_generated_tokens_total{model="b"} 4' in text
    assert [name for name, _ in pool.loaded] == ["a", "b"]


# -- memory, with models of no content -------------------------------------------------------------

GB = 1 << 30


class Model:
    """A model of 4 GB; one that is ``streamed`` can leave all but 1 GB of them."""

    gpu_use: Any = None

    def __init__(self, machine: Machine, streamed: bool) -> None:
        self.machine = machine
        self.info = SimpleNamespace(
            streamed=streamed, device="cpu", weight_bytes=4 * GB, ctx=512, sees=False
        )
        self.weights_in_ram = min(4 * GB, machine.free) if streamed else 4 * GB
        self.spare_ram = 0
        machine.models.append(self)

    def leave_ram(self, nbytes: int) -> int:
        least = GB if self.info.streamed else 4 * GB
        before, left = self.weights_in_ram, self.weights_in_ram - nbytes
        self.weights_in_ram = min(max(left, least), 4 * GB)
        return before - self.weights_in_ram

    def live(self, **_: Any) -> Any:
        return self

    def stats(self) -> Any:
        return SimpleNamespace(kv_bytes=0, parked_bytes=0)

    def park(self, to: str = "disk") -> None:
        pass

    def close(self) -> None:
        pass

    def unload(self) -> None:
        self.machine.models.remove(self)


class Machine:
    """Models of 4 GB in memory for two of them and a half, and a clock."""

    def __init__(self, streamed: bool) -> None:
        self.models: list[Model] = []
        self.now, self.nbytes = 1000.0, 10 * GB
        self.loaded: list[str] = []
        self.streamed = streamed
        files = [LocalFile(name, name, 4 * GB) for name in "abc"]
        self.pool = ModelPool(self.load, lambda: files, ServeOptions())

    def load(self, name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int) -> Any:
        self.loaded.append(name)
        return Model(self, self.streamed)

    @property
    def free(self) -> int:
        return self.nbytes - sum(model.weights_in_ram for model in self.models)

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


whole = pytest.mark.parametrize("machine", [False], indirect=True, ids=["whole"])
streamed = pytest.mark.parametrize("machine", [True], indirect=True, ids=["streamed"])


@whole
async def test_least_recently_used_is_unloaded(machine: Machine) -> None:
    await machine.use("a", "b", "a", "c")
    assert set(machine.held) == {"a", "c"}


@streamed
async def test_least_recently_used_shrinks(machine: Machine) -> None:
    await machine.use("b", "a", "c")
    assert machine.held == {"a": 4, "b": 2, "c": 4}
    async with machine.pool.using("b"):  # while it answers, it gives nothing
        assert machine.held == {"a": 2, "b": 4, "c": 4}
        await machine.use("a")
        assert machine.held == {"a": 4, "b": 4, "c": 2}
    assert machine.loaded == ["b", "a", "c"]


@streamed
async def test_idle_model_shrinks_and_is_unloaded_later(machine: Machine) -> None:
    await machine.use("a")
    for held in ({"a": 1}, {}):
        machine.now += 300.0
        await tended(machine)
        assert machine.held == held
