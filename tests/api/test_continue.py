"""Answers that were cut and go on: they become what they would have been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt import History
from localrt.common.errors import LocalrtError, OptionError
from localrt.history.messages import AnswerRecord, messages_for_model
from localrt.service.arguments import joined
from tests.api.test_prompts import TEMPLATE
from tests.chat_format.call_templates import KINDS, TEMPLATES
from tests.chat_format.test_answers import WEATHER, call_in
from tests.conftest import write_tiny_model
from tests.scripted import ASK, chunks_of, with_template

SEED = {"seed": 7, "temperature": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": SEED,
    "xtc": {**SEED, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    "penalties": {**SEED, "dry_multiplier": 0.8, "frequency_penalty": 0.5, "presence_penalty": 1},
    "thinking limit": {**SEED, "thinking_tokens": 3},
    "not thinking": {**SEED, "thinking": False},
    "bound": {**SEED, "regex": "[ab]{20}", "ignore_eos": False},
    "bound, thinking": {"regex": "[ab]{9}", "thinking": True, "thinking_tokens": 4, **SEED},
    "stop string": {**SEED, "thinking": False},
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localrt.Model]:
    folder = write_tiny_model(tmp_path_factory.mktemp("thinker"), template=TEMPLATE)
    with localrt.load(folder, draft="off") as model:
        yield model


@pytest.mark.parametrize("name", OPTIONS)
def test_as_if_it_had_never_stopped(thinker: localrt.Model, name: str) -> None:
    options = {"ignore_eos": True, **OPTIONS[name]}
    if name == "stop string":
        text = thinker.generate("hi", max_tokens=12, **options).text
        options["stop"] = text[len(text) // 2 :][:2]
    whole = thinker.generate("hi", max_tokens=30, **options)
    for size in (1, 5, 17):
        chat = thinker.chat()
        first = chat.send("hi", max_tokens=size, **options)
        if first.finish_reason != "length":
            break
        found = joined(chat.continue_answer(max_tokens=30 - size, **options))
        assert found.text == whole.text
        assert (*first.token_ids, *found.token_ids) == whole.token_ids
        assert found.finish_reason == whole.finish_reason
        assert found.metrics.cached_tokens == found.metrics.prompt_tokens - 1
        thought = first.metrics.thinking_tokens + found.metrics.thinking_tokens
        assert thought == whole.metrics.thinking_tokens
        assert [each["role"] for each in chat.messages] == ["user", "assistant"]
        assert chat.messages[-1]["content"] == whole.text
        with thinker.live() as live:  # by another way to the same engine
            prompt = [chat.messages[0], _begun(first)]
            found = joined(live.stream(prompt, max_tokens=30 - size, **options))
        assert found.text == whole.text
    assert size > 1


def _begun(first: localrt.Chunk) -> Any:
    ids = list(first.token_ids)
    return {"role": "assistant", "content": first.text, "prefix": True, "token_ids": ids}


def test_a_turn_that_goes_on(thinker: localrt.Model) -> None:
    """As the docs have it, twice."""
    whole = thinker.generate("hi", max_tokens=30, **SEED)
    with History(":memory:") as history:
        conversation = history.new(model=thinker.name, options=SEED)
        conversation.add("user", "hi")
        writer = conversation.answer()
        messages = messages_for_model(conversation.turns, None, before=writer.turn)
        for answer in ("stream", "continue_answer", "continue_answer"):
            chat, record = thinker.chat(max_tokens=10, **conversation.options), AnswerRecord()
            chat.messages = messages
            with writer:
                for chunk in getattr(chat, answer)():
                    writer.write(chunk.text)
                    record.add(chunk)
                writer.finish("done", info=record.info(thinker.name))
            last = {"continued": writer.turn, "model": thinker.name}
            messages = messages_for_model(conversation.turns, None, **last)
            writer = conversation.reopen(writer.turn)
        writer.finish()
        (_, turn) = conversation.turns
    assert (turn.content, turn.info["tokens"]) == (whole.text, 30)
    assert turn.info["ids"] == list(whole.token_ids)


@pytest.mark.parametrize("name", KINDS)
def test_half_a_call_goes_on(thinker: localrt.Model, name: str) -> None:
    requests = with_template(thinker, TEMPLATES[name])
    wish = call_in(requests, name, forced=False)
    given: dict[str, Any] = {"tools": [WEATHER]}
    whole = joined(chunks_of(requests, wish, **given))
    assert whole.tool_calls
    for size in (1, 5, len(whole.token_ids) - 1):
        first = joined(chunks_of(requests, wish, max_tokens=size, **given))
        rest = requests.tokenizer.decode(whole.token_ids[size:], skip_special=False)
        found = joined(chunks_of(requests, rest, messages=[*ASK, _begun(first)], **given))
        assert (found.text, found.finish_reason) == (whole.text, "tool_calls")
        calls = [[(each.name, each.arguments) for each in one.tool_calls] for one in (found, whole)]
        assert calls[0] == calls[1]


@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        ("Hermes, Qwen", "Well,", "</think>\n\nWell,"),
        ("thinker", "<think>\nHm", "assistant\n<think>\nHm"),
        ("thinker", "<think>\nHm.\n</think>\n\nWell,", "<think>\nHm.\n</think>\n\nWell,"),
        ("thinker", "Well, <|im_end|>", "</think>\n\nWell, <|im_end|>"),
        ("gpt-oss", "<think>\nHm", "assistant<|channel|>analysis<|message|>Hm"),
        (
            "gpt-oss",
            "<think>\nHm.\n</think>\n\nWell,",
            "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Well,",
        ),
    ],
)
def test_an_answer_of_elsewhere(thinker: localrt.Model, name: str, text: str, end: str) -> None:
    requests = with_template(thinker, TEMPLATES.get(name, TEMPLATE))
    begun = {"role": "assistant", "content": text, "prefix": True, "token_ids": []}
    request = requests.make([*ASK, begun])
    prompt = requests.tokenizer.decode(request.prompt, skip_special=False)
    assert prompt.endswith(end)
    first, *rest = chunks_of(requests, " indeed.", messages=[*ASK, begun])
    assert first.info["begun"] == tuple(request.prompt[-request.begun :])
    found = joined([first, *rest])
    got, whole = (localrt.split_thinking(each) for each in (found.text, text + " indeed."))
    assert (got.thinking, got.answer) == (whole.thinking, whole.answer)


def test_nothing_to_continue(thinker: localrt.Model) -> None:
    chat = thinker.chat()
    for messages in ([], [{"role": "user", "content": "hi"}]):
        chat.messages = messages
        with pytest.raises(OptionError, match="no answer to continue"):
            chat.continue_answer()
    chat.messages = [*ASK, {"role": "assistant", "content": "Well,"}]
    with pytest.raises(OptionError, match="beginning is given"):
        joined(chat.continue_answer(json_schema=True))
    assert chat.messages[-1]["content"] == "Well,"
    assert joined(chat.continue_answer(max_tokens=3)).text.startswith("Well,")
    chat.messages = [*ASK, _begun(thinker.generate(ASK, regex="[ab]{9}", max_tokens=4))]
    with pytest.raises(LocalrtError, match="kept within its grammar"):
        joined(chat.continue_answer(regex="[cd]{9}"))
    with thinker.live() as live:
        with pytest.raises(LocalrtError, match="kept within its grammar"):
            live.generate(chat.messages, regex="[cd]{9}")
        assert live.generate("hi", max_tokens=1).finish_reason


# -- what is kept nowhere --------------------------------------------------------------------------


def test_nothing_on_the_disk(
    thinker: localrt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in RAM, from where it would move to the disk."""
    for name in ("CACHE", "DATA", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCALRT_KV_DISK")
    prompt = "Count from one to twenty in words, then backwards. " * 4
    with localrt.load(thinker.info.path, draft="off") as model:
        seen = []
        for private in (True, False):
            with model.live() as live:
                live.generate(prompt, max_tokens=40, ignore_eos=True, private=private)
                live.park("ram")
                live.park()
            seen.append({path for path in tmp_path.rglob("*") if path.is_file()})
        assert seen[0] == set()
        assert any("kv" in path.parts for path in seen[1])
        with pytest.raises(OptionError, match="private must be true or false"):
            model.generate(prompt, private=1)
