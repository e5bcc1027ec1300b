"""Drafting while a pass waits: the same tokens, whatever becomes of the draft meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.engine.native.engine import NativeEngine
from localrt.engine.speculation import Speculation
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.reader import waiting
from localrt.speculative.source import DraftFailedError, TreeSize
from localrt.speculative.tree_source import TreeSource
from localrt.speculative.tuner import Tuner
from tests.conftest import needs_kernels
from tests.engine.test_speculation import (
    CAPACITY,
    PROMPT,
    SAMPLINGS,
    fixed,
    ids,
    info_of,
    load,
    run,
)
from tests.offload.placed import Model, pack_tiny, passing
from tests.speculative.sources import model_source

pytestmark = needs_kernels


class Waiting:
    """An engine whose passes wait before they compute: ``meanwhile`` is called in that time."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.meanwhile: Callable[[], None] = lambda: None
        self._compute: Any = engine._forward
        engine._forward = self._forward

    def _forward(self, batch: Any, **options: Any) -> Any:
        with waiting(options.get("check")):
            if len(batch.tokens) < len(PROMPT):
                self.meanwhile()
        return self._compute(batch, **options)


class Draft:
    """A draft's decoder that knows which thread it works in, and may break there."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.cache = engine.cache
        self.ahead = 0  # passes made beside the target's
        self.after = 0  # and between them
        self.breaks: BaseException | None = None
        self.entered = threading.Event()

    def forward(self, batch: Any, **options: Any) -> Any:
        beside = threading.current_thread().name == "localrt-draft"
        if beside:
            self.entered.set()
            if self.breaks is not None:
                raise self.breaks
        logits = self._engine.run(batch, **options)
        if beside:
            self.ahead += 1
        else:
            self.after += 1
        return logits

    def some(self, passes: int = 3) -> None:
        """Wait until a few more passes were made, if anybody makes any."""
        time.sleep(0.006)  # a gap that is worth it
        before, end = self.ahead, time.perf_counter() + 60
        while any_drafting() and self.ahead < before + passes and self.breaks is None:
            assert time.perf_counter() < end
            time.sleep(0.0005)


def any_drafting() -> bool:
    return any(thread.name == "localrt-draft" for thread in threading.enumerate())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[int]]:
    with closing(load(folder / "plain")) as engine:
        return {name: ids(run(engine, None, sampling=s)) for name, s in SAMPLINGS.items()}


@pytest.fixture
def target(folder: Path) -> Iterator[Waiting]:
    engine = load(folder / "target")
    yield Waiting(engine)
    engine.close()
    assert not any_drafting()


@pytest.fixture
def draft(folder: Path) -> Iterator[Draft]:
    """The same model: its drafts are accepted."""
    engine = load(folder / "draft")
    yield Draft(engine)
    engine.close()


def source(draft: Draft, **options: Any) -> TreeSource:
    return model_source(draft, **options)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_same_tokens(
    target: Waiting, draft: Draft, plain: dict[str, list[int]], sampling: str
) -> None:
    target.meanwhile = draft.some
    session = target.engine.session(CAPACITY)
    chunks = run(
        target.engine,
        fixed(source(draft), depth=3),
        sampling=SAMPLINGS[sampling],
        session=session,
    )
    assert ids(chunks) == plain[sampling]
    assert draft.ahead > 0
    assert list(session.tokens) == [*PROMPT, *plain[sampling][:-1]]
    fresh = target.engine.session(CAPACITY)
    fresh.extend(session.tokens)
    assert np.array_equal(session.extend([5]), fresh.extend([5]))


def test_spared_passes(target: Waiting, draft: Draft, plain: dict[str, list[int]]) -> None:
    """The same trees and passes, by fewer passes of the draft in between."""
    target.meanwhile = lambda: draft.some(8)
    counts = []
    for in_gaps in (True, False):
        kept = source(draft, temperature=0.02)
        kept.prepares = in_gaps
        speculation = fixed(kept, budget=3, depth=3)
        draft.ahead = draft.after = 0
        chunks = run(target.engine, speculation)
        assert ids(chunks) == plain["greedy"]
        counts.append((draft.ahead, draft.after, chunks[-1].metrics.accepted_per_pass))
    (ahead, after, tokens), (none, all_after, same) = counts
    assert none == 0
    assert ahead > 0
    assert after < 0.7 * all_after
    assert tokens is not None
    assert same is not None
    assert tokens >= same - 0.5


def test_cancel(target: Waiting, draft: Draft, plain: dict[str, list[int]]) -> None:
    cancel, passes = threading.Event(), 0

    def meanwhile() -> None:
        nonlocal passes
        passes += 1
        draft.some(1)
        if passes == 4:
            cancel.set()

    target.meanwhile = meanwhile
    it, session = source(draft), target.engine.session(CAPACITY)
    chunks = run(target.engine, fixed(it, depth=3), session=session, cancel=cancel)
    assert chunks[-1].finish_reason == "cancelled"
    said = ids(chunks)
    assert 0 < len(said) < 40
    assert said == plain["greedy"][: len(said)]
    assert not any_drafting()
    target.meanwhile = draft.some
    assert ids(run(target.engine, fixed(it, depth=3), session=session)) == plain["greedy"]


@pytest.mark.parametrize(
    "error",
    [DraftFailedError("it produced NaN logits"), MemoryBudgetError("there is no room")],
)
def test_failing_draft(
    target: Waiting, draft: Draft, plain: dict[str, list[int]], error: LocalrtError
) -> None:
    target.meanwhile = draft.some
    draft.breaks = error
    chunks = run(target.engine, fixed(source(draft), depth=3))
    assert ids(chunks) == plain["greedy"]
    assert chunks[-1].metrics.speculation == f"speculation: off, {error}"


def test_bug_in_draft(target: Waiting, draft: Draft) -> None:
    target.meanwhile = draft.some
    draft.breaks = ZeroDivisionError()
    session = target.engine.session(CAPACITY)
    with pytest.raises(ZeroDivisionError):
        run(target.engine, fixed(source(draft), depth=3), session=session)
    fresh = target.engine.session(CAPACITY)
    fresh.extend(session.tokens)
    assert np.array_equal(session.extend([5]), fresh.extend([5]))  # what it holds is whole


def test_closed_draft(target: Waiting, draft: Draft, plain: dict[str, list[int]]) -> None:
    """As another thread may: the answer goes on without."""

    def meanwhile() -> None:
        if any_drafting():
            assert draft.entered.wait(60)
            draft._engine.close()
        time.sleep(0.006)

    target.meanwhile = meanwhile
    chunks = run(target.engine, fixed(source(draft), depth=3))
    assert ids(chunks) == plain["greedy"]
    assert "the model is closed" in str(chunks[-1].metrics.speculation)


def test_sessions(target: Waiting, draft: Draft, plain: dict[str, list[int]]) -> None:
    """They take turns at both models, and none waits for another for ever."""
    target.meanwhile = lambda: time.sleep(0.01)
    speculation = Speculation(
        {"model": lambda _: source(draft)},
        Tuner({"ngram": 0.0, "model": 0.2}),
        fixed=TreeSize(8, 3),
    )

    def one(name: str) -> list[int]:
        return ids(run(target.engine, speculation, sampling=SAMPLINGS[name]))

    names = [*SAMPLINGS, *SAMPLINGS]
    with ThreadPoolExecutor(len(names)) as pool:
        for name, answer in zip(names, pool.map(one, names, timeout=120), strict=True):
            assert answer == plain[name]
    assert draft.ahead > 0
    assert not any_drafting()


def test_target_as_draft(target: Waiting, plain: dict[str, list[int]]) -> None:
    """Its passes cannot begin before the target's has ended."""
    target.meanwhile = lambda: time.sleep(0.006)
    assert ids(run(target.engine, fixed(source(Draft(target.engine)), depth=3))) == plain["greedy"]


