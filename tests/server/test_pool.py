"""Several models behind one server: which are loaded, who leaves memory to whom, and when."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.common.errors import CancelledError, MemoryBudgetError
from localrt.offload.memory import current_rss
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from localrt.system import return_free_memory
from tests.real_models import real_model
from tests.server.conftest import needs_kernels, serving

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
TEXT = "Count from one to twenty in words. Then do it backwards, and say which was harder. " * 8


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


async def tended(pool: Pool) -> None:
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


async def test_client_keep_alive(pool: Pool) -> None:
    """A model that was only idle is loaded as before: no packed copy is written for it."""

    async def used() -> float | None:
        async with pool.pool.using("a"):
            pass
        return pool.pool.find("a").unload_s

    pool.pool.keep("a", 0)
    await used()
    await tended(pool)
    assert pool.states["a"] == "unloaded"
    left = await used()
    assert left is not None
    assert left > 100
    assert pool.loaded == [("a", False), ("a", False)]


def test_unload_what_is_not_loaded(pool: Pool) -> None:
    with serving(pool.pool) as running:
        body = {"model": "a", "keep_alive": 0}
        status, said, _ = running.request("POST", "/api/generate", body)
        assert (status, said["done_reason"]) == (200, "unload")
        assert running.chat(model="a", max_tokens=1)[0] == 200
        left = pool.pool.find("a").unload_s
        assert left is not None
        assert left > 100


@pytest.mark.parametrize("seconds", ["1e12", "1e999", "-1"])
def test_keep_alive_for_ever(pool: Pool, seconds: str) -> None:
    with serving(pool.pool) as running:
        body = b'{"model": "a", "keep_alive": %s}' % seconds.encode()
        assert running.request("POST", "/api/generate", body)[0] == 200
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


# -- within a budget, on real weights ------------------------------------------------------------


@pytest.fixture
def by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Two models of 98 MB each, and room for one and a half."""
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("LOCALRT_KV_DISK")
    path = real_model("smollm2")
    pool = Pool(tmp_path)
    with localrt.load(path, ctx=1024, draft="off") as once:  # what a first model takes for good
        once.generate(TEXT, **GREEDY)
    gc.collect()  # what other tests left is not to become room later
    return_free_memory()
    budget = current_rss() + int(2.2 * path.stat().st_size)

    def load(name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int) -> localrt.Model:
        pool.loaded.append((name, shrinkable))
        options = {"ctx": 1024, "draft": "off", "ram": budget, "shrinkable": shrinkable}
        return localrt.load(path, **options)

    files = [LocalFile(name, name, path.stat().st_size) for name in "ab"]
    pool.pool = ModelPool(load, lambda: files, ServeOptions(), ram=budget)
    yield pool
    pool.pool.close()


@pytest.mark.real
@needs_kernels
async def test_shrink_by_turns(by_turns: Pool) -> None:
    tokens: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    cached: dict[str, list[int]] = {"a": [], "b": []}

    for _ in range(3):
        for name in "ab":
            async with by_turns.pool.using(name) as served:
                answer = await served.live.agenerate(TEXT, **GREEDY)
                tokens[name].append(answer.token_ids)
                cached[name].append(answer.metrics.cached_tokens)
    assert len({*tokens["a"], *tokens["b"]}) == 1
    assert all(count > 100 for name in "ab" for count in cached[name][1:])
    # Each was loaded whole at first, and then so that it can shrink: never a third time.
    assert len(by_turns.loaded) <= 4
    assert set(by_turns.states.values()) == {"loaded", "shrunk"}
