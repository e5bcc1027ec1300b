"""Speculation in the loop, and drafting while a pass waits: the same tokens as plain decoding, and
everything about them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError, MemoryBudgetError
from localrt.engine.batch.sequence import generate
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import EngineInfo
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.engine.speculation import GapWork, Speculation
from localrt.engine.types import Chunk
from localrt.offload.reading.reader import waiting
from localrt.quant.cpu.ops import NativeOps
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import DraftFailedError, DraftSource, TreeSize
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tuner import Tuner
from tests.conftest import needs_kernels
from tests.engine.fake_session import ByteTokenizer, ScriptedEngine
from tests.models.tiny import SIZES, load_ours, save_tiny, tokens
from tests.speculative.sources import model_source
from tests.waits import wait_for

pytestmark = needs_kernels

CAPACITY = 160
PROMPT = tokens(12) * 3
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "warm": Sampling(temperature=0.8, seed=3),
    "penalties": Sampling(
        temperature=1.5, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, top_p=0.9
    ),
    "dry and xtc": Sampling(
        temperature=1.0, seed=5, dry_multiplier=0.8, xtc_probability=0.5, xtc_threshold=0.02
    ),
}


def info_of(architecture: str) -> EngineInfo:
    return replace(
        ScriptedEngine.info,
        engine="native",
        architecture=architecture,
        vocab_size=SIZES["vocab_size"],
        context_length=CAPACITY,
    )


def load(folder: Path, seed: int = 0, kv_format: Any = "bf16") -> NativeEngine:
    if not (folder / "config.json").exists():
        save_tiny("qwen2", folder, seed)
    ops = NativeOps(threads=1, kv_format=kv_format)
    return NativeEngine(load_ours(folder, ops, context=CAPACITY), info_of("qwen2"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeEngine]:
    engine = load(tmp_path_factory.mktemp("target"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeEngine]:
    """A draft that is seldom right."""
    engine = load(tmp_path_factory.mktemp("draft"), seed=1)
    yield engine
    engine.close()


class Decoderlike:
    def __init__(self, engine: NativeEngine) -> None:
        self.cache, self.forward = engine.cache, engine.run


def drafting(draft: NativeEngine, **options: Any) -> Any:
    return model_source(Decoderlike(draft), **options)


def fixed(*sources: Any, budget: int = 12, depth: int = 5, **options: Any) -> Speculation:
    """Always these sources and that budget."""
    makers: Any = {source.name: lambda _, it=source: it for source in sources}
    return Speculation(makers, Tuner({}), fixed=TreeSize(budget, depth), **options)


def run(engine: Any, speculation: Speculation | None, **settings: Any) -> list[Chunk]:
    session = settings.pop("session", None) or engine.session(CAPACITY)
    request = Request(
        **{
            "prompt": PROMPT,
            "sampling": SAMPLINGS["greedy"],
            "max_tokens": 40,
            "speculation": speculation,
            **settings,
        }
    )
    return list(generate(session, ByteTokenizer(), request))  # type: ignore[arg-type]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize(
    ("drafts", "sampling"),
    [
        ("ngram", "greedy"),
        ("itself", "penalties"),
        ("other", "greedy"),
        ("ngram, other", "warm"),
        ("ngram, other", "dry and xtc"),
    ],
)
def test_same_tokens(engine: NativeEngine, other: NativeEngine, drafts: str, sampling: str) -> None:
    made = {
        "ngram": NgramSource,
        "itself": lambda: drafting(engine),
        "other": lambda: drafting(other),
    }
    sources: list[Any] = [made[name]() for name in drafts.split(", ")]
    session = engine.session(CAPACITY)
    chosen = SAMPLINGS[sampling]
    plain = run(engine, None, sampling=chosen, logprobs=2)
    ours = run(engine, fixed(*sources), sampling=chosen, session=session, logprobs=2)
    assert ids(ours) == ids(plain)
    assert [c.logprobs for c in ours] == [c.logprobs for c in plain]
    assert [c.text for c in ours] == [c.text for c in plain]
    assert list(session.tokens) == [*PROMPT, *ids(plain)[:-1]]
    assert_whole(engine, session)


def assert_whole(engine: NativeEngine, session: Any) -> None:
    """The session goes on as if it had been plain: its cache has the same bits."""
    fresh = engine.session(CAPACITY)
    fresh.extend(session.tokens)
    assert np.array_equal(session.extend([5]), fresh.extend([5]))


class Knowing(DraftSource):
    """Knows all answers, beside which it drafts wrong tokens."""

    name = "oracle"

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self._answers = answers

    def propose(self, history: Any, size: TreeSize, **_: Any) -> TokenTree:
        for answer in self._answers:
            if list(answer[: len(history)]) == history:
                right = answer[len(history) : len(history) + size.depth]
                drafted = [t for token in right for t in (token + 1, token)]
                parents = [ROOT, ROOT, *(1 + 2 * (i // 2) for i in range(len(drafted) - 2))]
                scores = [-0.01 * (1 + i // 2) - 3 * (1 - i % 2) for i in range(len(drafted))]
                tree = TokenTree.of(drafted, parents[: len(drafted)], scores, self.name)
                return tree.trim(size.budget)
        return TokenTree.empty()


def test_perfect_draft(engine: NativeEngine) -> None:
    answer = ids(run(engine, None))
    speculation = fixed(Knowing([[*PROMPT, *answer]]), budget=30, depth=5)
    metrics = run(engine, speculation, max_tokens=37)[-1].metrics
    assert metrics.accepted_per_pass == 6  # five draft tokens and the bonus token
    assert metrics.accepted_by_source == {"oracle": pytest.approx(5 / 6)}
    assert metrics.completion_tokens == 37
    assert metrics.speculation == "speculation: oracle, 30 draft tokens a pass as asked"


def test_limits(engine: NativeEngine) -> None:
    plain = ids(run(engine, None, max_tokens=200))
    assert len(plain) == CAPACITY - len(PROMPT)  # to the end of the context
    source = drafting(engine)
    assert ids(run(engine, fixed(source), max_tokens=200)) == plain
    for limit in (1, 7):
        chunks = run(engine, fixed(source), max_tokens=limit)
        assert (ids(chunks), chunks[-1].finish_reason) == (plain[:limit], "length")
    eos = plain[10]
    chunks = run(engine, fixed(source), eos_ids=frozenset({eos}))
    assert ids(chunks) == plain[: plain.index(eos)]
    assert chunks[-1].finish_reason == "stop"
    stop = chr(plain[5]) + chr(plain[6])
    with_stop = [run(engine, s, stop=(stop,)) for s in (None, fixed(source))]
    assert "".join(c.text for c in with_stop[0]) == "".join(c.text for c in with_stop[1])
    assert with_stop[1][-1].finish_reason == "stop"


class Failing(DraftSource):
    name = "bad"

    def __init__(self, after: int = 2) -> None:
        self.left = after

    def propose(self, history: Any, *_: Any, **__: Any) -> TokenTree:
        self.left -= 1
        if self.left < 0:
            raise DraftFailedError("the draft model produced NaN logits")
        return TokenTree.of([3, 4], [ROOT, 0], [-1.0, -2.0], "bad")


def test_failing_draft(engine: NativeEngine) -> None:
    chunks = run(engine, fixed(Failing()))
    assert ids(chunks) == ids(run(engine, None))
    metrics = chunks[-1].metrics
    assert metrics.speculation == "speculation: off, the draft model produced NaN logits"
    tuned = Speculation({"bad": lambda _: Failing(after=0)}, Tuner({"bad": 0.0}))
    assert ids(run(engine, tuned)) == ids(run(engine, None))


def test_no_room_for_trees(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.session(CAPACITY)
    extend, passes = session.extend_tree, []

    def cramped(*args: Any, **options: Any) -> Any:
        passes.append(len(session.tokens))
        if len(passes) == 2:
            raise MemoryBudgetError("the context has grown")
        return extend(*args, **options)

    monkeypatch.setattr(session, "extend_tree", cramped)
    chunks = run(engine, fixed(drafting(engine)), session=session)
    assert ids(chunks) == ids(run(engine, None))
    assert len(passes) == 2
    assert "need memory" in (chunks[-1].metrics.speculation or "")


def test_archive(engine: NativeEngine) -> None:
    archive = Archive()
    speculation = fixed(NgramSource(archive), budget=8, depth=6, archive=archive)
    first = run(engine, speculation)
    again = run(engine, speculation)
    assert ids(first) == ids(again)
    assert "archive" not in first[-1].metrics.accepted_by_source
    assert again[-1].metrics.accepted_per_pass > 3
    assert again[-1].metrics.accepted_by_source["archive"] > 0.6


def test_tuned(engine: NativeEngine, other: NativeEngine) -> None:
    """Whatever it decides, and it decides by time, which differs from run to run."""
    tuner = Tuner({"ngram": 0.0, "model": 0.2})
    held: list[int] = []

    def ngram(session: Any) -> NgramSource:
        held.append(len(session.tokens))
        return NgramSource()

    speculation = Speculation({"ngram": ngram, "model": lambda _: drafting(other)}, tuner)
    chosen = SAMPLINGS["penalties"]
    plain = ids(run(engine, None, sampling=chosen, max_tokens=90))
    for _ in range(2):
        chunks = run(engine, speculation, sampling=chosen, max_tokens=90)
        assert ids(chunks) == plain
        assert str(chunks[-1].metrics.speculation).startswith("speculation: ")
    assert tuner.cost.prompt_row is not None  # it has seen how long the prompt took
    assert {*held} == {0}  # sources are made before the prompt is computed: heads record it


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
    """A draft's decoder that knows which thread it works in."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.cache = engine.cache
        self.ahead = 0  # passes made beside the target's

    def forward(self, batch: Any, **options: Any) -> Any:
        beside = threading.current_thread().name == "localrt-draft"
        logits = self._engine.run(batch, **options)
        self.ahead += beside
        return logits

    def some(self, passes: int = 3) -> None:
        """Wait until a few more passes were made, if anybody makes any."""
        time.sleep(0.006)  # a gap that is worth it
        before, end = self.ahead, time.perf_counter() + 60
        while any_drafting() and self.ahead < before + passes:
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