class SlowFiles(StoreFiles):
    """A disk whose reads take a while."""

    def read_into(self, name: str, offset: int, out: Any) -> None:
        time.sleep(0.01)
        super().read_into(name, offset, out)


def test_streamed_target(tmp_path: Path) -> None:
    """Its passes wait for what is read, and the tuner makes use of it."""
    folder = pack_tiny("qwen2", tmp_path)
    # Two of them, since one ``Ops`` computes one pass at a time.
    with closing(Model(folder)) as model, closing(Model(folder)) as twin:
        streamed = [name for name in passing(model.store) if name.startswith("layers")]
        files = SlowFiles(model.store.path, {u.file for u in model.store.manifest.units})
        info = replace(info_of("qwen2"))
        resident = NativeEngine(twin.resident, info)
        expected = ids(run(resident, None))
        with model.placed(streamed, files=files) as decoder:
            engine = NativeEngine(decoder, info)
            helper = Draft(resident)
            tuner = Tuner({"model": 0.05})
            sharp = source(helper, temperature=0.02)
            speculation = Speculation({"model": lambda _: sharp}, tuner)
            told = "drafted while weights load"
            for turn in range(20):  # a draft that is held up may lose more than one answer gains
                chunks = run(engine, speculation)
                assert ids(chunks) == expected
                if turn > 1 and helper.ahead and told in str(chunks[-1].metrics.speculation):
                    break
            assert helper.ahead > 0
            assert told in str(chunks[-1].metrics.speculation)
            assert not any_drafting()
