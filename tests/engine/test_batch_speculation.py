"""Sequences that share passes, or are alone in a running batch, speculate; what each says stays the
same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.drafts.head_draft import HeadDrafter
from localrt.engine.batch.offline import generate_batch
from localrt.engine.native.engine import NativeEngine
from localrt.engine.request import Request
from localrt.engine.speculation import Speculation
from localrt.engine.types import Chunk
from localrt.speculative.batch_tuner import BatchTuner
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import TreeSize
from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import Tuner
from tests.conftest import needs_kernels
from tests.engine.fake_session import ByteTokenizer
from tests.engine.test_speculation import CAPACITY, SAMPLINGS, Knowing, ids, load, run
from tests.models.tiny import save_tiny, tokens

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


def batch(
    engine: NativeEngine, asked: list[tuple[int, Request]], size: int | None = None
) -> list[list[Chunk]]:
    found: list[list[Chunk]] = [[] for _ in asked]
    stream = generate_batch(
        engine,
        ByteTokenizer(),  # type: ignore[arg-type]
        asked,
        ctx=CAPACITY,
        room=1 << 30,
        size=size,
        cancel=threading.Event(),
    )
    for index, item in stream:
        assert isinstance(item, Chunk)
        found[index].append(item)
    return found


@pytest.fixture(scope="module")
def alone(engine: NativeEngine) -> list[list[int]]:
    """What each prompt's answer is by itself."""
    return [ids(run(engine, None, prompt=prompt)) for prompt in PROMPTS]


def knowing(answers: list[list[int]]) -> Speculation:
    """Drafts that are right."""
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return Speculation({"it": lambda _: Knowing(known)}, free_rows())


def free_rows() -> Tuner:
    """A tuner to whom more rows cost nothing."""
    tuner = Tuner({"it": 0.0})
    for rows in range(1, 200):
        tuner.cost.add(rows, 10.0)
    return tuner


@pytest.mark.parametrize("sampling", ["greedy", "penalties"])
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
            free_rows(),
            archive=Archive(),
        )
        ours = batch(engine, requests(speculation, sampling, logprobs=2))
        for said, plain in zip(ours, alone, strict=True):
            assert ids(said) == ids(plain)
            assert [c.logprobs for c in said if c.token_ids] == [
                c.logprobs for c in plain if c.token_ids
            ]
            assert "".join(c.text for c in said) == "".join(c.text for c in plain)


def test_spared_passes(
    engine: NativeEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, sizes = [], list[TreeSize]()
    extend, propose = engine.extend_trees, Knowing.propose

    def counted(parts: Any, *beside: Any, **options: Any) -> Any:
        passes.append([len(tree) for _, _, tree in parts])
        return extend(parts, *beside, **options)

    def sized(self: Knowing, history: Any, size: TreeSize, **options: Any) -> TokenTree:
        sizes.append(size)
        return propose(self, history, size, **options)

    monkeypatch.setattr(engine, "extend_trees", counted)
    monkeypatch.setattr(Knowing, "propose", sized)
    said = batch(engine, requests(knowing(alone)))
    assert len(passes) < 20
    # The rest of an answer limits how deep drafts are, not how many
    assert min(size.depth for size in sizes) < 8 <= min(size.budget for size in sizes)
    metrics = [chunks[-1].metrics for chunks in said]
    assert all((m.accepted_per_pass or 0) > 1.5 for m in metrics)
    assert all("other answers share" in str(m.speculation) for m in metrics)


@pytest.mark.parametrize("rows", [4, 30])
def test_prompts_beside_drafts(
    engine: NativeEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Answers end at different times, and others begin: most passes have both."""
    monkeypatch.setattr(engine, "pass_rows", rows)
    both = []
    extend = engine.extend_trees

    def seen(parts: Any, beside: Any, **options: Any) -> Any:
        both.append(bool(beside) and any(len(tree) for _, _, tree in parts))
        return extend(parts, beside, **options)

    monkeypatch.setattr(engine, "extend_trees", seen)
    asked = [
        (index, replace(request, max_tokens=5 + 8 * index))
        for index, request in requests(knowing(alone))
    ]
    found = batch(engine, asked, size=min(3, rows))
    assert [ids(chunks) for chunks in found] == [a[: 5 + 8 * i] for i, a in enumerate(alone)]
    assert any(both) == (rows > 4)  # else prompts take what there is


def test_alone_in_a_running_batch(tiny_folder: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    with localrt.load(tiny_folder, draft="off") as model, model.live() as live:
        for prompt in ("ab" * 40, "hi", "ab" * 40):
            got = live.generate(prompt, draft="ngram", tree_budget=4, **options)
            assert got.token_ids == model.generate(prompt, **options).token_ids
            assert got.metrics.speculation


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("llama", "ngram"),
        ("qwen3.5", "ngram"),
        pytest.param("deepseek-v3", "off", marks=pytest.mark.slow),
    ],
)
def test_shared_prompts(name: str, draft: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    prompt = tokens(200, seed=3)
    prompts = [prompt, prompt, [*prompt[:150], *tokens(30, seed=4)], prompt, prompt[:90]]
    options = [
        {"token_ids": ids, "max_tokens": 8, "seed": seed, "ignore_eos": True, "top_k": 0}
        for seed, ids in enumerate(prompts)
    ]
    with localrt.load(tmp_path, ctx=256, draft=draft) as model:
        alone = [model.generate(**one).token_ids for one in options]
        with model.live(most=4) as live:
            answers = [live.submit(client=number // 3, **one) for number, one in enumerate(options)]
            shared = [[token for chunk in one for token in chunk.token_ids] for one in answers]
    assert shared == [list(ids) for ids in alone]


@pytest.mark.slow
def test_heads_draft_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of the head computes the drafts of all chats."""
    from tests.models.tiny_heads import TinyBlock

    TinyBlock("qwen3.5", tmp_path)
    together: list[int] = []
    compute = HeadDrafter.compute_together

    def counted(self: HeadDrafter, steps: Any, **options: Any) -> Any:
        together.append(len(steps))
        return compute(self, steps, **options)

    monkeypatch.setattr(HeadDrafter, "compute_together", counted)
    monkeypatch.setattr(BatchTuner, "size", lambda self, name: (6, 3))
    sampling = [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.7, "seed": 1}]
    options = [
        {"token_ids": tokens(20, seed=n), "max_tokens": 25, "ignore_eos": True, **each}
        for n, each in enumerate(sampling)
    ]
    with localrt.load(tmp_path, ctx=128, draft="mtp") as model:
        alone = [model.generate(draft="off", **one).token_ids for one in options]
        with model.live(most=4) as live:
            answers = [live.submit(**one) for one in options]
            shared = [[token for chunk in one for token in chunk.token_ids] for one in answers]
    assert shared == [list(ids) for ids in alone]
    assert max(together) == 3
