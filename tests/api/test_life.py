"""A model's life: loaded in the background, given less or more memory, gone without a trace."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import localrt
from localrt.common.errors import MemoryBudgetError
from localrt.offload.account import Account, check_fits
from localrt.offload.memory import current_rss
from tests.conftest import write_tiny_model
from tests.inside import core_of
from tests.offload.placed import Model as StoredModel
from tests.offload.placed import extend, needs_kernels, pack_synthetic, passing, tokens
from tests.real_models import real_model

ROOT = Path(__file__).parents[2]

# -- in the background ---------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Loading in the background waits until it is set."""
    event, load = threading.Event(), localrt.load

    def held(*arguments: Any, **options: Any) -> localrt.Model:
        event.wait(60)
        return load(*arguments, **options)

    monkeypatch.setattr("localrt.api.load", held)
    return event


def test_background_progress(tiny_folder: Path) -> None:
    seen: list[tuple[str, bool]] = []
    begin = threading.Event()

    def look(loading: localrt.Loading) -> None:
        begin.wait(10)
        seen.append((loading.progress.stage if loading.progress else "", loading.done))

    loading = localrt.load_in_background(tiny_folder)
    loading.add_callback(look)
    loading.add_callback(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    begin.set()
    with loading.result(60) as model:
        assert model.generate("hi", max_tokens=2, ignore_eos=True).token_ids
        deadline = threading.Event()
        while not (seen and seen[-1][1]):
            deadline.wait(0.01)
    assert seen[-1] == ("load", True)
    assert [done for _, done in seen].count(True) == 1
    assert loading.done
    loading.add_callback(look)
    assert seen[-1] == ("load", True)


def test_background_failure(tmp_path: Path) -> None:
    with pytest.raises(localrt.LocalrtError, match="no such file"):
        localrt.load_in_background(tmp_path / "none").result(60)
    with pytest.raises(localrt.OptionError, match="engine must be"):
        localrt.load_in_background(tmp_path, engine="magic").result(60)
    with pytest.raises(localrt.OptionError, match="progress is the handle's own"):
        localrt.load_in_background(tmp_path, progress=print)


def test_background_cancel(tiny_folder: Path, gate: threading.Event) -> None:
    loading = localrt.load_in_background(tiny_folder)
    loading.cancel()
    gate.set()
    with pytest.raises(localrt.CancelledError):
        loading.result(60)
    assert loading.cancelled
    late = localrt.load_in_background(tiny_folder)
    model = late.result(60)
    late.cancel()
    with pytest.raises(localrt.LocalrtError, match="closed"):
        model.generate("hi")


async def test_background_asyncio(tiny_folder: Path, gate: threading.Event) -> None:
    loading = localrt.load_in_background(tiny_folder)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loading.aresult(), 1e-6)
    gate.set()
    (await loading.aresult()).close()


# -- unloading -----------------------------------------------------------------------------------


def test_unload_ends_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.service.core._PATIENCE_S", 60.0)
    model = localrt.load(write_tiny_model(tmp_path))
    chat, other = model.chat(max_tokens=3), model.chat(max_tokens=400, ignore_eos=True)
    chat.send("hi")
    answer = other.stream("go on")
    next(answer)
    assert chat.tokens_used
    thread = threading.Thread(target=list, args=(answer,))
    thread.start()
    model.unload()
    thread.join()
    assert chat.tokens_used == other.tokens_used == 0
    assert len(chat.messages) == len(other.messages) == 2
    for work in (lambda: chat.send("x"), lambda: model.generate("x"), lambda: model.embed(["x"])):
        with pytest.raises(localrt.LocalrtError, match="closed"):
            work()
    model.unload()
    model.close()


CHILD = """
    import json, sys, psutil
    import localrt, localrt.planning.measure
    from localrt.offload.reading.disk_speed import DiskProfile
    from localrt.offload.reading.files import ReadMode
    from localrt.planning.machine import typical_machine

    # Measuring takes seconds.
    known = DiskProfile(ReadMode(direct=False, threads=2, block=1 << 20), 1e9, 0.0)
    localrt.planning.measure.machine_profile = lambda *_, **__: (known, typical_machine())
    rss = lambda: psutil.Process().memory_info().rss / 1e6
    path = sys.argv[1]
    GREEDY = dict(temperature=0, max_tokens=16, ignore_eos=True, draft="off")
"""


def child(script: str, home: Path) -> Any:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "LOCALRT_CACHE": str(home / "cache"),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(CHILD) + textwrap.dedent(script),
            str(real_model("smollm2")),
        ],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory that is free may be kept elsewhere")
