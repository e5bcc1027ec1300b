"""What localrt writes: a table of workloads for campaigns that disturb it.

A workload works in one folder, and yields what it has saved. It can be run again on what an earlier
run left, and then asserts first that what that one has ``said`` is there.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import ROOT
from localrt.common.toml_file import TomlFile
from localrt.documents.index import DocumentIndex
from localrt.history import History
from localrt.hub.resolving import resolve, resolve_adapter
from localrt.offload.kv.block_file import BlockFile
from localrt.offload.store.cached import cached_store
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.states import SavedState
from localrt.quantize.quantize import Recipe, quantize_model
from tests.hub.conftest import TINY, settings_at
from tests.hub.server import FakeHub, start
from tests.kv.test_block_file import SIZE, blocks_of, read
from tests.store.synthetic import SyntheticCheckpoint

Said = Sequence[Any]
_MODELS = ["other", 0], ["model", 1], ["model", 2]  # the last replaces the one before
_ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"lora" * 5000}
_HUB = {"org/tiny": {name: TINY[name][:40_000] for name in TINY}, "org/adapter": _ADAPTER}
_TEXT = "one two three. " * 300  # more than a page of SQLite
_DOCUMENTS = [ROOT / "docs" / name for name in ("glossary.md", "design.md", "planner.md")]


def packing_models(folder: Path, said: Said) -> Iterator[Any]:
    there = [each for each in said if each != _MODELS[1]]
    for number, (name, seed) in enumerate([*there, *_MODELS]):
        source, begun = SyntheticCheckpoint(folder / name, seed=seed), list[str]()
        stores, announce = folder / "data" / "stores", lambda: begun.append(name)  # noqa: B023
        cached_store(source, stores, tiler=tile_tensor, announce=announce).close()
        assert not begun or number >= len(there), f"{name} was packed again"
        yield [name, seed]


def quantizing(folder: Path, said: Said) -> Iterator[Any]:
    out, recipe = folder / "data" / "stores" / "small", Recipe("int4-g32", method="rtn")
    assert out.exists() or not said, "the quantized model is lost"
    if not out.exists():
        quantize_model(SyntheticCheckpoint(folder / "model"), out, recipe, threads=1)
    yield out.name


def pulling_models(folder: Path, said: Said) -> Iterator[Any]:
    hub = FakeHub()
    server = start(hub)
    for number, name in enumerate([*said, *_HUB]):
        hub.add(name, _HUB[name])
        settings = settings_at(folder, hub.endpoint if number >= len(said) else "http://[::1]:9")
        if name == "org/adapter":
            found = resolve_adapter(name, settings=settings)
        else:
            found = resolve(name, settings=settings).path
        for file in found.iterdir():
            assert file.read_bytes() == _HUB[name][file.name], f"{file} is damaged"
        yield name
    server.shutdown()


def chatting(folder: Path, said: Said, id: str | None = None) -> Iterator[Any]:
    with History(folder / "data" / "history.db") as history:
        assert not history.notes, history.notes
        for old, turn, text in said:
            assert history.open(old).turn(turn).content == text, f"turn {turn} is lost"
        chat = history.open(id) if id else history.new(model="tiny")
        for number in range(3):
            asked = chat.add("user", f"{number}? {_TEXT}")
            yield chat.id, asked.id, asked.content
            with chat.answer(after=asked.id) as writer:
                for text in (f"{number} is the first. ", _TEXT, "The end"):
                    writer.write(text)
            yield chat.id, writer.turn, writer.text


def two_windows(folder: Path, said: Said) -> Iterator[Any]:
    id, *_ = next(chatting(folder, said))
    fork = multiprocessing.get_context("fork")
    windows = [fork.Process(target=say, args=(folder, chatting(folder, (), id))) for _ in "ab"]
    for window in windows:
        window.start()
    for window in windows:
        window.join()
    assert [window.exitcode for window in windows] == [0, 0]
    yield from ()


def changing_settings(folder: Path, said: Said) -> Iterator[Any]:
    file = TomlFile(folder / "config" / "preferences.toml")
    value = file.read().get("max_tokens")
    assert not said or value in (said[-1], said[-1] + 1), f"{value} after {said}"
    for number in range(8):
        file.change({"max_tokens": number})
        yield number


def saving_kv_caches(folder: Path, said: Said) -> Iterator[Any]:
    file, tokens = BlockFile(folder / "kv"), list(range(1500))
    got, found = read(file, len(file.tokens))
    assert file.tokens.tolist() == tokens[: len(file.tokens)]
    assert np.array_equal(found[: got // 256], blocks_of(tokens[:got])[: got // 256])
    assert all((state.data == state.length % 256).all() for state in file.states(got))
    assert not said or len(file.tokens) >= said[-1]
    for length in (300, 700, 1500):
        blocks, data = blocks_of(tokens[:length]), np.full(3000, length % 256, np.uint8)
        states = [SavedState(length, length, data)]
        file.write(tokens[:length], "a", SIZE, lambda at, n: blocks[at : at + n], states)  # noqa: B023
        yield length


def indexing_documents(folder: Path, said: Said) -> Iterator[Any]:
    with DocumentIndex(folder / "data" / "documents.db") as index:
        assert all(index.search("localrt", within=path) for path in said), "an index is lost"
        for path in _DOCUMENTS:
            assert not index.update([path])
            yield str(path)


_FIRST = packing_models, quantizing, pulling_models, chatting
_REST = two_windows, changing_settings, saving_kv_caches, indexing_documents
WORKLOADS = {work.__name__.replace("_", " "): work for work in (*_FIRST, *_REST)}


def say(folder: Path, saved: Iterator[Any]) -> None:
    """Have a workload save what it yields, and note that in the file ``said``."""
    for each in saved:
        with (folder / "said").open("a", encoding="utf-8") as file:
            file.write(json.dumps(each) + "\n")
