"""Speculation in the loop: the same tokens as plain decoding, and everything about them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.engine.batch.sequence import generate
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import EngineInfo
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.engine.speculation import Speculation
from localrt.engine.types import Chunk
from localrt.quant.cpu.ops import NativeOps
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import DraftFailedError, DraftSource, TreeSize
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tuner import Tuner
from tests.conftest import needs_kernels
from tests.engine.fake_session import ByteTokenizer
from tests.models.tiny import SIZES, load_ours, save_tiny, tokens
from tests.speculative.sources import model_source

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
    return EngineInfo(
        engine="native",
        architecture=architecture,
        device="cpu",
        format="bf16",
        parameters=0,
        layers=3,
        vocab_size=SIZES["vocab_size"],
        weight_bytes=0,
        context_length=CAPACITY,
        exactness="bit-exact",
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


@pytest.fixture(params=["ngram", "itself", "other", "both"])
def sources(request: Any, engine: NativeEngine, other: NativeEngine) -> Any:
    if request.param == "ngram":
        return [NgramSource()]
    if request.param == "both":
        return [NgramSource(), drafting(other)]
    return [drafting(engine if request.param == "itself" else other)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_same_tokens(engine: NativeEngine, sources: Any, sampling: str) -> None:
    session = engine.session(CAPACITY)
    chosen = SAMPLINGS[sampling]
    plain = run(engine, None, sampling=chosen, logprobs=2)
    ours = run(engine, fixed(*sources), sampling=chosen, session=session, logprobs=2)
    assert ids(ours) == ids(plain)
    assert [c.logprobs for c in ours] == [c.logprobs for c in plain]
    assert [c.text for c in ours] == [c.text for c in plain]
    assert list(session.tokens) == [*PROMPT, *ids(plain)[:-1]]
    # The session goes on as if it had been plain: its cache has the same bits.
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
    for limit in (1, 2, 3, 7):
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


def test_next_turn(engine: NativeEngine) -> None:
    source = drafting(engine)
    speculation = fixed(source)
    session = engine.session(CAPACITY)
    first = ids(run(engine, speculation, session=session, max_tokens=20))
    longer = [*PROMPT, *first, 5, 6]
    chunks = run(engine, speculation, session=session, prompt=longer, max_tokens=20)
    assert chunks[-1].metrics.cached_tokens == len(longer) - 3
    assert ids(chunks) == ids(run(engine, None, prompt=longer, max_tokens=20))


def test_cancel(engine: NativeEngine) -> None:
    plain = ids(run(engine, None))
    cancel = threading.Event()
    session = engine.session(CAPACITY)
    request = Request(
        prompt=PROMPT,
        sampling=SAMPLINGS["greedy"],
        max_tokens=40,
        speculation=fixed(drafting(engine)),
        cancel=cancel,
    )
    seen = []
    for chunk in generate(session, None, request):
        seen.append(chunk)
        if len(ids(seen)) == 9:
            cancel.set()
    assert ids(seen) == plain[:9]
    assert seen[-1].finish_reason == "cancelled"
    assert list(session.tokens) == [*PROMPT, *plain[: len(session.tokens) - len(PROMPT)]]
    assert ids(run(engine, None, session=session)) == plain


def test_closed_stream(engine: NativeEngine) -> None:
    session = engine.session(CAPACITY)
    request = Request(
        prompt=PROMPT,
        sampling=SAMPLINGS["greedy"],
        max_tokens=40,
        speculation=fixed(drafting(engine)),
    )
    stream = generate(session, None, request)
    said = [next(stream).token_ids[0] for _ in range(4)]
    stream.close()  # type: ignore[attr-defined]
    assert list(session.tokens) == [*PROMPT, *said[:-1]]


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


def test_nan_target(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.session(CAPACITY)
    nan = np.full(SIZES["vocab_size"], math.nan, np.float32)
    extend = session.extend_tree
    monkeypatch.setattr(session, "extend_tree", lambda *a, **k: extend(*a, **k) + nan)
    with pytest.raises(LocalrtError, match="produced NaN logits"):
        run(engine, fixed(drafting(engine)), session=session)
    assert len(session.tokens) == len(PROMPT) + 1


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


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tuned(engine: NativeEngine, other: NativeEngine, sampling: str) -> None:
    """Whatever it decides, and it decides by time, which differs from run to run."""
    tuner = Tuner({"ngram": 0.0, "model": 0.2})
    speculation = Speculation(
        {"ngram": lambda _: NgramSource(), "model": lambda _: drafting(other)}, tuner
    )
    chosen = SAMPLINGS[sampling]
    plain = ids(run(engine, None, sampling=chosen, max_tokens=90))
    for _ in range(3):
        chunks = run(engine, speculation, sampling=chosen, max_tokens=90)
        assert ids(chunks) == plain
        assert str(chunks[-1].metrics.speculation).startswith("speculation: ")
    assert tuner.cost.prompt_row is not None  # it has seen how long the prompt took


def test_sources_see_the_prompt(engine: NativeEngine) -> None:
    """They are made before it is computed: heads record its features."""
    held: list[int] = []

    def make(session: Any) -> NgramSource:
        held.append(len(session.tokens))
        return NgramSource()

    run(engine, Speculation({"ngram": make}, Tuner({"ngram": 0.0})))
    assert held == [0]


def test_engine_without_trees() -> None:
    from tests.engine.fake_session import ScriptedSession

    session = ScriptedSession(lambda n: n % 50)
    chunks = run(None, fixed(NgramSource()), session=session, prompt=[1, 2, 3], max_tokens=5)
    assert ids(chunks) == [3, 4, 5, 6, 7]
    assert chunks[-1].metrics.accepted_per_pass is None