def test_drafting_ahead(target: Waiting, draft: Draft, plain: dict[str, list[int]]) -> None:
    sampling = "penalties"
    target.meanwhile = draft.some
    session = target.engine.session(CAPACITY)
    chunks = run(
        target.engine,
        fixed(model_source(draft), depth=3),
        sampling=SAMPLINGS[sampling],
        session=session,
    )
    assert ids(chunks) == plain[sampling]
    assert draft.ahead > 0
    assert list(session.tokens) == [*PROMPT, *plain[sampling][:-1]]
    assert_whole(target.engine, session)


def test_cancel_while_drafting_ahead(
    target: Waiting, draft: Draft, plain: dict[str, list[int]]
) -> None:
    cancel, passes = threading.Event(), 0

    def meanwhile() -> None:
        nonlocal passes
        passes += 1
        draft.some(1)
        if passes == 4:
            cancel.set()

    target.meanwhile = meanwhile
    it, session = model_source(draft), target.engine.session(CAPACITY)
    chunks = run(target.engine, fixed(it, depth=3), session=session, cancel=cancel)
    assert chunks[-1].finish_reason == "cancelled"
    said = ids(chunks)
    assert 0 < len(said) < 40
    assert said == plain["greedy"][: len(said)]
    assert not any_drafting()
    target.meanwhile = draft.some
    assert ids(run(target.engine, fixed(it, depth=3), session=session)) == plain["greedy"]


def nothing() -> None:
    pass


class Layers:
    """Work of many short layers, which are counted."""

    def __init__(self) -> None:
        self.done = 0
        self.ended = ""

    def __call__(self, check: Callable[[], None], outcome: Callable[[], Any]) -> None:
        try:
            while True:
                check()
                if outcome() is not None:
                    raise CancelledError("of no use")
                self.done += 1
        except CancelledError as error:
            self.ended = str(error)
            raise


def test_gaps_alone() -> None:
    layers = Layers()
    with GapWork(nothing, layers) as check:
        time.sleep(0.01)
        assert layers.done == 0  # the pass computes
        with check.waiting():
            wait_for(lambda: layers.done > 3)
        before = layers.done
        time.sleep(0.025)
        assert layers.done <= before + 1  # the layer that was at work has ended since
        with check.waiting():
            wait_for(lambda: layers.done > before + 1)
        check.ended([7])
    assert layers.ended == "of no use"
    assert not any_drafting()
    assert check.error is None
    assert 0 <= check.shared_s < check.waited_s + 5
