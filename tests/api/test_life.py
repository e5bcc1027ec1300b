"""A model's life: loaded in the background, given less or more memory, gone without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.common.errors import MemoryBudgetError
from localrt.offload.account import Account, check_fits
from localrt.offload.memory import current_rss
from tests.conftest import write_tiny_model
from tests.inside import core_of
from tests.offload.placed import needs_kernels
from tests.real_models import real_model

ROOT = Path(__file__).parents[2]

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


UNLOADED = """
    import json, sys, psutil
    import localrt

    rss = lambda: psutil.Process().memory_info().rss / 1e6
    GREEDY = dict(temperature=0, max_tokens=16, ignore_eos=True, draft="off")
    held = []
    for _ in range(4):
        model = localrt.load(sys.argv[1], ctx=1024)
        model.generate("hello", **GREEDY)
        chat = model.chat()
        chat.send("hi", **GREEDY)
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
    command = [sys.executable, "-c", textwrap.dedent(UNLOADED), str(real_model("smollm2"))]
    own = {"HOME": str(tmp_path), "LOCALRT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, timeout=240, check=True
    )
    held, most = json.loads(done.stdout)
    # The first time leaves libraries behind; from then on there is nothing more.
    assert most - held[-1] > 90
    assert held[-1] - held[0] < 5


# -- budgets, without files of a real model ------------------------------------------------------


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


@pytest.mark.parametrize(("way", "asked"), [("stream_batch", ["Hi", "Ho"]), ("chat", "Hi")])
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
    from pathlib import Path

    import localrt
    from localrt.engine.saved_caches import forget

    ASKED = {
        "generate": "model.generate('Hi', max_tokens=2)",
        "chat": "chat.send('Hi', max_tokens=2)",
        "batch": "model.generate_batch(['Hi', 'Ho'], max_tokens=2)",
        "live": "live.generate('Hi', max_tokens=2)",
        "live, a long prompt": "asyncio.run(live.agenerate('Hi ' * 9000, max_tokens=2))",
        "embed": "model.embed(['Hi'])",
    }
    GREEDY = dict(max_tokens=4, temperature=0.0)

    def refused_in_children():
        for asked, work in ASKED.items():
            child = os.fork()
            if not child:
                try:
                    eval(work)
                except localrt.LocalrtError as error:
                    os._exit("a model does not survive a fork" not in str(error))
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
    child = os.fork()
    if not child:  # what its parent holds is not a child's to free
        forget(Path("nowhere"), frozenset(), 0.0)
        os._exit(not chat.kv_nbytes)
    assert os.waitpid(child, 0)[1] == 0
    assert model.generate("Hi", **GREEDY).token_ids == said
    model.unload()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks(tiny_folder: Path) -> None:
    """A child is refused the parent's model, and may load its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKS), str(tiny_folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_does_not_fit() -> None:
    weights, kv = 100_000_000, 2_000_000_000
    estimate = Account.of([("ram", "weights", weights), ("ram", "keys and values", kv)])
    with pytest.raises(MemoryBudgetError) as caught:
        check_fits(estimate, 1_000_000_000, "smollm2", ctx=8192)
    message = str(caught.value)
    for number in ("2.1 GB", "100 MB", "2 GB", "1 GB", "ctx=3584"):
        assert number in message
    assert "\n" not in message