def test_unload_returns_memory(tmp_path: Path) -> None:
    found = child(
        """
        held = []
        for _ in range(4):
            model = localrt.load(path, ctx=1024)
            model.generate("hello", **GREEDY)
            chat = model.chat()
            chat.send("hi", **GREEDY)
            model.embed(["one", "two"])
            most = rss()
            model.unload()
            held.append(rss())
        print(json.dumps([held, most]))
        """,
        tmp_path,
    )
    held, most = found
    # The first time leaves libraries behind; from then on there is nothing more.
    assert most - held[-1] > 90
    assert held[-1] - held[0] < 5


@pytest.mark.real
@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="see above")
def test_smaller_budget_while_answering(tmp_path: Path) -> None:
    found = child(
        """
        out = {"held": [], "read": [], "why": [], "same": []}
        from tests.inside import engine_of
        with localrt.load(path, ctx=1024, ram="160MB", threads=1) as model:
            out["expected"] = model.status().ram.forecast / 1e6
            whole = model.generate("Tell me a story", **GREEDY)

            def keep(last, tokens):
                out["held"].append(engine_of(model).weights.memory.ram_nbytes / 1e6)
                out["read"].append(last.metrics.ssd_read_bytes)
                out["why"].append(last.metrics.memory)
                out["same"].append(tokens == list(whole.token_ids))

            keep(whole, list(whole.token_ids))
            tokens = []
            for chunk in model.stream("Tell me a story", **GREEDY):
                tokens += chunk.token_ids
                if len(tokens) == 4:
                    model.set_budget(ram="125MB")
            keep(chunk, tokens)
            try:
                model.set_budget(ram="60MB")
            except localrt.MemoryBudgetError as error:
                out["refused"] = str(error)
            answer = model.generate("Tell me a story", **GREEDY)
            keep(answer, list(answer.token_ids))
            model.set_budget(ram="300MB")
            for _ in range(2):
                answer = model.generate("Tell me a story", **GREEDY)
            keep(answer, list(answer.token_ids))
        print(json.dumps(out))
        """,
        tmp_path,
    )
    assert all(found["same"])
    before, during, after, plenty = found["read"]
    assert before < during < after
    assert plenty == 0
    assert found["why"][0] is None
    assert found["why"][1].endswith("read for every token: the budget is 125 MB of RAM now")
    assert found["why"][2] == found["why"][1]
    assert "less of the weights" in found["why"][3]
    # What the process takes is tests/memory's: here it is what is counted.
    assert found["expected"] < 160
    for held in found["held"][1:3]:
        assert found["expected"] - (found["held"][0] - held) < 125
    assert "60 MB of RAM is too little" in found["refused"]


# -- budgets, without files of a real model ------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredModel]:
    model = StoredModel(pack_synthetic(tmp_path_factory.mktemp("stored"), layers=4))
    yield model
    model.close()


@needs_kernels
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_budgets(data: st.DataObject, stored: StoredModel) -> None:
    names = passing(stored.store)
    streamed = data.draw(st.sets(st.sampled_from(names), min_size=1))
    at_most = sum(unit.nbytes for unit in stored.store.manifest.units) + 400_000
    with stored.placed(streamed) as placed:
        cache, twin = placed.cache(64), stored.resident.cache(64)
        for turn in range(8):
            budget = data.draw(st.integers(0, at_most))
            try:
                placed.weights.memory.set_budget(budget, f"{budget} bytes")
            except localrt.MemoryBudgetError:
                continue
            try:
                found = extend(placed, cache, tokens(3, seed=turn))
            except localrt.MemoryBudgetError:
                placed.weights.memory.set_budget(1 << 40, "plenty")
                found = extend(placed, cache, tokens(3, seed=turn))
            wanted = extend(stored.resident, twin, tokens(3, seed=turn))
            assert (found == wanted).all()


@needs_kernels
def test_budget_bounds_trees(tiny_folder: Path) -> None:
    with localrt.load(tiny_folder) as model, closing(core_of(model).new_session()) as session:
        rows = [session.tree_rows or 0]
        for room in (32 << 20, 256 << 20):
            model.set_budget(ram=current_rss() + room)
            rows.append(session.tree_rows or 0)
    assert 0 < rows[1] < rows[2] < rows[0]


def test_budget_of_whole_model(tiny: localrt.Model) -> None:
    tiny.set_budget(ram="900GB")
    assert tiny.spare_ram == tiny.leave_ram(1 << 20) == 0
    for words in ("loaded whole", r"without the weights .*, so give it more"):
        with pytest.raises(localrt.MemoryBudgetError, match=words):
            tiny.set_budget(ram="1MB")
    with pytest.raises(localrt.OptionError, match="no GPU memory"):
        tiny.set_budget(gpu_memory="8GB")
    with pytest.raises(localrt.OptionError, match="ram must be a size"):
        tiny.set_budget(ram="lots")
    assert tiny.generate("hi", max_tokens=2, ignore_eos=True).token_ids


