"""Texts that are scored through the server: the numbers are the library's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import localrt
from localrt.evaluate import log_softmax
from tests.server.conftest import Running
from tests.server.dialects import events_in


def own_scores(model: localrt.Model, ids: list[int]) -> list[float]:
    """The log-probability of every token but the first."""
    rows = np.concatenate(list(model.logits(ids[:-1])))
    found: list[float] = log_softmax(rows)[np.arange(len(ids) - 1), ids[1:]].tolist()
    return found


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("form", ["ids", "lists of ids", "text", "texts"])
def test_echo_with_log_probabilities(server: Running, form: str, max_tokens: int) -> None:
    texts = ["hello there", "hi"] if form in ("lists of ids", "texts") else ["hello there"]
    ids = [server.model.tokenize(text) for text in texts]
    prompts = {"ids": ids[0], "lists of ids": ids, "text": texts[0], "texts": texts}
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1}
    body = {**fields, "model": "any", "prompt": prompts[form]}
    status, got, _ = server.request("POST", "/v1/completions", body)
    assert status == 200
    assert [choice["index"] for choice in got["choices"]] == list(range(len(texts)))
    for choice, text, tokens in zip(got["choices"], texts, ids, strict=True):
        found = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert choice["finish_reason"] == "length" or max_tokens
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(tokens) + max_tokens
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        expected = own_scores(server.model, tokens)
        assert found["token_logprobs"][1 : len(tokens)] == pytest.approx(expected, abs=1e-4)
        assert all(len(top) == 1 for top in found["top_logprobs"][1:])
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token.rstrip("\ufffd")) or not max_tokens
    assert got["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert got["usage"]["completion_tokens"] in (0, max_tokens * len(texts))


def test_streamed_echo(server: Running) -> None:
    fields = {"prompt": "hi", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    _, whole, _ = server.request("POST", "/v1/completions", fields)
    _, text, _ = server.request("POST", "/v1/completions", {**fields, "stream": True})
    choices = [event["choices"][0] for event in events_in(text)]
    (expected,) = whole["choices"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    for name, values in expected["logprobs"].items():
        assert [one for choice in choices for one in choice["logprobs"][name]] == values


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"echo": True, "max_tokens": 0}, "hi"),
        ({"max_tokens": 0}, ""),
        ({"max_tokens": 0, "stream": True}, ""),
        ({"echo": True, "max_tokens": 0, "n": 2}, "hi"),
    ],
)
def test_max_tokens_zero(server: Running, fields: dict[str, Any], text: str) -> None:
    status, got, _ = server.request("POST", "/v1/completions", {"prompt": "hi", **fields})
    assert status == 200
    if fields.get("stream"):
        got = events_in(got)[0]
    assert {choice["text"] for choice in got["choices"]} == {text}
    assert {choice["finish_reason"] for choice in got["choices"]} == {"length"}
    assert len(got["choices"]) == fields.get("n", 1)


def test_end_token_is_counted(server: Running) -> None:
    """lm-eval takes one token away from each answer: one must be there, whatever it is."""
    end = min(server.model.tokenizer.eos_ids)
    bias = {"logit_bias": {str(end): 100}, "temperature": 0, "max_tokens": 1}
    body = {"prompt": "hi", "echo": True, "logprobs": 1, **bias}
    _, got, _ = server.request("POST", "/v1/completions", body)
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
    assert len(choice["logprobs"]["tokens"]) == len(server.model.tokenize("hi")) + 1
