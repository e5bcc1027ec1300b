"""The Python API on the tiny random model: prompts, arguments, batches, vectors."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import rlcompleter
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from tests.conftest import needs_kernels, write_tiny_model
from tests.inside import engine_of
from tests.models.tiny import save_tiny

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def test_public_names_are_lazy() -> None:
    for name in localrt.__all__:
        assert getattr(localrt, name) is not None
    completer = rlcompleter.Completer({"localrt": localrt})
    completed = {completer.complete("localrt.", i) or "" for i in range(200)}
    assert {"__version__", *(text[8:].rstrip("()") for text in completed)} > set(localrt.__all__)


def test_stream_equals_generate(tiny: localrt.Model) -> None:
    chunks = list(tiny.stream("hi", **GREEDY))
    whole = tiny.generate("hi", **GREEDY)
    assert "".join(c.text for c in chunks) == whole.text
    assert tuple(t for c in chunks for t in c.token_ids) == whole.token_ids
    assert whole.finish_reason == "length"
    assert whole.metrics.completion_tokens == 8


def test_string_prompt(tiny: localrt.Model) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tiny.tokenizer.encode(rendered, parse_special=True)
    expected = tiny.generate(token_ids=ids, **GREEDY)
    assert tiny.generate("hi", **GREEDY).token_ids == expected.token_ids
    messages = [{"role": "user", "content": "hi"}]
    assert tiny.generate(messages, **GREEDY).token_ids == expected.token_ids
    assert tiny.generate("hi", **GREEDY).metrics.prompt_tokens == len(ids)
    assert tiny.count(messages) == len(ids)
    raw = tiny.generate("hi", raw=True, **GREEDY)
    assert raw.metrics.prompt_tokens == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "did you mean temperature"),
        ({"ctx": 512}, "ctx is set when a model is loaded"),
        ({"temperature": -1}, "temperature"),
        ({"draft": 3}, "draft"),
        ({"tree_budget": 0}, "tree_budget must be an integer from 1 to 2048"),
        ({"max_new_tokens": 1}, r"did you mean max_tokens\?"),
    ],
)
def test_bad_options(tiny: localrt.Model, options: dict[str, object], message: str) -> None:
    with pytest.raises(localrt.OptionError, match=message):
        tiny.stream("hi", **options)


def test_bad_prompts(tiny: localrt.Model) -> None:
    for arguments in ({}, {"prompt": ""}, {"prompt": "a", "token_ids": [1]}):
        with pytest.raises(localrt.OptionError):
            tiny.generate(**arguments)
    with pytest.raises(localrt.OptionError, match="token ids must be from 0 to"):
        tiny.generate(token_ids=[10**6])
    with pytest.raises(localrt.ContextOverflowError, match="512"):
        tiny.generate("x" * 600)
    with pytest.raises(localrt.TemplateError, match='a user message must have a "content"'):
        tiny.generate([{"role": "user"}])


def test_much_too_long_prompt(tiny: localrt.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tiny.tokenizer), "encode", None)  # nothing is tokenized
    text = "a" * 200_000
    asked: list[dict[str, object]] = [
        {"prompt": text},
        {"prompt": text, "raw": True},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    ]
    for arguments in asked:
        with pytest.raises(localrt.ContextOverflowError, match=r"tokens or more .* 512: shorten"):
            tiny.generate(**arguments)
    with pytest.raises(localrt.ContextOverflowError, match=r"text 0 .* tokens or more"):
        tiny.embed([text])


async def test_async_streams(tiny: localrt.Model) -> None:
    expected = tiny.generate("hi", **GREEDY)
    got = [chunk async for chunk in tiny.astream("hi", **GREEDY)]
    assert "".join(c.text for c in got) == expected.text
    async for _ in tiny.astream("leave me", temperature=0, ignore_eos=True):
        break
    both = await asyncio.gather(tiny.agenerate("hi", **GREEDY), tiny.agenerate("ho", **GREEDY))
    assert both[0].text == expected.text


def test_model_without_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with localrt.load(folder) as model:
        assert any("token" in note for note in model.info.notes)
        result = model.generate(token_ids=[5, 6, 7], **GREEDY)
        assert len(result.token_ids) == 8
        assert result.text == ""
        for work in (
            lambda: model.generate("hi"),
            lambda: model.tokenize("hi"),
            lambda: model.generate(token_ids=[5], stop="x"),
        ):
            with pytest.raises(localrt.TokenizerError):
                work()


def test_context_and_memory_limits(tiny_folder: Path) -> None:
    with localrt.load(tiny_folder, ctx=1024) as model:
        assert model.info.ctx == 1024
        assert any("512" in note for note in model.info.notes)
    with pytest.raises(localrt.MemoryBudgetError, match=r"does not fit .* of RAM"):
        localrt.load(tiny_folder, ctx=1 << 40)
    with pytest.raises(localrt.MemoryBudgetError, match=r"1 kB"):
        localrt.load(tiny_folder, ram="1KB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "magic"}, "engine"),
        ({"device": "tpu"}, "device"),
        ({"kv_format": "int3"}, "kv_format must be one of bf16, int8, int4"),
        ({"kv_format": "int8", "format": "f32"}, "CPU kernels"),
        ({"ram": "lots"}, "ram must be a size, is 'lots'"),
        ({"threads": 10**9}, "threads must be at most 1024"),
        ({"engine": "llamacpp"}, "GGUF"),
        ({"adapters": ["a"]}, "adapters must be paths by names"),
    ],
)
def test_bad_load_options(tiny_folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(localrt.OptionError, match=message):
        localrt.load(tiny_folder, **options)  # type: ignore[arg-type]


def test_closed_model(tiny_folder: Path) -> None:
    model = localrt.load(tiny_folder)
    model.close()
    with pytest.raises(localrt.LocalrtError, match="closed"):
        model.generate("hi")
    model.close()
    assert repr(model) == f"<localrt.Model {model.name!r}: closed>"
    changes = (lambda: model.add_adapter("a", "b"), lambda: model.set_budget(ram="900GB"))
    for work in (model.chat, model.live, *changes):
        with pytest.raises(localrt.LocalrtError, match="the model is closed: load it again"):
            work()  # type: ignore[operator]


def test_wrong_arguments(tiny: localrt.Model) -> None:
    for prompt, options, says in (
        (5, {}, "a prompt is a string or a list of messages, is 5"),
        (None, {"token_ids": [1.5]}, r"token_ids must be a list of integers, is \[1\.5\]"),
        ("hi", {"logit_bias": {1: math.inf}}, "logit_bias of token 1 must be a finite number"),
        ("hi", {"tools": [{}]}, r"each a mapping with a name, one is \{\}"),
        ("hi", {"raw": "yes"}, "raw must be true or false, is 'yes'"),
        ([{"content": "hi"}], {"overflow": "drop_oldest"}, "a message is a mapping with a role"),
        (["hi"], {}, "a message is a mapping with a role, .* is 'hi'"),
        ([{"role": "users", "content": "hi"}], {}, "role must be one of system, .*, is 'users'"),
        ("hi", {"suffix": "a", "files": [("a", 1)]}, "files must be a list of pairs"),
    ):
        with pytest.raises(localrt.OptionError, match=says):
            tiny.generate(prompt, max_tokens=2, **options)  # type: ignore[arg-type]
    with tiny.live() as live, pytest.raises(localrt.OptionError, match="leave on_progress out"):
        live.submit("hi", on_progress=print)
    assert tiny.generate(token_ids=np.array([5, 6]), max_tokens=2).text is not None  # type: ignore[arg-type]
    for work, says in (
        (lambda: tiny.generate_batch(5), "prompts must be a list of prompts"),  # type: ignore[arg-type]
        (lambda: tiny.generate_batch(token_ids=5), "token_ids must be a list of lists"),
        (lambda: tiny.chat().send(5), "a message must be a string"),  # type: ignore[arg-type]
        (lambda: tiny.detokenize([-1]), "token ids must be from 0 to"),
        (lambda: tiny.chat().add_tool_result(5, 5), "no call 5 waits"),  # type: ignore[arg-type]
        (lambda: localrt.pull(5), "model must be a string, is 5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(localrt.OptionError, match=says):
            work()


@pytest.mark.parametrize(
    ("call", "options", "meant"),
    [
        (localrt.load, {"rma": "2GB"}, "ram"),
        (localrt.load, {"n_ctx": 4096}, "ctx"),
        (localrt.load, {"cache_type_k": "q8_0"}, "kv_format"),
        (localrt.preview, {"model": "smollm2", "gpu_memroy": "8GB"}, "gpu_memory"),
    ],
)
def test_arguments_of_other_libraries(
    call: Callable[..., Any], options: dict[str, Any], meant: str
) -> None:
    with pytest.raises(localrt.OptionError, match=f"did you mean {meant}\\?"):
        call(**options)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling(tiny: localrt.Model, way: Callable[[object], object]) -> None:
    for each in (tiny, tiny.chat()):
        with pytest.raises(TypeError, match="cannot be pickled or copied: each process opens its"):
            way(each)


# -- batches ---------------------------------------------------------------------------------------


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
    ("options", "batch_size"), [(GREEDY, None), ({**SAMPLED, "stop": ["e", "a"]}, 2)]
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


# -- vectors ---------------------------------------------------------------------------------------


TEXTS: list[list[int]] = [
    [5, 6, 7],
    [9],
    [int(t) for t in np.random.default_rng(0).integers(3, 211, 90)],
]
JOINED = {"mean": lambda r: r.mean(0), "last": lambda r: r[-1], "cls": lambda r: r[0]}


def hidden(reference: Any, tokens: list[int]) -> Any:
    import torch

    with torch.no_grad():
        found = reference(torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0].numpy()


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_vectors_as_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path).module
    with localrt.load(tmp_path, format="f32") as model:
        rows = [hidden(reference, text) for text in TEXTS]
        for pooling, joined in JOINED.items():
            wanted = np.stack(list(map(joined, rows)))
            found = model.embed(TEXTS, pooling=pooling, normalize=False)
            assert found.dtype == np.float32
            assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
            unit = model.embed(TEXTS, pooling=pooling)
            assert np.allclose(np.linalg.norm(unit, axis=1), 1.0, atol=1e-5)


def test_embed_together_and_alone(tiny_folder: Path) -> None:
    texts = ["a" * n for n in (3, 500, 40, 511, 1)]
    with localrt.load(tiny_folder) as model:
        together = model.embed(texts)
        for text, vector in zip(texts, together, strict=True):
            assert (model.embed([text])[0] == vector).all()
        alone = engine_of(model).pass_rows  # type: ignore[attr-defined]
        engine_of(model).pass_rows = 64  # type: ignore[attr-defined]
        assert (model.embed(texts) == together).all()
        assert alone == 512
        assert model.embed([]).shape == (0, 64)
        # A generation does not notice.
        assert model.generate("hi", max_tokens=3, ignore_eos=True).token_ids


def test_pooling_of_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with localrt.load(folder) as model:
        assert (model.embed(["abc"]) == model.embed(["abc"], pooling="mean")).all()
    (folder / "1_Pooling").mkdir()
    config = folder / "1_Pooling" / "config.json"
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    config.write_text(json.dumps(modes))
    with localrt.load(folder) as model:
        assert (model.embed(["abc"]) == model.embed(["abc"], pooling="last")).all()


def test_embed_errors(tiny: localrt.Model) -> None:
    for texts, options, kind, message in (
        ("one text", {}, localrt.OptionError, "a list of texts"),
        (["a", ""], {}, localrt.OptionError, "text 1"),
        ([[100000]], {}, localrt.OptionError, "token ids"),
        (["a"], {"pooling": "max"}, localrt.OptionError, "pooling must be auto, mean, last or cls"),
        (["a" * 600], {}, localrt.ContextOverflowError, "600 tokens"),
    ):
        with pytest.raises(kind, match=message):
            tiny.embed(texts, **options)  # type: ignore[arg-type]
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(localrt.CancelledError):
        tiny.embed(["a"], cancel=cancel)
