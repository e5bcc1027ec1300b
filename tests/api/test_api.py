"""The Python API on the tiny random model: prompts, arguments, threads, async, prefix reuse."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import rlcompleter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from tests.conftest import write_tiny_model

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
        ({"overflow": "ignore"}, "overflow"),
        ({"draft": 3}, "draft"),
        ({"tree_budget": 0}, "tree_budget must be an integer from 1 to 2048"),
        ({"tree_depth": 65}, "tree_depth must be an integer from 1 to 64"),
        ({"logprobs": 1000}, "logprobs"),
        ({"max_new_tokens": 1}, r"did you mean max_tokens\?"),
        ({"n_gpu_layers": 1}, r"did you mean gpu_memory\?"),
    ],
)
def test_bad_options(tiny: localrt.Model, options: dict[str, object], message: str) -> None:
    with pytest.raises(localrt.OptionError, match=message):
        tiny.stream("hi", **options)


def test_bad_prompts(tiny: localrt.Model) -> None:
    for arguments in ({}, {"prompt": ""}, {"prompt": []}, {"prompt": "a", "token_ids": [1]}):
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
        {"prompt": [{"role": "assistant", "content": "<think>no</think>" + text}]},
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
        # Every prompt of a batch would fail, so that the batch does.
        assert len(model.generate_batch(token_ids=[[5], [6, 7]], **GREEDY)) == 2
        with pytest.raises(localrt.TokenizerError):
            model.generate_batch(["hi"], errors="return", **GREEDY)
        with pytest.raises(localrt.TokenizerError):
            model.generate_batch(token_ids=[[5]], stop="x", errors="return")


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
        ({"format": "int3"}, "format"),
        ({"device": "tpu"}, "device"),
        ({"kv_format": "int3"}, "kv_format must be one of bf16, int8, int4"),
        ({"kv_format": "int8", "format": "f32"}, "CPU kernels"),
        ({"ctx": 0}, "ctx"),
        ({"ram": "lots"}, "ram must be a size, is 'lots'"),
        ({"threads": 10**9}, "threads must be at most 1024"),
        ({"shrinkable": "a"}, "shrinkable must be true or false"),
        ({"draft": None}, "draft must be a string, is None"),
        ({"engine": "llamacpp"}, "GGUF"),
        ({"adapters": ["a"]}, "adapters must be paths by names"),
        ({"chat_template": 5}, "chat_template must be a path"),
        ({"progress": 5}, "progress must be a function"),
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
        ({"role": "user"}, {}, "a prompt is a string or a list of messages"),
        ("hi", {"tools": 5}, "tools must be a list of functions"),
        ("hi", {"tools": [{}]}, r"each a mapping with a name, one is \{\}"),
        ("hi", {"raw": "yes"}, "raw must be true or false, is 'yes'"),
        ([{"content": "hi"}], {"overflow": "drop_oldest"}, "a message is a mapping with a role"),
        (["hi"], {}, "a message is a mapping with a role, .* is 'hi'"),
        ([{"role": "users", "content": "hi"}], {}, "role must be one of system, .*, is 'users'"),
        ([{"role": "assistant", "tool_calls": ["f"]}], {}, r"calls .* name, is \['f'\]"),
        ("hi", {"suffix": "a", "files": [("a", 1)]}, "files must be a list of pairs"),
        ("hi", {"cancel": 5}, "cancel must be a threading.Event"),
        ("hi", {"on_progress": 5}, "on_progress must be a function"),
    ):
        with pytest.raises(localrt.OptionError, match=says):
            tiny.generate(prompt, max_tokens=2, **options)  # type: ignore[arg-type]
    with tiny.live() as live, pytest.raises(localrt.OptionError, match="leave on_progress out"):
        live.submit("hi", on_progress=print)
    assert tiny.generate(token_ids=np.array([5, 6]), max_tokens=2).text is not None  # type: ignore[arg-type]
    for work, says in (
        (lambda: tiny.generate_batch(5), "prompts must be a list of prompts"),  # type: ignore[arg-type]
        (lambda: tiny.generate_batch(token_ids=5), "token_ids must be a list of lists"),
        (lambda: tiny.live(patience_s="x"), "patience_s must be a number"),  # type: ignore[arg-type]
        (lambda: tiny.chat().send(5), "a message must be a string"),  # type: ignore[arg-type]
        (lambda: tiny.tokenize(5), "a prompt is a string or a list of messages"),  # type: ignore[arg-type]
        (lambda: tiny.detokenize([-1]), "token ids must be from 0 to"),
        (lambda: tiny.chat(tools="x"), "tools must be a list of functions"),  # type: ignore[arg-type]
        (lambda: tiny.chat().add_tool_result(5, 5), "no call 5 waits"),  # type: ignore[arg-type]
        (lambda: tiny.chat().save(5), "path must be a path"),  # type: ignore[arg-type]
        (lambda: tiny.leave_ram(1.5), "nbytes must be an integer"),  # type: ignore[arg-type]
        (lambda: localrt.pull(5), "model must be a string, is 5"),  # type: ignore[arg-type]
        (lambda: localrt.split_thinking(5), "text must be a string"),  # type: ignore[arg-type]
        (lambda: localrt.History(5), "path must be a path"),  # type: ignore[arg-type]
    ):
        with pytest.raises(localrt.OptionError, match=says):
            work()


@pytest.mark.parametrize(
    ("call", "options", "meant"),
    [
        (localrt.load, {"rma": "2GB"}, "ram"),
        (localrt.load, {"n_ctx": 4096}, "ctx"),
        (localrt.load, {"torch_dtype": "auto"}, "format"),
        (localrt.load, {"cache_type_k": "q8_0"}, "kv_format"),
        (localrt.load, {"model_path": "m.gguf"}, "model"),
        (localrt.plan, {"model": "smollm2", "n_ctx": 4096}, "ctx"),
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
