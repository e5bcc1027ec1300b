"""Endpoints on texts: tokens, scores, vectors, rankings and filling in the middle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.evaluate import log_softmax
from tests.inside import core_of
from tests.server.conftest import WIDE, Running, needs_kernels, serving
from tests.server.dialects import BODIES, COLOUR, PAINT, events_in

# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({"content": "hi there"}, False),  # llama.cpp
        ({"prompt": "hi there"}, True),  # vLLM
        ({"messages": [{"role": "user", "content": "hi"}]}, True),
    ],
)
def test_tokenize(server: Running, fields: dict[str, Any], special: bool) -> None:
    (given,) = (fields[name] for name in ("content", "prompt", "messages") if name in fields)
    expected = server.model.tokenize(given, add_special=special)
    status, got, _ = server.request("POST", "/tokenize", {"model": "any", **fields})
    assert (status, got["tokens"], got["count"]) == (200, expected, len(expected))
    assert got["max_model_len"] == server.model.info.ctx


@pytest.mark.parametrize(
    ("path", "counting", "fields"),
    [
        ("/v1/chat/completions", "/tokenize", {"tools": [{"type": "function", "function": PAINT}]}),
        ("/v1/responses", "/v1/responses/input_tokens", {"instructions": "Be brief."}),
        (
            "/v1/messages",
            "/v1/messages/count_tokens",
            {"system": "Be brief.", "tools": [{"name": "paint", "input_schema": COLOUR}]},
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


WRITTEN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "prompt", GREEDY),
        ("/api/generate", "prompt", {"raw": True, "stream": False}),
        ("/v1/embeddings", "input", {}),
    ],
)
def test_control_tokens_in_raw_prompts(
    server: Running, path: str, field: str, body: dict[str, Any]
) -> None:
    """Where no template is applied, the text has been written by one: all of it counts."""
    model = server.model
    ids = model.tokenizer.encode(WRITTEN, parse_special=True)
    assert len(ids) < len(model.tokenize(WRITTEN))
    status, got, _ = server.request("POST", path, {**body, "model": "tiny", field: WRITTEN})
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


# -- scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "max_tokens"), [("ids", 0), ("texts", 1)])
def test_echo_with_log_probabilities(server: Running, form: str, max_tokens: int) -> None:
    texts = ["hello there", "hi"] if form == "texts" else ["hello there"]
    ids = [server.model.tokenize(text) for text in texts]
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1}
    body = {**fields, "model": "any", "prompt": texts if form == "texts" else ids[0]}
    status, got, _ = server.request("POST", "/v1/completions", body)
    assert status == 200
    assert [choice["index"] for choice in got["choices"]] == list(range(len(texts)))
    for choice, text, tokens in zip(got["choices"], texts, ids, strict=True):
        found = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert choice["finish_reason"] == "length" or max_tokens
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(tokens) + max_tokens
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        rows = log_softmax(np.concatenate(list(server.model.logits(tokens[:-1]))))
        expected = rows[np.arange(len(tokens) - 1), tokens[1:]].tolist()
        assert found["token_logprobs"][1 : len(tokens)] == pytest.approx(expected, abs=1e-4)
        assert all(len(top) == 1 for top in found["top_logprobs"][1:])
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token.rstrip("\ufffd")) or not max_tokens
    assert got["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert got["usage"]["completion_tokens"] in (0, max_tokens * len(texts))


def test_end_token_is_counted(server: Running) -> None:
    """lm-eval takes one token away from each answer: one must be there, whatever it is."""
    end = min(server.model.tokenizer.eos_ids)
    bias = {"logit_bias": {str(end): 100}, "temperature": 0, "max_tokens": 1}
    body = {"prompt": "hi", "echo": True, "logprobs": 1, **bias}
    _, got, _ = server.request("POST", "/v1/completions", body)
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
    assert len(choice["logprobs"]["tokens"]) == len(server.model.tokenize("hi")) + 1


# -- vectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "given", "texts", "dimensions"),
    [
        ("/v1/embeddings", [[5, 6]], [[5, 6]], None),
        ("/v1/embeddings", ["", "a"], [" ", "a"], 8),
        ("/api/embed", "hi", ["hi"], 8),
        ("/api/embed", [], [], None),
    ],
)
def test_vectors(server: Running, path: str, given: Any, texts: Any, dimensions: Any) -> None:
    body = {"model": "tiny", "input": given, "dimensions": dimensions}
    status, got, _ = server.request("POST", path, body)
    assert status == 200, got
    found = [one["embedding"] for one in got["data"]] if "data" in got else got["embeddings"]
    cut = [row[: dimensions or WIDE] for row in (server.model.embed(texts) if texts else ())]
    expected = [pytest.approx((row / (row @ row) ** 0.5).tolist(), 1e-4) for row in cut]
    assert found == expected


@pytest.mark.slow
def test_encoder(tmp_path: Path) -> None:
    """A server for an encoder of texts, which writes none."""
    from tests.models.tiny_encoders import ENCODERS, save_encoder, word_pieces

    save_encoder(ENCODERS["bert"], tmp_path)
    word_pieces(tmp_path)
    texts = ["a quick fox", "x", "brown " * 10]
    with localrt.load(tmp_path) as model, serving(model, name="encoder") as running:
        status, got, _ = running.request("POST", "/v1/embeddings", {"input": texts})
        found = np.array([one["embedding"] for one in got["data"]], np.float32)
        assert np.allclose(found, model.embed(texts), atol=1e-6)
        assert got["usage"]["prompt_tokens"] == sum(map(len, map(model.tokenize, texts)))
        for path, body in BODIES.items():
            status, got, _ = running.request("POST", path, body)
            assert status == 400, path
            assert "choose a model that writes" in str(got["error"])
        shown = running.request("POST", "/api/show", {"model": "any"})[1]
        assert shown["capabilities"] == ["embedding"]


# -- rankings --------------------------------------------------------------------------------------

QUERY, DOCUMENTS = "What is the capital of France?", ["Paris.", "A cat sleeps.", "Berlin."]
HEAD = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(params=["named", "embedder"])
def ranking(request: pytest.FixtureRequest, model: localrt.Model) -> Iterator[Running]:
    """A server for a model that its files or its name call a reranker, or an embedding model."""
    more = {"named": {"name": "Qwen3-Reranker-0.6B"}, "embedder": {"pooling": "mean"}}
    info = model.info
    core_of(model).info = model.info = replace(info, **more[request.param])
    try:
        with serving(model, name="ranker") as running:
            yield running
    finally:
        core_of(model).info = model.info = info


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
        ("/rerank", {"documents": [{"text": text} for text in DOCUMENTS], "top_n": 2}),
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
    found = model.rank(QUERY, DOCUMENTS, instruction="Find jokes")
    assert found == pytest.approx(expected_scores(model, "Find jokes"), abs=1e-4)
    with pytest.raises(localrt.ContextOverflowError, match="with document 1"):
        model.rank(QUERY, ["x", "brown " * 1000])


# -- filling in the middle -------------------------------------------------------------------------

FILL: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
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


@pytest.fixture
def filling(
    server: Running, model: localrt.Model, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """Three of the tiny model's tokens mark the parts."""
    monkeypatch.setattr(model.tokenizer, "infill_ids", {"pre": 10, "suf": 11, "mid": 12})
    yield server
    core_of(model).requests.__dict__.pop("_infill", None)


