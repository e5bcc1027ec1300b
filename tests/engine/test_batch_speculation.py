"""Sequences that share passes speculate together; what each says stays the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from localrt.common.errors import MemoryBudgetError
from localrt.engine.batch.live import Live, LiveLimits
from localrt.engine.batch.offline import generate_batch
from localrt.engine.native.engine import NativeEngine
from localrt.engine.request import Request
from localrt.engine.speculation import Speculation
from localrt.engine.types import Chunk
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import DraftFailedError
from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import Tuner
from tests.conftest import needs_kernels
from tests.engine.fake_session import ByteTokenizer
from tests.engine.test_speculation import CAPACITY, SAMPLINGS, Knowing, ids, load, run
from tests.models.tiny import tokens

pytestmark = needs_kernels

PROMPTS = [tokens(12) * 3, tokens(9) * 2, tokens(20), tokens(5) * 5, [7, 8, 9]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeEngine]:
    engine = load(tmp_path_factory.mktemp("target"))
    yield engine
    engine.close()


def requests(
    speculation: Speculation | None, sampling: str = "greedy", **settings: Any
) -> list[tuple[int, Request]]:
    made = {"max_tokens": 40, "sampling": SAMPLINGS[sampling], **settings}
    return [
        (index, Request(prompt=prompt, speculation=speculation, **made))
        for index, prompt in enumerate(PROMPTS)
    ]


def batch(engine: NativeEngine, asked: list[tuple[int, Request]]) -> list[list[Chunk]]:
    found: list[list[Chunk]] = [[] for _ in asked]
    stream = generate_batch(
        engine,
        ByteTokenizer(),  # type: ignore[arg-type]
        asked,
        ctx=CAPACITY,
        room=1 << 30,
        cancel=threading.Event(),
    )
    for index, item in stream:
        assert isinstance(item, Chunk)
        found[index].append(item)
    return found


def free_rows(engine: NativeEngine) -> Tuner:
    """A tuner to whom more rows cost nothing."""
    tuner = Tuner({"it": 0.0})
    for rows in range(1, 200):
        tuner.cost.add(rows, 10.0)
    return tuner


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_same_tokens(engine: NativeEngine, sampling: str) -> None:
    alone = [
        run(engine, None, prompt=prompt, sampling=SAMPLINGS[sampling], logprobs=2)
        for prompt in PROMPTS
    ]
    answers = [[*p, *ids(chunks)] for p, chunks in zip(PROMPTS, alone, strict=True)]
    for source in (Knowing(answers), NgramSource()):
        made: Any = type(source)
        speculation = Speculation(
            {"it": lambda _, s=source, m=made: s if isinstance(s, Knowing) else m()},
            free_rows(engine),
            archive=Archive(),
        )
        ours = batch(engine, requests(speculation, sampling, logprobs=2))
        for said, plain in zip(ours, alone, strict=True):
            assert ids(said) == ids(plain)
            assert [c.logprobs for c in said if c.token_ids] == [
                c.logprobs for c in plain if c.token_ids
            ]
            assert "".join(c.text for c in said) == "".join(c.text for c in plain)


def test_spared_passes(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[*p, *ids(run(engine, None, prompt=p))] for p in PROMPTS]
    passes = []
    extend = engine.extend_trees

    def counted(parts: Any, *beside: Any, **options: Any) -> Any:
        passes.append([len(tree) for _, _, tree in parts])
        return extend(parts, *beside, **options)

    monkeypatch.setattr(engine, "extend_trees", counted)
    oracle = Speculation({"it": lambda _: Knowing(answers)}, free_rows(engine))
    said = batch(engine, requests(oracle))
    assert len(passes) < 20
    metrics = [chunks[-1].metrics for chunks in said]
    assert all((m.accepted_per_pass or 0) > 1.5 for m in metrics)
    assert all("other answers share" in str(m.speculation) for m in metrics)


@pytest.mark.parametrize("ends", ["stop", "eos"])
def test_ends_within_tree(engine: NativeEngine, ends: str) -> None:
    alone = [ids(run(engine, None, prompt=prompt)) for prompt in PROMPTS]
    answers = [[*p, *a] for p, a in zip(PROMPTS, alone, strict=True)]
    text = "".join(c.text for c in run(engine, None, prompt=PROMPTS[0]))
    settings: dict[str, Any] = {"stop": (text[9:11],)} if ends == "stop" else {}
    if ends == "eos":
        settings["eos_ids"] = frozenset([alone[0][9], alone[1][13]])
    plain = [run(engine, None, prompt=prompt, **settings) for prompt in PROMPTS]
    oracle = Speculation({"it": lambda _: Knowing(answers)}, free_rows(engine))
    ours = batch(engine, requests(oracle, **settings))
    assert [ids(chunks) for chunks in ours] == [ids(chunks) for chunks in plain]
    assert [c[-1].finish_reason for c in ours] == [c[-1].finish_reason for c in plain]
    assert len(ids(ours[0])) < 40


def test_no_room_for_trees(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [ids(run(engine, None, prompt=prompt)) for prompt in PROMPTS]
    answers = [[*p, *a] for p, a in zip(PROMPTS, alone, strict=True)]
    extend, tried = engine.extend_trees, []

    def cramped(parts: Any, *beside: Any, **options: Any) -> Any:
        if any(len(tree) for _, _, tree in parts):
            tried.append(len(parts))
            raise MemoryBudgetError("no room")
        return extend(parts, *beside, **options)

    monkeypatch.setattr(engine, "extend_trees", cramped)
    oracle = Speculation({"it": lambda _: Knowing(answers)}, free_rows(engine))
    assert [ids(chunks) for chunks in batch(engine, requests(oracle))] == alone
    assert len(tried) == 1


class Failing(NgramSource):
    def propose(self, *_: Any, **__: Any) -> TokenTree:
        raise DraftFailedError("broken")


def test_pass_made_again(engine: NativeEngine) -> None:
    """What an abandoned pass had chosen is forgotten."""
    seen: list[list[int]] = []

    class Noting(NgramSource):
        def propose(self, history: Any, *_: Any, **__: Any) -> TokenTree:
            seen.append(list(history))
            return TokenTree.empty()

    speculation = Speculation({"it": lambda _: Noting()}, free_rows(engine))
    proposer = speculation.start_shared(engine.session(CAPACITY), [1, 2])
    assert proposer is not None
    for token in (7, 3):
        proposer.chosen(token)
        proposer.look_up(4, 4, lambda: None)
    assert seen == [[1, 2, 7], [1, 2, 3]]


def test_failing_source(engine: NativeEngine) -> None:
    alone = [ids(run(engine, None, prompt=prompt)) for prompt in PROMPTS]
    failing = Speculation({"it": lambda _: Failing()}, free_rows(engine))
    asked = requests(failing)
    asked[1:3] = requests(None)[1:3]
    assert [ids(chunks) for chunks in batch(engine, asked)] == alone


def test_cancel(engine: NativeEngine) -> None:
    answers = [[*p, *ids(run(engine, None, prompt=p))] for p in PROMPTS]
    oracle = Speculation({"it": lambda _: Knowing(answers)}, free_rows(engine))
    limits = LiveLimits(ctx=CAPACITY)
    with closing(Live(engine, ByteTokenizer(), limits, room=lambda: 1 << 30)) as live:  # type: ignore[arg-type]
        own = [threading.Event() for _ in PROMPTS]
        asked = [
            live.submit(Request(**{**_fields(request), "cancel": event}))
            for (_, request), event in zip(requests(oracle), own, strict=True)
        ]
        first = [next(answer) for answer in asked]
        own[0].set()
        rest = [list(answer) for answer in asked]
    for index, (chunk, chunks) in enumerate(zip(first, rest, strict=True)):
        said = [*chunk.token_ids, *ids(chunks)]
        whole = answers[index][len(PROMPTS[index]) :]
        assert said == (whole[: len(said)] if index == 0 else whole)


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


@pytest.mark.parametrize("rows", [4, 30])
def test_prompts_beside_drafts(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Answers end at different times, and others begin: most passes have both."""
    monkeypatch.setattr(engine, "pass_rows", rows)
    alone = [ids(run(engine, None, prompt=prompt)) for prompt in PROMPTS]
    answers = [[*p, *a] for p, a in zip(PROMPTS, alone, strict=True)]
    both = []
    extend = engine.extend_trees

    def seen(parts: Any, beside: Any, **options: Any) -> Any:
        both.append(bool(beside) and any(len(tree) for _, _, tree in parts))
        return extend(parts, beside, **options)

    monkeypatch.setattr(engine, "extend_trees", seen)
    oracle = Speculation({"it": lambda _: Knowing(answers)}, free_rows(engine))
    asked = [
        (index, Request(**{**_fields(request), "max_tokens": 5 + 8 * index}))
        for index, request in requests(oracle)
    ]
    found: list[list[int]] = [[] for _ in asked]
    for index, item in generate_batch(
        engine,
        None,
        asked,
        ctx=CAPACITY,
        room=1 << 30,
        size=min(3, rows),
        cancel=threading.Event(),
    ):
        assert isinstance(item, Chunk)
        found[index] += item.token_ids
    assert found == [a[: 5 + 8 * i] for i, a in enumerate(alone)]
    assert any(both) == (rows > 4)  # else prompts take what there is
