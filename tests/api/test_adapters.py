"""Adapters of a loaded model: names, sessions, batches, memory, the command line and the server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.cli import main
from localrt.common.errors import MemoryBudgetError, ModelNotFoundError, OptionError
from tests.inside import core_of, engine_of
from tests.server.conftest import needs_kernels, serving

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PROMPT = "Tell me about rivers and the sea."


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two of the tiny model: random ones in PEFT's layout, of the queries and the values."""
    from safetensors.numpy import save_file

    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
    found = {}
    for seed, name in enumerate(("first", "second")):
        folder, draw = tmp_path_factory.mktemp(name), np.random.default_rng(seed)
        tensors = {}
        for layer in range(2):
            for matrix, rows in (("q_proj", 64), ("v_proj", 32)):
                at = f"base_model.model.model.layers.{layer}.self_attn.{matrix}"
                for part, shape in (("A", (8, 64)), ("B", (rows, 8))):
                    values = draw.normal(scale=0.06, size=shape).astype(np.float32)
                    tensors[f"{at}.lora_{part}.weight"] = values
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return found


@pytest.fixture
def model(tiny_folder: Path, adapters: dict[str, str]) -> Iterator[localrt.Model]:
    with localrt.load(tiny_folder, adapters=adapters, draft="off") as loaded:
        yield loaded


def test_names_choose(model: localrt.Model, tiny: localrt.Model) -> None:
    assert model.adapters == ("first", "second")
    said = {
        name: model.generate(PROMPT, adapter=name, **GREEDY).token_ids
        for name in (None, "first", "second")
    }
    assert len(set(said.values())) == 3
    assert model.generate(PROMPT, adapter="none", **GREEDY).token_ids == said[None]
    one = model.generate(PROMPT, adapter={"first": 1.0, "second": 0}, **GREEDY).token_ids
    assert one == said["first"]
    with pytest.raises(OptionError, match="no adapter 'third': known: first, second"):
        model.generate(PROMPT, adapter="third", **GREEDY)
    with pytest.raises(OptionError, match="none is loaded"):
        tiny.generate(PROMPT, adapter="first", **GREEDY)


def test_cache_per_adapter(model: localrt.Model) -> None:
    """Of single answers, and of a conversation that changes its adapter."""
    first = model.generate(PROMPT, adapter="first", **GREEDY)
    assert model.generate(PROMPT, **GREEDY).metrics.cached_tokens == 0
    again = model.generate(PROMPT, adapter="first", **GREEDY)
    assert again.metrics.cached_tokens > 0
    assert again.token_ids == first.token_ids
    changing, fresh = (model.chat(adapter=name, **GREEDY) for name in ("first", "second"))
    changing.send("hi")
    changing.clear()
    answer = changing.send("hi", adapter="second")
    assert answer.metrics.cached_tokens == 0
    assert answer.token_ids == fresh.send("hi").token_ids


def test_adapters_come_and_go(model: localrt.Model, adapters: dict[str, str]) -> None:
    want = model.generate(PROMPT, adapter="first", **GREEDY).token_ids
    model.remove_adapter("first")
    with pytest.raises(OptionError, match="no adapter 'first'"):
        model.generate(PROMPT, adapter="first", **GREEDY)
    with pytest.raises(OptionError, match="already"):
        model.add_adapter("second", adapters["first"])
    model.add_adapter("third", adapters["first"])
    assert model.adapters == ("second", "third")
    assert model.generate(PROMPT, adapter="third", **GREEDY).token_ids == want
    with pytest.raises(ModelNotFoundError, match="no such adapter"):
        model.add_adapter("x", "./nowhere")


def test_removed_adapter_ends_answer(model: localrt.Model) -> None:
    chunks = model.stream(PROMPT, adapter="first", **(GREEDY | {"max_tokens": 32}))
    next(chunks)
    model.remove_adapter("first")
    with pytest.raises(OptionError, match="adapter was removed"):
        list(chunks)
    assert model.generate(PROMPT, adapter="second", **GREEDY).token_ids


@needs_kernels
def test_batch_of_adapters(model: localrt.Model) -> None:
    chosen = [None, "first", "second", "first"]
    alone = [model.generate(PROMPT, adapter=name, **GREEDY).token_ids for name in chosen]
    for draft in ("off", "ngram"):
        with model.live() as live:
            answers = [live.submit(PROMPT, adapter=n, draft=draft, **GREEDY) for n in chosen]
            said = [tuple(t for chunk in answer for t in chunk.token_ids) for answer in answers]
        assert said == alone


@needs_kernels
def test_the_adapter_that_was_idle_longest_leaves(
    model: localrt.Model, adapters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, room = engine_of(model), [0]
    third = Path(shutil.copytree(adapters["first"], tmp_path / "third"))
    file = third / "adapter_config.json"
    file.write_text(file.read_text().replace("64", "32"))
    for name in ("second", "first"):
        model.generate(PROMPT, adapter=name, **GREEDY)
    core_of(model).free_idle()

    def take(nbytes: int) -> None:
        if nbytes > room[0]:
            raise MemoryBudgetError("there is no room")
        room[0] -= nbytes

    monkeypatch.setattr(engine, "take_ram", take)
    model.add_adapter("third", third)
    model.remove_adapter("third")
    room[0] = -(1 << 40)  # what is loaded now is all there is
    model.generate(PROMPT, adapter="first", **GREEDY)
    with pytest.raises(MemoryBudgetError):
        model.generate(PROMPT, adapter="second", **GREEDY)


@needs_kernels
def test_adapters_on_server(model: localrt.Model) -> None:
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with serving(model, name="tiny") as server:
        _, listed, _ = server.request("GET", "/v1/models")
        assert [one["id"] for one in listed["data"]] == ["tiny", "first", "second"]
        assert listed["data"][1]["parent"] == "tiny"
        _, one, _ = server.request("GET", "/v1/models/second")
        assert one["id"] == "second"
        asked = {"tiny": None, "first": "first", "second": "second", None: None, "third": None}
        for name, adapter in asked.items():  # an unknown name means the model without adapters
            status, answer, _ = server.chat(PROMPT, model=name, **fields)
            assert status == 200
            assert answer["model"] == (name or "tiny")
            want = model.generate(PROMPT, adapter=adapter, **GREEDY).text
            assert answer["choices"][0]["message"]["content"] == want


@needs_kernels
def test_quantize_with_adapter(tiny_folder: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "merged"
    command = ["quantize", str(tiny_folder), "--adapter", adapters["first"], "--out", str(out)]
    assert main([*command, "--format", "bf16"]) == 0
    with (
        localrt.load(tiny_folder, format="f32", adapters=adapters) as one,
        localrt.load(out, format="f32") as other,
    ):
        ids = one.tokenize(PROMPT)
        want = np.concatenate(list(one.logits(ids, adapter="first")))
        found = np.concatenate(list(other.logits(ids)))
    assert np.abs(found - want).max() / np.abs(want).max() < 0.03