@needs_kernels
def test_completion_with_suffix(filling: Running) -> None:
    expected = filling.model.generate("def f(", suffix="):\n", **FILL)
    body = {"prompt": "def f(", "suffix": "):\n", **FILL}
    status, answer, _ = filling.request("POST", "/v1/completions", body)
    assert status == 200
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
    # Mistral's clients.
    body |= {"model": "tiny", "random_seed": 1}
    status, answer, _ = filling.request("POST", "/v1/fim/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, expected.text)
    status, answer, _ = filling.request("POST", "/v1/fim/completions", {**body, "stream": True})
    assert answer.endswith("data: [DONE]\n\n")
    deltas = [each["choices"][0]["delta"] for each in events_in(answer)]
    assert "".join(delta.get("content", "") for delta in deltas) == expected.text


@needs_kernels
def test_infill(filling: Running) -> None:
    files = [("other.py", "x = 1\n")]
    expected = filling.model.generate("import os\nprint(", suffix=")\n", files=files, **FILL)
    status, answer, _ = filling.request("POST", "/infill", VIM)
    assert (status, answer["content"]) == (200, expected.text)
    assert (answer["stop"], answer["stop_type"]) == (True, "limit")
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 12
    assert answer["tokens_evaluated"] == expected.metrics.prompt_tokens
    chosen = {"response_fields": ["content", "timings/prompt_n", "nothing"]}
    _, few, _ = filling.request("POST", "/infill", {**VIM, **chosen})
    assert set(few) == {"content", "timings/prompt_n"}
    _, text, _ = filling.request("POST", "/infill", {**VIM, "stream": True})
    events = events_in(text)
    assert "".join(each["content"] for each in events) == expected.text
    assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]


@needs_kernels
def test_infill_limits(filling: Running) -> None:
    """Lines end at a smaller indent; what is too long for the context is cut."""
    body = {**VIM, "n_predict": 200, "top_k": 0, "temperature": 1.5, "seed": 3}
    _, whole, _ = filling.request("POST", "/infill", body)
    _, answer, _ = filling.request("POST", "/infill", {**body, "n_indent": 1})
    assert whole["content"].startswith(answer["content"])
    assert not any(line[:1].strip() for line in answer["content"].split("\n")[1:])
    ctx = filling.model.info.ctx
    body = {**VIM, "input_prefix": "a" * ctx, "input_suffix": "b" * ctx}
    status, answer, _ = filling.request("POST", "/infill", body)
    assert (status, answer["tokens_evaluated"]) == (200, ctx - 12)
