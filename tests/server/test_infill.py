"""Filling in the middle through the server, as editors and clients ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import localrt
from localrt.server.dialect import GenerationRequest
from localrt.server.infill import InfillWriter
from tests.inside import core_of
from tests.server.conftest import Running, needs_kernels
from tests.server.dialects import events_in

pytestmark = needs_kernels

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
# What llama.vim sends.
VIM: dict[str, Any] = {
    "input_prefix": "import os\n",
    "input_suffix": ")\n",
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "other.py"}],
    "prompt": "print(",
    "n_predict": 12,
    "top_k": 1,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "ignore_eos": True,
}


@pytest.fixture(autouse=True)
def filling(model: localrt.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three of the tiny model's tokens mark the parts."""
    monkeypatch.setattr(model.tokenizer, "infill_ids", {"pre": 10, "suf": 11, "mid": 12})
    yield
    core_of(model).requests.__dict__.pop("_infill", None)


def test_completion_with_suffix(server: Running) -> None:
    expected = server.model.generate("def f(", suffix="):\n", **GREEDY)
    body = {"prompt": "def f(", "suffix": "):\n", **GREEDY}
    status, answer, _ = server.request("POST", "/v1/completions", body)
    assert status == 200
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
    status, plain, _ = server.request("POST", "/v1/completions", {**body, "suffix": ""})
    assert plain["choices"][0]["text"] == server.model.generate("def f(", raw=True, **GREEDY).text


def test_infill_sign_of_life(server: Running) -> None:
    call = GenerationRequest(prompts=[], options={})
    sign = InfillWriter(call, "tiny", server.model.tokenizer, fields={}).alive().decode()
    (found,) = events_in(sign)
    assert (found["content"], found["stop"]) == ("", False)


@pytest.mark.parametrize("stream", [False, True])
def test_mistrals_completions(server: Running, stream: bool) -> None:
    expected = server.model.generate("def f(", suffix="):\n", **GREEDY).text
    body = {"model": "tiny", "prompt": "def f(", "suffix": "):\n", "random_seed": 1, **GREEDY}
    status, answer, _ = server.request("POST", "/v1/fim/completions", {**body, "stream": stream})
    assert status == 200
    if not stream:
        assert answer["choices"][0]["message"]["content"] == expected
        return
    assert answer.endswith("data: [DONE]\n\n")
    deltas = [each["choices"][0]["delta"] for each in events_in(answer)]
    assert "".join(delta.get("content", "") for delta in deltas) == expected


def test_llama_cpps_infill(server: Running) -> None:
    expected = server.model.generate(
        "import os\nprint(", suffix=")\n", files=[("other.py", "x = 1\n")], **GREEDY
    )
    status, answer, _ = server.request("POST", "/infill", VIM)
    assert status == 200
    assert answer["content"] == expected.text
    assert (answer["stop"], answer["stop_type"]) == (True, "limit")
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 12
    assert answer["tokens_evaluated"] == expected.metrics.prompt_tokens
    chosen = {"response_fields": ["content", "timings/prompt_n", "tokens_cached", "nothing"]}
    _, few, _ = server.request("POST", "/infill", {**VIM, **chosen})
    assert set(few) == {"content", "timings/prompt_n", "tokens_cached"}
    _, text, _ = server.request("POST", "/infill", {**VIM, "stream": True})
    events = events_in(text)
    assert "".join(each["content"] for each in events) == expected.text
    assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]


def test_infill_only_reads(server: Running) -> None:
    body = {**VIM, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0}
    status, answer, _ = server.request("POST", "/infill", {**body, "response_fields": [""]})
    assert (status, answer) == (200, {})
    _, answer, _ = server.request("POST", "/infill", body)
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)


def test_infill_min_indent(server: Running) -> None:
    body = {**VIM, "n_predict": 200, "top_k": 0, "temperature": 1.5, "seed": 3}
    _, whole, _ = server.request("POST", "/infill", body)
    _, answer, _ = server.request("POST", "/infill", {**body, "n_indent": 1})
    assert whole["content"].startswith(answer["content"])
    assert not any(line[:1].strip() for line in answer["content"].split("\n")[1:])


def test_infill_overflow(server: Running) -> None:
    ctx = server.model.info.ctx
    body = {**VIM, "input_prefix": "a" * ctx, "input_suffix": "b" * ctx}
    status, answer, _ = server.request("POST", "/infill", body)
    assert status == 200
    assert answer["tokens_evaluated"] == ctx - 12
