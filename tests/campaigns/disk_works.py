"""What is done on a disk: each work reads and writes in a folder, prints what it found, or raises.

The folder has a ``model``, its packed form in ``store``, ``texts`` and a folder ``kv``; a sound
``model`` and ``store`` lie beside it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import TypeAlias

import numpy as np

import localrt
from localrt.cli import main
from localrt.common.files import read_bytes
from localrt.documents.index import DocumentIndex
from localrt.engine.saved_caches import PromptCache
from localrt.history.history import History
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.kv.tier import KvTier
from localrt.offload.store import pack_store
from localrt.offload.store.cached import cached_store
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from localrt.tui.preferences import PreferencesFile
from tests.conftest import write_tiny_model
from tests.hub.server import FakeHub, start
from tests.inside import engine_of
from tests.offload.placed import Model, extend
from tests.server.conftest import serving

Work: TypeAlias = Callable[[Path], "int | None"]
_TOKENS = [*range(3, 250), *range(3, 200)]


def end_faults() -> None:
    """Called by a work that goes on once its disk is well again; a campaign puts its own here."""


def prepare(at: Path) -> None:
    """Make a model, its packed form, and texts."""
    (at / "model").mkdir()
    with closing(open_checkpoint(write_tiny_model(at / "model"))) as source:
        pack_store(source, at / "store")
    (at / "texts").mkdir()
    for number in range(3):
        (at / "texts" / f"{number}.txt").write_text(f"straw {number}\n" * 50 + "the needle\n")


def _quietly(*words: object) -> int:
    with redirect_stdout(io.StringIO()):
        return main([*map(str, words)])


def answer_of(store: Path) -> str:
    """A digest of the answers of a streamed store, and of its tokenizer."""
    with closing(Model(store)) as model:
        units = [unit.name for unit in model.store.manifest.units if unit.name != "norm"]
        with model.placed(units, mend=None) as decoder:
            cache = decoder.cache(100)
            answers = [extend(decoder, cache, part) for part in ([5, 70, 9, 200], [7], [130])]
        digest = hashlib.sha256(np.concatenate(answers).tobytes())
        digest.update(read_bytes(store / "tokenizer.json"))
    return digest.hexdigest()


def resident(at: Path) -> int:
    return main(["run", f"{at}/model", "Hi", "--raw", "--max-tokens", "6", "--temperature", "0"])


def streamed(at: Path) -> None:
    print(answer_of(at / "store"))


def packed(at: Path) -> None:
    with closing(open_checkpoint(at / "model")) as source:
        folder = cached_store(source, at / "data" / "stores").path
    print(answer_of(folder))


def quantized(at: Path) -> int:
    made = at / "small"
    command = ("quantize", at / "model", "--format", "int8-g32", "--out", made)
    if status := 0 if made.exists() else _quietly(*command):
        return status
    print(answer_of(made))
    return 0


def kept_caches(at: Path) -> None:
    with localrt.load(at.parent / "model") as model:
        session, other = (engine_of(model).session(512) for _ in range(2))
        session.extend(_TOKENS)
        cache = PromptCache(at / "kv" / "a", limit=1 << 30)
        cache.save(session)
        held = cache.restore(other, [*_TOKENS, 5])
        print(hashlib.sha256(other.extend([*_TOKENS, 5][held:]).tobytes()).hexdigest())


def caches_on_disk(at: Path) -> None:
    with closing(Model(at.parent / "store")) as model:
        specs = model.config.attention
        places = ["ssd"] * len(specs)
        tier = KvTier(specs, places, at / "kv", capacity=512, kv_format="bf16", slots=1)
        with closing(tier):
            model.ops.kv_maker = tier
            cache = model.resident.cache(512)
            parts = (_TOKENS[:300], [7], _TOKENS[300:])
            answers = [extend(model.resident, cache, part) for part in parts]
    print(hashlib.sha256(np.concatenate(answers).tobytes()).hexdigest())


def conversations(at: Path) -> None:
    kept = at.parent / "acknowledged"
    with History(at / "data" / "history.db") as history, kept.open("a+") as acknowledged:
        assert not history.notes, history.notes
        turns = [turn for info in history.list() for turn in history.open(info.id).turns]
        acknowledged.seek(0)
        for line in acknowledged.read().splitlines():
            assert any(line in turn.content for turn in turns), line
        talk = history.new(model="m")
        for number in range(3):
            talk.add("user", f"question {number}")
            with talk.answer() as writer:
                for sentence in (f"Sentence {number}. ", f"Another {number}. "):
                    writer.write(sentence)
                    print("" if writer.problem else sentence, file=acknowledged, flush=True)
    print("kept")


def settings(at: Path) -> None:
    file = PreferencesFile(at / "config")
    file.remember_options({"temperature": 0.5})
    file.remember_options({"temperature": 0.25, "max_tokens": 7})
    options = file.load().options
    print("left out" if file.notes else options)


def pulled(at: Path) -> int:
    hub = FakeHub()
    hub.add("org/tiny", {path.name: path.read_bytes() for path in (at.parent / "model").iterdir()})
    server = start(hub)
    server.handle_error = lambda *_: None  # clients that end
    os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(at / "hf")}
    if status := _quietly("pull", "org/tiny"):
        return status
    server.shutdown()
    return main(["run", "org/tiny", "Hi", "--raw", "--max-tokens", "6", "--temperature", "0"])


def served(at: Path) -> None:
    """Two models, of which one is in the folder: the other answers, and this one afterwards."""
    folders = {"good": at.parent / "model", "bad": at / "model"}
    files = [LocalFile(name, name, 1 << 20) for name in folders]
    pool = ModelPool(
        lambda name, *_: localrt.load(folders[name], ctx=512), lambda: files, ServeOptions()
    )
    with serving(pool, history=at / "data" / "history.db") as running:
        for number, name in enumerate(("good", "bad", "good", "bad")):
            if number == 3:
                end_faults()
            status, body, _ = running.chat(model=name, max_tokens=4, temperature=0)
            assert status == 200 or (name == "bad" and body["error"]["message"]), (status, body)
        assert status == 200, body
        print(body["choices"][0]["message"])


def documents(at: Path) -> None:
    with closing(DocumentIndex(at / "data.db")) as index:
        left_out = index.update([at / "texts"])
        found = sorted(piece.path.name for piece in index.search("needle"))
    print("left out" if left_out else found)


WORKLOADS: tuple[Work, ...] = (
    *(resident, streamed, packed, quantized, kept_caches, caches_on_disk, conversations),
    *(settings, pulled, served, documents),
)
