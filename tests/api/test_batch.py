"""Many prompts at once give what each gives alone, bit for bit on the CPU kernels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from tests.conftest import needs_kernels
from tests.loading.test_loading import write_model

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
SAMPLED = {"temperature": 1.5, "max_tokens": 8, "seed": 11, "logprobs": 2}
PROMPTS = ["hi", "Tell me about rivers, " * 9, "?", "a b c", "Name three colours"]


@pytest.fixture(scope="module")
def packed(tiny_folder: Path) -> Iterator[localrt.Model]:
    """The tiny model on the CPU kernels, whose rows do not depend on each other."""
    with localrt.load(tiny_folder) as model:
        yield model


def same(one: localrt.Chunk, other: localrt.Chunk) -> bool:
    def said(chunk: localrt.Chunk) -> tuple[Any, ...]:
        return chunk.text, chunk.token_ids, chunk.logprobs, chunk.finish_reason

    return said(one) == said(other)


def one_by_one(model: localrt.Model, prompts: list[Any], **options: Any) -> list[localrt.Chunk]:
    seed = options.pop("seed", None)
    return [
        model.generate(prompt, seed=None if seed is None else seed + i, **options)
        for i, prompt in enumerate(prompts)
    ]


@needs_kernels
@pytest.mark.parametrize(
    ("options", "batch_size"),
    [(GREEDY, None), (SAMPLED, 2), ({**SAMPLED, "stop": ["e", "a"]}, 1)],
)
def test_batch_equals_generate(
    packed: localrt.Model, options: dict[str, Any], batch_size: int | None
) -> None:
    together = packed.generate_batch(PROMPTS, batch_size=batch_size, **options)
    assert all(map(same, together, one_by_one(packed, PROMPTS, **options)))


def test_stream_batch(tiny: localrt.Model) -> None:
    parts: dict[int, str] = {0: "", 1: ""}
    last = {}
    for index, chunk in tiny.stream_batch(["hi", "ho"], **GREEDY):
        parts[index] += chunk.text
        last[index] = chunk
    whole = tiny.generate_batch(["hi", "ho"], **GREEDY)
    assert [chunk.text for chunk in whole] == [parts[0], parts[1]]
    assert {chunk.finish_reason for chunk in last.values()} == {"length"}
    assert [chunk.metrics.completion_tokens for chunk in whole] == [8, 8]
    assert all(chunk.metrics.ttft_s and chunk.metrics.decode_tok_s for chunk in whole)


def test_bad_prompt_in_batch(tiny: localrt.Model) -> None:
    prompts = ["hi", "x" * 600, "", "ho"]
    with pytest.raises(localrt.ContextOverflowError, match=r"^prompt 1 .*holds 512"):
        tiny.generate_batch(prompts, **GREEDY)
    results = tiny.generate_batch(prompts, errors="return", **GREEDY)
    assert isinstance(results[1].error, localrt.ContextOverflowError)
    assert isinstance(results[2].error, localrt.OptionError)
    assert results[1].finish_reason == "error"
    for result in (results[0], results[3]):
        assert result.error is None
        assert len(result.token_ids) == 8
    bad_ids = tiny.generate_batch(token_ids=[[5], [10**6]], errors="return", **GREEDY)
    assert isinstance(bad_ids[1].error, localrt.OptionError)
    # A bias for a token that the model lacks is found while sampling.
    with pytest.raises(localrt.OptionError, match=r"^prompt 0 .*logit_bias"):
        tiny.generate_batch(["hi"], logit_bias={10**6: 1.0}, **GREEDY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "hi"}, "list of prompts"),
        ({"token_ids": [1, 2]}, "token_ids"),
        ({}, "either"),
        ({"prompts": ["hi"], "batch_size": 0}, "batch_size"),
        ({"prompts": ["hi"], "temprature": 1}, "did you mean temperature"),
    ],
)
def test_bad_arguments(tiny: localrt.Model, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(localrt.OptionError, match=message):
        tiny.stream_batch(**arguments)


def test_memory_bounds_the_batch(tiny: localrt.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.service.batching.kv_room", lambda engine: 0)
    prompts: list[Any] = ["a", [{"role": "user", "content": "a"}]]
    one, other = tiny.generate_batch(prompts, **GREEDY)  # one at a time
    assert one.token_ids == other.token_ids
    assert tiny.generate_batch([], **GREEDY) == []
    with pytest.raises(localrt.MemoryBudgetError, match="batch_size=1"):
        tiny.generate_batch(prompts, batch_size=2, **GREEDY)


async def test_async_batches(tiny: localrt.Model) -> None:
    expected = tiny.generate_batch(["hi", "ho"], **GREEDY)
    got = await tiny.agenerate_batch(["hi", "ho"], **GREEDY)
    assert [chunk.text for chunk in got] == [chunk.text for chunk in expected]
    seen = [index async for index, _ in tiny.astream_batch(["hi", "ho"], **GREEDY)]
    assert seen.count(0) == seen.count(1) == 9
    async for _ in tiny.astream_batch(["leave", "me"], temperature=0, ignore_eos=True):
        break
    await asyncio.sleep(0.05)
    assert (await tiny.agenerate("hi", **GREEDY)).metrics.completion_tokens == 8


@pytest.mark.llamacpp
def test_llamacpp_batch(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = write_model(tmp_path / "m.gguf", "llama", "F32")
    with localrt.load(path, engine="llamacpp", ctx=128) as model:
        prompts = ["ab", "ba", "aab"]
        together = model.generate_batch(prompts, batch_size=3, raw=True, **GREEDY)
        assert all(map(same, together, one_by_one(model, prompts, raw=True, **GREEDY)))
