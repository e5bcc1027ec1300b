"""Arrivals and sessions depend on the seed alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.bench.mix.mix import App, AppRequest, arrivals, marked, session

CHAT = App(
    name="a",
    class_="interactive",
    kind="chat",
    model="m",
    prompt_words=20,
    answer_tokens=8,
    turns=3,
    texts=2,
)


@given(st.floats(0.05, 20), st.floats(0, 50), st.floats(1, 60), st.integers(0, 99))
def test_arrivals(apart: float, start: float, seconds: float, seed: int) -> None:
    regular = arrivals(replace(CHAT, every_s=apart, start_s=start), seconds, seed)
    random = arrivals(replace(CHAT, poisson_s=apart, start_s=start), seconds, seed)
    for times in (regular, random):
        assert times == sorted(times)
        assert all(start <= at < seconds for at in times)
    for place, at in enumerate(regular):
        assert at == pytest.approx(start + place * apart)
    if start < seconds:
        assert regular[0] == start
        assert start + len(regular) * apart >= seconds - 1e-6
    assert arrivals(replace(CHAT, closed=2), seconds, seed) == []
    assert random == arrivals(replace(CHAT, poisson_s=apart, start_s=start), seconds, seed)
    assert 800 < len(arrivals(replace(CHAT, poisson_s=1.0), 1000, seed)) < 1200


def _play(app: App, index: int = 0, seed: int = 1) -> list[AppRequest]:
    steps, found = session(app, index, seed), []
    try:
        request = next(steps)
        while True:
            found.append(request)
            request = steps.send("four words of answer")
    except StopIteration:
        return found


KINDS: dict[str, Any] = {
    kind: replace(CHAT, kind=kind)
    for kind in ("chat", "completion", "agent", "summary", "embeddings", "batch")
}


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_repeat_by_seed_and_differ_by_number(kind: str) -> None:
    app = KINDS[kind]
    requests = _play(app)
    assert requests == _play(app)
    assert requests != _play(app, index=1)
    assert requests != _play(app, seed=2)
    for request in requests:
        body = marked(request, "x: ").body
        texts = body.get("input") or [body.get("prompt") or body["messages"][0]["content"]]
        assert all(text.startswith("x: ") for text in texts)
        assert marked(request, "") == request


def test_a_typist_stays_in_a_file() -> None:
    """What is read of one completion is known when the next one comes."""
    texts = [_play(KINDS["completion"], index)[-1].body["prompt"] for index in range(12)]
    for first, second in pairwise(texts):
        known = second.startswith(first[:-60])  # the rest may be typed later
        assert known == (texts.index(second) != 6)
    assert [len(text) for text in texts[:6]] == sorted(len(text) for text in texts[:6])


def test_chat_sends_its_answers_back_and_reads_them() -> None:
    first, second, third = _play(KINDS["chat"])
    assert (first.pause_s, second.pause_s) == (0, 1)  # four words
    assert [message["role"] for message in third.body["messages"]] == ["user", "assistant"] * 2 + [
        "user"
    ]
    assert third.body["messages"][:3] == second.body["messages"]
    assert second.body["messages"][1]["content"] == "four words of answer"
    assert first.body["max_tokens"] == 8
    assert first.body["stream"]


def test_completions_are_given_up_and_go_on_from_there() -> None:
    seen = set()
    for index in range(20):
        *given_up, last = _play(KINDS["completion"], index)
        seen.add(len(given_up))
        prompts = [step.body["prompt"] for step in (*given_up, last)]
        for shorter, longer in pairwise(prompts):
            assert longer.startswith(shorter)
            assert len(longer) > len(shorter)
        assert all(step.give_up_s is not None and step.give_up_s < 1 for step in given_up)
        assert last.give_up_s == 10
    assert seen == {0, 1, 2}


def test_other_kinds() -> None:
    agent = _play(KINDS["agent"])
    sizes = [len(str(step.body["messages"])) for step in agent]
    assert sizes == sorted(set(sizes)), "they grow"
    assert not any(step.pause_s for step in agent)
    (summary,) = _play(KINDS["summary"])
    (message,) = summary.body["messages"]
    assert 20 < len(message["content"].split()) < 40
    (embeddings,) = _play(KINDS["embeddings"])
    assert [len(text.split()) for text in embeddings.body["input"]] == [20, 20]
    assert "stream" not in embeddings.body


def test_own_texts_are_sent_in_order() -> None:
    app = replace(KINDS["summary"], prompts=("x", "y"))
    sent = [_play(app, index)[0].body["messages"][0]["content"] for index in range(3)]
    assert sent == ["x", "y", "x"]
    turns = _play(replace(KINDS["chat"], prompts=("x", "y")))
    assert [step.body["messages"][-1]["content"] for step in turns] == ["x", "y", "x"]
