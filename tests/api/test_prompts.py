"""What becomes of a request: thinking on, off and up to a limit; a given beginning; text around a
gap; what a model's own settings add.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.common.errors import OptionError
from localrt.engine.options import read_options
from localrt.hub.other_programs import Extras
from localrt.hub.resolving import ResolvedModel
from tests.conftest import write_tiny_model
from tests.inside import core_of

# As Qwen3.5 has it: the prompt opens the thinking, or closes it at once.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASK: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
CLOSE = "\n</think>\n\n"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localrt.Model]:
    folder = write_tiny_model(tmp_path_factory.mktemp("thinker"), template=TEMPLATE)
    with localrt.load(folder, draft="ngram") as model:
        yield model


def test_limit_ends_thinking(thinker: localrt.Model) -> None:
    answer = thinker.generate("hi", thinking_tokens=7, **GREEDY)
    free = thinker.generate("hi", **GREEDY)
    close = thinker.tokenize(CLOSE)
    assert answer.token_ids[:7] == free.token_ids[:7]
    assert list(answer.token_ids[7 : 7 + len(close)]) == close
    assert answer.metrics.thinking_tokens == 7
    assert free.metrics.thinking_tokens == free.metrics.completion_tokens == 60
    assert not localrt.split_thinking(answer.text).open
    # What follows is what the same text in the prompt leads to.
    begun = 7 + len(close)
    prompt = core_of(thinker).requests.render([{"role": "user", "content": "hi"}])
    given = thinker.generate(
        token_ids=[*prompt, *answer.token_ids[:begun]], **{**GREEDY, "max_tokens": 60 - begun}
    )
    assert given.token_ids == answer.token_ids[begun:]


@pytest.mark.parametrize("limit", [1, 59])
def test_drafts_change_nothing(thinker: localrt.Model, limit: int) -> None:
    plain = thinker.generate("hi hi hi", thinking_tokens=limit, draft="off", **GREEDY)
    for size in ({}, {"draft": "ngram", "tree_budget": 8}):
        guessed = thinker.generate("hi hi hi", thinking_tokens=limit, **size, **GREEDY)
        assert guessed.token_ids == plain.token_ids
        assert guessed.text == plain.text
        assert guessed.metrics.thinking_tokens == limit


def test_limit_in_batches(thinker: localrt.Model) -> None:
    limits = [3, 9, None]
    alone = [thinker.generate("hi", thinking_tokens=limit, **GREEDY) for limit in limits]
    with thinker.live() as live:
        asked = [live.submit("hi", thinking_tokens=limit, **GREEDY) for limit in limits]
        together = ["".join(chunk.text for chunk in answer) for answer in asked]
    assert together == [answer.text for answer in alone]


def prompt_end(model: localrt.Model, **options: Any) -> str:
    """How the prompt of such a request ends."""
    request = core_of(model).requests.make("hi", **options)
    text = model.detokenize(request.prompt, skip_special=False)
    return text.rpartition("assistant")[2]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "\n<think>\n"),
        ({"thinking": False}, "\n<think>\n\n</think>\n\n"),
        ({"json_schema": True}, "\n<think>\n\n</think>\n\n"),
        ({"json_schema": True, "thinking": True}, "\n<think>\n"),
    ],
)
def test_prompt_end(thinker: localrt.Model, options: dict[str, Any], end: str) -> None:
    if "json_schema" in options:
        pytest.importorskip("llguidance")
    assert prompt_end(thinker, **options) == end


def test_model_without_thinking(tiny: localrt.Model) -> None:
    assert prompt_end(tiny, thinking=False) == prompt_end(tiny) == "\n"
    assert tiny.generate("hi", thinking_tokens=2, max_tokens=8).metrics.thinking_tokens == 0
    with pytest.raises(OptionError, match="this model does not think"):
        tiny.generate("hi", thinking=True)
    with pytest.raises(OptionError, match="thinking must be on, off, low, medium or high"):
        tiny.generate("hi", thinking="max")
    with pytest.raises(OptionError, match="thinking_tokens"):
        tiny.generate("hi", thinking_tokens=-1)


def test_bound_answer_after_thinking(thinker: localrt.Model) -> None:
    pytest.importorskip("llguidance")
    options = {"regex": "[ab]{3}", "thinking": True, "thinking_tokens": 5, "max_tokens": 60}
    answer = thinker.generate("hi", seed=1, **options)
    parts = localrt.split_thinking(answer.text)
    assert parts.answer.strip("ab") == ""
    assert len(parts.answer) == 3
    assert answer.finish_reason == "stop"
    assert answer.metrics.thinking_tokens == 5
    without = thinker.generate("hi", regex="[ab]{3}")
    assert without.text.strip("ab") == ""


# -- the beginning of an answer --------------------------------------------------------------------


def test_prefix(thinker: localrt.Model) -> None:
    begun = {"role": "assistant", "content": "Well, <|im_end|>", "prefix": True}
    found = thinker.generate([*ASK, begun], **GREEDY)
    prompt = core_of(thinker).requests.render(ASK, options=read_options({"thinking": False}))
    ids = [*prompt, *thinker.tokenize("Well, <|im_end|>", add_special=False)]
    assert thinker.generate(token_ids=ids, **GREEDY).token_ids == found.token_ids
    assert thinker.count([*ASK, begun]) == len(ids) == found.metrics.prompt_tokens
    options: dict[str, Any] = {"thinking": False, "tools": TOOLS}
    read = thinker.generate(ASK, max_tokens=1, **options).metrics.prompt_tokens
    assert thinker.count(ASK, **options) == read != thinker.count(ASK)
    assert thinker.detokenize(ids).endswith("</think>\n\nWell, <|im_end|>")
    for wrong in ([begun], [*ASK, {**begun, "content": None}]):
        with pytest.raises(OptionError, match="prefix"):
            thinker.generate(wrong)
    with pytest.raises(OptionError, match="beginning is given"):
        thinker.generate([*ASK, begun], json_schema=True)


MARKS = {"pre": 10, "suf": 11, "mid": 12}
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
def filling(tiny: localrt.Model, monkeypatch: pytest.MonkeyPatch) -> localrt.Model:
    """The tiny model, with three of its tokens for marks, which never ends."""
    monkeypatch.setattr(tiny.tokenizer, "infill_ids", MARKS)
    monkeypatch.setitem(core_of(tiny).requests.__dict__, "_infill", None)
    del core_of(tiny).requests.__dict__["_infill"]
    monkeypatch.setitem(tiny.defaults, "ignore_eos", True)
    return tiny


def test_fill_in(filling: localrt.Model) -> None:
    before, behind = filling.tokenize("def f(", add_special=False), filling.tokenize("):\n")
    ids = [MARKS["pre"], *before, MARKS["suf"], *behind, MARKS["mid"]]
    expected = filling.generate(token_ids=ids, **SHORT)
    assert filling.generate("def f(", suffix="):\n", **SHORT).token_ids == expected.token_ids
    with filling.live() as live:
        assert live.generate("def f(", suffix="):\n", **SHORT).token_ids == expected.token_ids
    assert filling.generate("", suffix="", **SHORT).metrics.prompt_tokens == 3


STORE_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
EXTRAS = Extras(
    go_template=True,
    system="You are a pirate.",
    params={"temperature": 0, "top_k": 3, "stop": ["zz"], "num_ctx": 64, "min_p": "odd"},
)


@pytest.fixture
def pirate(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a chat template of its own, which ``pirate`` stands for, as in Ollama."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    set_template(folder, STORE_TEMPLATE)
    found = ResolvedModel("ollama:pirate:latest", folder, None, "ollama", EXTRAS)
    monkeypatch.setattr("localrt.loading.context.resolve", lambda *_, **__: found)
    return folder


def set_template(folder: Path, template: str | None) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_settings_of_store(pirate: Path) -> None:
    with localrt.load("pirate", ctx=128) as model:
        assert model.info.ctx == 128
    set_template(pirate, None)
    with localrt.load("pirate") as model:
        assert [note for note in model.info.notes if "no chat template" in note] == [
            "the model has no chat template: chatting in a plain format, as Ollama's is in Go's "
            "language; `chat_template` takes Jinja2"
        ]
        assert model.info.ctx == 64
        kept = {name: model.defaults.get(name) for name in EXTRAS.params}
    assert (kept["temperature"], kept["top_k"], kept["stop"]) == (0, 3, ["zz"])
    assert kept["min_p"] != "odd"  # what cannot be used is left out


def test_system_prompt_of_store(pirate: Path) -> None:
    model = localrt.load("pirate")

    def shown(*messages: dict[str, str]) -> str:
        assert model.tokenizer is not None
        return model.tokenizer.decode(core_of(model).requests.render(messages))

    hi = {"role": "user", "content": "Hi"}
    assert shown(hi) == "[system] You are a pirate.[user] Hi[assistant]"
    assert shown({"role": "system", "content": ""}, hi) == "[system] [user] Hi[assistant]"
    assert shown({"role": "developer", "content": "X"}, hi) == "[system] X[user] Hi[assistant]"
    late = {"role": "system", "content": "X"}  # the beginning of the prompt stays what it was
    assert (
        shown(hi, late, hi) == "[system] You are a pirate.[user] Hi[system] X[user] Hi[assistant]"
    )
    model.close()
