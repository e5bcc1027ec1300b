"""A model's life: loaded in the background, given less or more memory, gone without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import localrt
from localrt.common.errors import MemoryBudgetError
from localrt.offload.account import Account, check_fits
from tests.conftest import write_tiny_model
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


LOADS = """
import json, sys, psutil, localrt

held, rss = [], lambda: psutil.Process().memory_info().rss / 1e6
for _ in range(4):
    model = localrt.load(sys.argv[1], ctx=1024, draft="off")
    model.chat().send("hi", max_tokens=16, ignore_eos=True)
    model.embed(["one", "two"])
    most = rss()
    model.unload()
    held.append(rss())
print(json.dumps([held, most]))
"""


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory that is free may be kept elsewhere")
def test_unload_returns_memory(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "LOCALRT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LOADS, str(real_model("smollm2"))]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True)
    held, most = json.loads(done.stdout)
    # The first time leaves libraries behind; from then on there is nothing more.
    assert most - held[-1] > 90
    assert held[-1] - held[0] < 5


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
    import os, sys
    import localrt

    GREEDY = dict(max_tokens=4, temperature=0.0)
    model = localrt.load(sys.argv[1])
    live = model.live()
    said = model.generate("Hi", **GREEDY).token_ids
    asked = (
        lambda: model.generate("Hi"), lambda: live.generate("Hi"), lambda: model.chat().send("Hi"),
        lambda: model.embed(["Hi"]),
    )
    for stream in (None, model.stream("Hi"), live.stream("Hi")):
        if stream is not None:
            next(stream)
        child = os.fork()
        if not child:
            for work in asked:
                try:
                    work()
                except localrt.LocalrtError as error:
                    assert "a model does not survive a fork" in str(error), error
                else:
                    os._exit(2)
            own = localrt.load(sys.argv[1])  # it loads one of its own
            os._exit(own.generate("Hi", **GREEDY).token_ids != said)
        assert os.waitpid(child, 0)[1] == 0
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
