"""A server with an encoder of texts: vectors, scores, and no answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from tests.models.tiny_encoders import ENCODERS, RANKERS, save_encoder, word_pieces
from tests.server.conftest import serving

TEXTS = ["a quick fox", "x", "brown " * 10]


def test_embedding_model(tmp_path: Path) -> None:
    save_encoder(ENCODERS["bert"], tmp_path)
    word_pieces(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    with localrt.load(tmp_path) as model, serving(model) as server:

        def post(path: str, **body: Any) -> tuple[int, Any]:
            status, got, _ = server.request("POST", path, {"model": "any", **body})
            return status, got

        status, got = post("/v1/embeddings", input=TEXTS)
        found = np.array([one["embedding"] for one in got["data"]], np.float32)
        assert status == 200
        assert np.allclose(found, model.embed(TEXTS), atol=1e-6)
        assert got["usage"]["prompt_tokens"] == sum(map(len, map(model.tokenize, TEXTS)))
        status, got = post("/v1/embeddings", input=TEXTS, dimensions=7)
        cut = found[:, :7] / np.linalg.norm(found[:, :7], axis=1, keepdims=True)
        assert np.allclose([one["embedding"] for one in got["data"]], cut, atol=1e-5)
        assert post("/v1/embeddings", input="brown " * 200)[0] == 400
        assert post("/api/embed", input=["brown " * 200, "x"])[0] == 200  # cut
        assert post("/v1/rerank", query="a", documents=["b"])[0] == 400  # its files name no pooling
        for path, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"messages": messages, "max_tokens": 5}),
            ("/api/chat", {"messages": messages, "stream": False}),
            ("/api/generate", {"prompt": "hi", "stream": False}),
        ):
            status, got = post(path, **body)
            assert status == 400, path
            assert "choose a model that writes" in str(got["error"])
        assert post("/api/show")[1]["capabilities"] == ["embedding"]


def test_cross_encoder(tmp_path: Path) -> None:
    save_encoder(RANKERS["bert"], tmp_path)
    word_pieces(tmp_path)
    with localrt.load(tmp_path) as model, serving(model) as server:
        wanted = model.rank("quick", TEXTS)
        body = {"model": "any", "query": "quick", "documents": TEXTS}
        status, got, _ = server.request("POST", "/v1/rerank", body)
        assert status == 200
        assert {one["index"]: one["relevance_score"] for one in got["results"]} == pytest.approx(
            dict(enumerate(wanted)), abs=1e-6
        )
        assert [one["relevance_score"] for one in got["results"]] == sorted(wanted, reverse=True)
        assert got["usage"]["prompt_tokens"] > 30
        body = {"model": "any", "input": "x"}
        status, got, _ = server.request("POST", "/v1/embeddings", body)
        assert status == 400
