"""Tokens, their texts, and documents by how well they answer, in the forms of several servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import pytest

import localrt
from tests.inside import core_of
from tests.server.conftest import Running, serving
from tests.server.dialects import BODIES, COLOUR, HI, PAINT

QUERY, DOCUMENTS = "What is the capital of France?", ["Paris.", "A cat sleeps.", "Berlin."]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "//tokenize/"])
@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({"content": "hi there"}, False),  # llama.cpp
        ({"content": "hi there", "add_special": True}, True),
        ({"prompt": "hi there"}, True),  # vLLM
        ({"prompt": "hi there", "add_special_tokens": False}, False),
    ],
)
def test_tokenize(server: Running, path: str, fields: dict[str, Any], special: bool) -> None:
    expected = server.model.tokenize("hi there", add_special=special)
    status, got, _ = server.request("POST", path, {"model": "any", **fields})
    assert (status, got["tokens"], got["count"]) == (200, expected, len(expected))
    assert got["max_model_len"] == server.model.info.ctx


def test_tokenize_pieces(server: Running) -> None:
    ids = server.model.tokenize("hi", add_special=False)
    _, got, _ = server.request("POST", "/tokenize", {"content": "hi", "with_pieces": True})
    assert [one["id"] for one in got["tokens"]] == ids
    assert "".join(one["piece"] for one in got["tokens"]) == "hi"
    body = {"prompt": "hi", "return_token_strs": True}
    assert "".join(server.request("POST", "/tokenize", body)[1]["token_strs"]) == "hi"
    assert server.request("POST", "/tokenize", {"content": ""})[1]["tokens"] == []


@pytest.mark.parametrize(
    ("path", "counting", "fields"),
    [
        ("/v1/chat/completions", "/tokenize", {}),
        ("/v1/chat/completions", "/tokenize", {"tools": [{"type": "function", "function": PAINT}]}),
        ("/v1/responses", "/v1/responses/input_tokens", {"instructions": "Be brief."}),
        ("/v1/messages", "/v1/messages/count_tokens", {"system": "Be brief."}),
        (
            "/v1/messages",
            "/v1/messages/count_tokens",
            {"tools": [{"name": "paint", "input_schema": COLOUR}]},
        ),
    ],
)
def test_counted_tokens(server: Running, path: str, counting: str, fields: dict[str, Any]) -> None:
    body = {**BODIES[path], **fields}
    _, answered, _ = server.request("POST", path, body)
    _, counted, _ = server.request("POST", counting, body)
    usage = answered["usage"]
    read = usage.get("prompt_tokens") or usage["input_tokens"]
    read += usage.get("cache_read_input_tokens", 0)  # which Anthropic does not count as input
    assert read == (counted.get("count") or counted["input_tokens"])


def test_tokenize_conversation(server: Running) -> None:
    _, got, _ = server.request("POST", "/tokenize", {"messages": HI})
    assert got["tokens"] == server.model.tokenize(HI)


def test_tokenize_control_tokens(server: Running) -> None:
    tokenizer = server.model.tokenizer
    _, info, _ = server.request("GET", "/tokenizer_info")
    assert info["model_max_length"] == server.model.info.ctx
    assert "<|im_start|>" in info["chat_template"]
    end = info["eos_token"]
    body = {"prompt": end, "add_special_tokens": False}
    _, got, _ = server.request("POST", "/tokenize", body)
    assert got["tokens"] == [min(tokenizer.eos_ids)]
    _, got, _ = server.request("POST", "/tokenize", {**body, "parse_special": False})
    assert got["tokens"] == tokenizer.encode(end, add_special=False) != [min(tokenizer.eos_ids)]


WRITTEN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_tokens": 4}
RAW = {"raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 4}}


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "prompt", GREEDY),
        ("/v1/completions", "prompt", {**GREEDY, "echo": True, "logprobs": 1}),
        ("/v1/completions", "prompt", {"max_tokens": 0}),
        ("/v1/completions", "prompts", GREEDY),
        ("/api/generate", "prompt", RAW),
        ("/v1/embeddings", "input", {}),
        ("/api/embed", "input", {}),
        ("library", "prompt", GREEDY),
        ("batch", "prompt", GREEDY),
    ],
)
def test_control_tokens_in_raw_prompts(
    server: Running, path: str, field: str, body: dict[str, Any]
) -> None:
    """Where no template is applied, the text has been written by one: all of it counts."""
    model = server.model
    ids = model.tokenizer.encode(WRITTEN, parse_special=True)
    assert len(ids) < len(model.tokenize(WRITTEN))
    if path == "library":
        count = model.generate(WRITTEN, raw=True, **body).metrics.prompt_tokens
    elif path == "batch":
        (chunk,) = model.generate_batch([WRITTEN], raw=True, **body)
        count = chunk.metrics.prompt_tokens
    else:
        prompt = [WRITTEN] if field == "prompts" else WRITTEN
        sent = {**body, "model": "tiny", field.rstrip("s"): prompt}
        status, got, _ = server.request("POST", path, sent)
        assert status == 200
        count = got["prompt_eval_count"] if path[:5] == "/api/" else got["usage"]["prompt_tokens"]
    assert count == len(ids)


def test_control_tokens_in_messages_stay_text(server: Running) -> None:
    told = [{"role": "user", "content": WRITTEN}]
    assert server.model.count(told) >= len(server.model.tokenize(WRITTEN, add_special=False))


def test_detokenize(server: Running) -> None:
    ids = server.model.tokenize("hi <there>")
    status, got, _ = server.request("POST", "/detokenize", {"tokens": ids})
    assert (status, got) == (200, {"content": "hi <there>", "prompt": "hi <there>"})
    assert server.request("POST", "/detokenize", {"tokens": []})[1]["content"] == ""


# -- documents -------------------------------------------------------------------------------------


@pytest.fixture(params=["reranker", "named", "embedder"])
def ranking(request: pytest.FixtureRequest, model: localrt.Model) -> Iterator[Running]:
    """A server for a model that its files or its name call a reranker, or an embedding model."""
    more = {
        "reranker": {"pooling": "rank"},
        "named": {"name": "Qwen3-Reranker-0.6B"},
        "embedder": {"pooling": "mean"},
    }
    info = model.info
    core_of(model).info = model.info = replace(info, **more[request.param])
    try:
        with serving(model, name="ranker") as running:
            yield running
    finally:
        core_of(model).info = model.info = info


HEAD = "Given a web search query, retrieve relevant passages that answer the query"


def expected_scores(model: localrt.Model, head: str = HEAD) -> list[float]:
    if model.info.pooling == "mean":
        asked, *found = model.embed([QUERY, *DOCUMENTS])
        return [float(asked @ vector) for vector in found]
    scores = []
    for document in DOCUMENTS:
        text = f"<Instruct>: {head}\n<Query>: {QUERY}\n<Document>: {document}"
        system = (
            "Judge whether the Document meets the requirements based on the Query and the "
            'Instruct provided. Note that the answer can only be "yes" or "no".'
        )
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        *_, rows = model.logits(model.tokenize(messages, thinking=False))
        yes, no = (rows[-1][model.tokenize(word)[0]] for word in ("yes", "no"))
        scores.append(math.exp(yes) / (math.exp(yes) + math.exp(no)))
    return scores


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", {"documents": DOCUMENTS}),
        ("/rerank", {"documents": [{"text": text} for text in DOCUMENTS]}),
        ("/v1/rerank/", {"documents": DOCUMENTS, "top_n": 2}),
        ("/v1/rerank", {"documents": DOCUMENTS, "instruction": "Find jokes"}),
    ],
)
def test_rerank(ranking: Running, path: str, fields: dict[str, Any]) -> None:
    body = {"model": "any", "query": QUERY, "return_documents": True, **fields}
    status, got, _ = ranking.request("POST", path, body)
    assert (status, got["model"]) == (200, "any")
    expected = expected_scores(ranking.model, fields.get("instruction", HEAD))
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [one["index"] for one in got["results"]] == order[: fields.get("top_n", 3)]
    for one in got["results"]:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-4)
        assert one["document"]["text"] == DOCUMENTS[one["index"]]


def test_rank(ranking: Running) -> None:
    """As the server ranks, but an embedding model does not."""
    model = ranking.model
    if model.info.pooling == "mean":
        with pytest.raises(localrt.OptionError, match="no reranker"):
            model.rank(QUERY, DOCUMENTS)
        return
    for given in ({}, {"instruction": "Find jokes"}):
        expected = expected_scores(model, *given.values())
        assert model.rank(QUERY, DOCUMENTS, **given) == pytest.approx(expected, abs=1e-4)
    assert model.rank(QUERY, []) == []
    with pytest.raises(localrt.ContextOverflowError, match="with document 1"):
        model.rank(QUERY, ["x", "brown " * 1000])
    with pytest.raises(localrt.OptionError, match="strings"):
        model.rank(QUERY, DOCUMENTS, instruction=5)  # type: ignore[arg-type]
    cancel = Event()
    cancel.set()
    with pytest.raises(localrt.CancelledError):
        model.rank(QUERY, DOCUMENTS, cancel=cancel)
