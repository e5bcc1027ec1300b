"""A sequence that is alone in a running batch speculates; what it says stays the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.drafts.head_draft import HeadDrafter
from localrt.speculative.batch_tuner import BatchTuner
from tests.conftest import needs_kernels
from tests.models.tiny import save_tiny, tokens
from tests.models.tiny_heads import TinyAssistant, TinyBlock

pytestmark = needs_kernels

PROMPTS = ["ab" * 40, "Tell me about rivers, " * 9, "abc " * 20, "hi"]
# Lookups that are always tried: a random model repeats itself at temperature 0.
OPTIONS: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 80,
    "ignore_eos": True,
    "draft": "ngram",
    "tree_budget": 4,
}


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Iterator[localrt.Model]:
    with localrt.load(tiny_folder, draft="off") as loaded:
        yield loaded


def expected(model: localrt.Model, prompt: str) -> tuple[int, ...]:
    return model.generate(prompt, **{**OPTIONS, "draft": "off", "tree_budget": None}).token_ids


def test_alone(model: localrt.Model) -> None:
    with model.live() as live:
        for prompt in PROMPTS:
            passes = live.stats().passes
            kept = expected(model, prompt)
            got = live.generate(prompt, **OPTIONS)
            assert got.token_ids == kept
            assert got.metrics.speculation
            assert live.stats().passes - passes > 2
            if len(set(kept[20:])) == 1:  # what repeats itself is drafted right
                assert live.stats().passes - passes < 70
            # A conversation goes on with the cache that drafts have left behind.
            more = live.generate(token_ids=[5, 6, *got.token_ids], **OPTIONS)
            assert len(more.token_ids) == 80
        again = live.generate(PROMPTS[0], **OPTIONS)
        assert again.token_ids == expected(model, PROMPTS[0])


def test_others_come_and_go(model: localrt.Model) -> None:
    with model.live() as live:
        first = live.submit(PROMPTS[0], **OPTIONS)
        said: list[int] = []
        others: list[Any] = []
        for chunk in first:
            said += chunk.token_ids
            if len(said) in (5, 30, 60):
                prompt = PROMPTS[1 + len(others)]
                others.append((prompt, live.submit(prompt, **{**OPTIONS, "max_tokens": 7})))
                time.sleep(0.005)
        assert tuple(said) == expected(model, PROMPTS[0])
        for prompt, answer in others:
            tokens = [token for chunk in answer for token in chunk.token_ids]
            assert tuple(tokens) == expected(model, prompt)[:7]


def test_close(tiny_folder: Path) -> None:
    model = localrt.load(tiny_folder, draft="off")
    live = model.live()
    answer = live.submit(PROMPTS[0], temperature=0, ignore_eos=True)
    next(answer)
    model.close()
    assert list(answer)[-1].finish_reason == "cancelled"
    assert live.closed
    with pytest.raises(localrt.LocalrtError, match="closed"):
        live.generate("hi")


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "qwen3.5"])
@pytest.mark.parametrize("draft", ["off", "ngram"])
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


@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3-plain", "gemma4"])
def test_heads_draft_together(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of the head computes the drafts of all chats."""
    draft = "mtp"
    if name == "gemma4":
        draft = str(tmp_path / "own")
        TinyAssistant(name, tmp_path, tmp_path / "own")
    else:
        TinyBlock(name, tmp_path)
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
    with localrt.load(tmp_path, ctx=128, draft=draft) as model:
        alone = [model.generate(draft="off", **one).token_ids for one in options]
        with model.live(most=4) as live:
            answers = [live.submit(**one) for one in options]
            shared = [[token for chunk in one for token in chunk.token_ids] for one in answers]
    assert shared == [list(ids) for ids in alone]
    assert max(together) == 3