@needs_kernels
@pytest.mark.usefixtures("given_rates")
def test_leave_ram(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    # More passes than units that are read ahead, before an answer begins too.
    options = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    with localrt.load(tiny_folder, shrinkable=True, ctx=512) as model:
        answers = [model.generate("hi", **options)]
        spare = model.spare_ram
        left = model.leave_ram(spare + 1)
        assert left == spare + 1
        assert model.spare_ram < spare
        answers.append(model.generate("hi", **options))
        assert model.leave_ram(-left) == -left
        answers += [model.generate("hi", **options) for _ in range(3)]
        assert 0 < model.leave_ram(1 << 60) < 1 << 60  # all but what has to stay
    assert len({answer.token_ids for answer in answers}) == 1
    read = [answer.metrics.ssd_read_bytes for answer in answers]
    assert read[0] == read[-1] == 0 < read[1]


@pytest.mark.parametrize(
    ("way", "asked"), [("stream", "Hi"), ("stream_batch", ["Hi", "Ho"]), ("chat", "Hi")]
)
def test_closed_amid_answers(way: str, asked: Any, tiny_folder: Path) -> None:
    with localrt.load(tiny_folder) as model:
        ask = model.chat().stream if way == "chat" else getattr(model, way)
        answers = ask(asked, max_tokens=50, ignore_eos=True)
        next(answers)
        model.close()
        with pytest.raises(localrt.LocalrtError, match="the model is closed"):
            list(answers)


# -- forks ---------------------------------------------------------------------------------------

FORKS = """
    import asyncio, os, sys
    import localrt

    ASKED = {
        "generate": "model.generate('Hi', max_tokens=2)",
        "stream": "list(model.stream('Hi', max_tokens=2))",
        "chat": "chat.send('Hi', max_tokens=2)",
        "batch": "model.generate_batch(['Hi', 'Ho'], max_tokens=2)",
        "live": "live.generate('Hi', max_tokens=2)",
        "live, a long prompt": "asyncio.run(live.agenerate('Hi ' * 9000, max_tokens=2))",
        "embed": "model.embed(['Hi'])",
        "logits": "list(model.logits([1, 2]))",
    }
    GREEDY = dict(max_tokens=4, temperature=0.0)

    def refused_in_children():
        for asked, work in ASKED.items():
            child = os.fork()
            if not child:
                try:
                    eval(work)
                except localrt.LocalrtError as error:
                    fits = "a model does not survive a fork" in str(error)
                    # A chat that answers when its process is forked goes on in the copy.
                    os._exit(0 if fits or "already answering" in str(error) else 1)
                os._exit(2)
            assert os.waitpid(child, 0)[1] == 0, asked

    model = localrt.load(sys.argv[1], ctx=16384)
    chat, live = model.chat(), model.live()
    chat.send("Hi", max_tokens=2)
    live.generate("Hi", max_tokens=2)
    refused_in_children()
    said = model.generate("Hi", **GREEDY).token_ids
    child = os.fork()
    if not child:  # it loads one of its own
        own = localrt.load(sys.argv[1])
        model.close()
        os._exit(own.generate("Hi", **GREEDY).token_ids != said)
    assert os.waitpid(child, 0)[1] == 0
    assert model.generate("Hi", **GREEDY).token_ids == said
    busy = (model.stream("Hi"), live.stream("Ho"), chat.stream("Ha"))
    for stream in busy:
        next(stream)
    refused_in_children()
    model.unload()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks(tiny_folder: Path) -> None:
    """A child is refused the parent's model, idle or within a pass, and may load its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKS), str(tiny_folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _account(weights: int, kv: int, scratch: int = 0) -> Account:
    return Account.of(
        [("ram", "weights", weights), ("ram", "keys and values", kv), ("ram", "scratch", scratch)]
    )


def test_does_not_fit() -> None:
    estimate = _account(weights=100_000_000, kv=2_000_000_000, scratch=20_000_000)
    with pytest.raises(MemoryBudgetError) as caught:
        check_fits(estimate, 1_000_000_000, "smollm2", ctx=8192)
    message = str(caught.value)
    for number in ("2.1 GB", "100 MB", "2 GB", "20 MB", "1 GB", "ctx=3584"):
        assert number in message
    assert "\n" not in message
    check_fits(_account(100_000_000, 2_000_000_000 * 3584 // 8192, 20_000_000), 1_000_000_000, "it")
    with pytest.raises(MemoryBudgetError, match="smaller model"):
        check_fits(_account(weights=10**9, kv=10**6), 10**8, "it", ctx=4096)
