"""Threads that meet at bad moments, and forks at any: answers stay the same, and nothing hangs.

Several threads use one model, which may be unloaded meanwhile, or whose process forks.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import localrt
from benchmarks.common.command import ROOT
from localrt.history import History
from tests.campaigns.campaign import Run, campaign, in_children, try_here
from tests.conftest import write_byte_tokenizer, write_tiny_model
from tests.waits import wait_for

_POOL = ROOT / "build" / "campaigns" / "pool"
_BUILD = "g++ -std=c++17 -O1 -g -fsanitize=thread -pthread -Iquant/cpu/csrc -o"
_SOURCES = ("tests/campaigns/pool.cpp", "quant/cpu/csrc/pool.cpp")
_draws = threading.local()
Draw = random.Random
Tokens = tuple[int, ...]
GREEDY: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [f"Tell me {count} stories. " * (2 + count) for count in range(4)]
PATIENCE_S = 60


@cache
def folder(kind: str) -> Path:
    """A tiny model, dense or a mixture of experts."""
    path = Path(tempfile.mkdtemp(prefix="model-", dir=os.environ["XDG_DATA_HOME"]))
    if kind == "dense":
        return write_tiny_model(path, wide=512)  # half of it has room for caches
    from tests.models.tiny import save_tiny

    save_tiny("qwen3-moe", path, vocab=write_byte_tokenizer(path))
    return path


@contextmanager
def loaded(kind: str) -> Iterator[localrt.Model]:
    """One whose weights are read for each pass, and whose caches are saved."""
    with localrt.load(folder(kind), shrinkable=True, ctx=512, threads=2) as model:
        model.leave_ram(model.spare_ram + model.info.weight_bytes // 2)
        yield model


@cache
def expected_answers(kind: str) -> dict[str, tuple[Tokens, Tokens]]:
    """To each prompt, and to what follows, by one thread."""
    from localrt.loading import placing
    from localrt.offload.reading.disk_speed import DiskProfile
    from localrt.offload.reading.files import ReadMode
    from localrt.planning import measure
    from tests.planner.models import machine

    os.environ["LOCALRT_CACHE"] = os.environ["XDG_DATA_HOME"]
    os.environ["LOCALRT_KV_DISK"] = "1GB"
    rates = DiskProfile(ReadMode(direct=False, threads=2, block=1 << 20), 1e9, 0.0), machine()
    for module in (measure, placing):  # loading measures nothing
        module.machine_profile = lambda *_, **__: rates  # type: ignore[attr-defined]
    found = {}
    with loaded(kind) as model:
        for prompt in PROMPTS:
            chat = model.chat()
            first, second = (chat.send(text, **GREEDY).token_ids for text in (prompt, "And?"))
            found[prompt] = tuple(first), tuple(second)
    return found


def same(answer: localrt.Chunk, wanted: Tokens) -> None:
    if answer.finish_reason == "cancelled":  # by unloading
        wanted = wanted[: len(answer.token_ids)]
    assert tuple(answer.token_ids) == wanted, "the answer is another"


def use(model: localrt.Model, live: localrt.LiveModel, kind: str, draw: Draw, times: int) -> None:
    """What one of several threads does."""
    for _ in range(times):
        prompt = draw.choice(PROMPTS)
        first, second = expected_answers(kind)[prompt]
        way = draw.choice(("stream", "live", "batch", "chat", "cancel", "ram"))
        if way == "stream":
            same(model.generate(prompt, **GREEDY), first)
        elif way == "live":
            same(live.generate(prompt, **GREEDY), first)
        elif way == "batch":
            for answer in model.generate_batch([prompt, prompt], **GREEDY):
                same(answer, first)
        elif way == "chat":
            chat = model.chat()
            same(chat.send(prompt, **GREEDY), first)
            if draw.random() < 0.7:
                chat.park()
            if len(chat.messages) == 2:
                same(chat.send("And?", **GREEDY), second)
            chat.close()
        elif way == "cancel":
            stream: Any = draw.choice((model, live)).stream(prompt, **GREEDY)
            next(stream)
            stream.close()
        else:
            model.leave_ram(-model.leave_ram(draw.randrange(model.info.weight_bytes // 8)))


def _run(*works: Callable[[], object]) -> None:
    """Do all in threads of their own, and raise what one of them raises."""
    with ThreadPoolExecutor(len(works)) as pool:
        for each in [pool.submit(work) for work in works]:
            each.result()


def _none_left() -> None:
    def left() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("localrt-")]

    wait_for(lambda: not left(), PATIENCE_S)


def users(kind: str, draw: Draw) -> None:
    """Several threads use one model."""
    with loaded(kind) as model, model.live() as live:
        draws = [Draw(draw.getrandbits(32)) for _ in range(3)]
        _run(*(partial(use, model, live, kind, each, 4) for each in draws))
    _none_left()


def unloading(draw: Draw) -> None:
    """The same, while the model is unloaded: each gets its answer, or an error in one line."""
    with loaded("dense") as model:
        live = model.live()

        def until_unloaded(own: Draw) -> None:
            with suppress(localrt.LocalrtError):
                use(model, live, "dense", own, 50)

        def unload() -> None:
            time.sleep(draw.random())
            (model.unload if draw.random() < 0.5 else model.close)()

        draws = [Draw(draw.getrandbits(32)) for _ in range(3)]
        _run(unload, *(partial(until_unloaded, each) for each in draws))
    _none_left()


def forks(draw: Draw) -> None:
    """Children are forked while a thread uses the model, and do what they must not, or load one."""
    wanted = expected_answers("dense")
    with loaded("dense") as model, History(":memory:") as history, model.live() as live:
        chat, stop = model.chat(), threading.Event()
        chat.send(PROMPTS[0], **GREEDY)
        streams: list[Any] = [each.stream(PROMPTS[1], **GREEDY) for each in (model, live, chat)]
        begun = [tuple(next(stream).token_ids) for stream in streams]

        def busy() -> None:
            own = Draw(draw.getrandbits(32))
            while not stop.is_set():
                use(model, live, "dense", own, 1)

        refused = [
            *(partial(next, stream) for stream in streams),
            *(partial(each.generate, "Hi") for each in (model, live)),
            *(partial(model.generate_batch, ["Hi"]), partial(model.leave_ram, 1), model.status),
            *(live.park, live.stats, partial(model.embed, ["Hi"]), partial(chat.send, "Hi")),
            *(chat.park, model.chat, history.list),
        ]
        ended = [model.close, model.unload, live.close, live.cancel_all, chat.close, history.close]
        ended += [stream.close for stream in streams]

        def in_child() -> None:
            for work in draw.sample(refused, 4):
                with pytest.raises(localrt.LocalrtError, match=r"^[^\n]* does not survive a fork"):
                    work()
            for work in draw.sample(ended, 3):
                work()
            if draw.random() < 0.3:
                with loaded("dense") as own:
                    same(own.generate(PROMPTS[2], **GREEDY), wanted[PROMPTS[2]][0])

        def fork() -> None:
            try:
                for _ in range(4):
                    time.sleep(draw.random() / 20)
                    _fork(in_child)
            finally:
                stop.set()

        _run(busy, fork)
        for stream, first in zip(streams[:2], begun, strict=False):
            rest = sum((tuple(chunk.token_ids) for chunk in stream), ())
            assert first + rest == wanted[PROMPTS[1]][0]
    _none_left()


def _fork(work: Callable[[], None]) -> None:
    """Do it in a forked child, which then ends as Python does."""
    child = os.fork()
    if not child:
        status = 1
        try:
            faulthandler.register(signal.SIGALRM, chain=True)  # its watchdog was not forked
            signal.alarm(PATIENCE_S)
            work()
            gc.collect()
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
            status = 0
        except BaseException:  # noqa: BLE001 - the parent sees the status
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "a forked child failed or hung"


def kernels_threads(draw: random.Random) -> None:
    """One run of ``pool.cpp``."""
    done = subprocess.run([_POOL, f"{draw.getrandbits(16)}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000] + done.stdout


CASES: dict[str, Callable[[Draw], None]] = {
    "kernels' threads": kernels_threads,
    "users": partial(users, "dense"),
    "users of a mixture": partial(users, "mixture"),
    "unloading": unloading,
    "forks": forks,
}


def _delay(seed: int) -> None:
    """Do nothing, let another thread run, or sleep for up to 3 ms."""
    if not hasattr(_draws, "draw"):
        thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
        _draws.draw = random.Random(f"{seed} {getattr(thread, 'name', '')}")
    chance = _draws.draw.random()
    if chance > 0.5:
        time.sleep(0 if chance < 0.95 else (chance - 0.95) * 0.06)


def delay_threads(seed: int) -> None:
    """Give every lock and queue made from now on such delays."""

    class Delayed:
        def __init__(self, make: Any) -> None:
            self.lock = make()

        def acquire(self, *args: Any, **options: Any) -> Any:
            _delay(seed)
            return self.lock.acquire(*args, **options)

        def release(self) -> None:
            self.lock.release()
            _delay(seed)

        __enter__ = acquire

        def __exit__(self, *_error: object) -> None:
            self.release()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.lock, name)

        def get(self, *args: Any, **options: Any) -> Any:
            _delay(seed)
            return self.lock.get(*args, **options)

    kinds: tuple[Any, ...] = (threading.Lock, threading.RLock, queue.SimpleQueue)
    delayed = {make: partial(Delayed, make) for make in kinds}
    for module in list(sys.modules.values()):
        for name in ("Lock", "RLock", "SimpleQueue"):
            if (make := vars(module).get(name)) in delayed:
                setattr(module, name, delayed[make])
    sys.setswitchinterval(1e-5)


def body(run: Run) -> None:
    """Delay threads at locks and queues, fork, and run the kernels' threads under a sanitizer."""
    _POOL.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*_BUILD.split(), _POOL, *_SOURCES], cwd=ROOT, check=True)
    in_children(run, CASES, at_once=20)


def child(case: str, seed: str, first: str, count: str) -> None:
    """Make tries of ``case``; threads of a model are delayed."""
    if case != "kernels' threads":
        expected_answers("mixture" if "mixture" in case else "dense")  # before threads are delayed
        delay_threads(int(seed) + int(first))
    try_here(CASES[case], 240, case, seed, first, count)


if __name__ == "__main__":
    campaign("interleavings", body, count=500, child=child)
