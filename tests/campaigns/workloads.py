"""What localrt does with files: two tables of workloads, for ``storage``.

A workload reads and writes in one folder. It prints what it found, and yields what it has saved.
Run again on what an earlier run left, it first asserts that what that one has ``said`` is there.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import localrt
from benchmarks.common.command import ROOT
from localrt.cli import main
from localrt.common.files import is_there, read_bytes
from localrt.common.processes import has_helpers
from localrt.documents.index import DocumentIndex
from localrt.engine.saved_caches import PromptCache
from localrt.history import History
from localrt.hub.resolving import resolve, resolve_adapter
from localrt.models import first_opening
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.kv.cache import KvTier
from localrt.offload.kv.saved import BlockFile
from localrt.offload.store import pack_store
from localrt.offload.store.pack import cached_store
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.states import SavedState
from localrt.quantize.quantize import Recipe, quantize_model
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from localrt.tui.preferences import PreferencesFile
from tests.conftest import write_tiny_model
from tests.hub.conftest import TINY, settings_at
from tests.hub.server import FakeHub, start
from tests.inside import engine_of
from tests.kv.test_block_file import SIZE, blocks_of, read
from tests.offload.placed import Model, extend
from tests.server.conftest import serving
from tests.store.synthetic import SyntheticCheckpoint

Said: TypeAlias = Sequence[Any]
Workload: TypeAlias = Callable[[Path, Said], "Iterator[Any] | None"]
_MODELS = ["other", 0], ["model", 1], ["model", 2]  # the last replaces the one before
_ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"lora" * 5000}
_HUB = {"org/tiny": {name: TINY[name][:40_000] for name in TINY}, "org/adapter": _ADAPTER}
_TEXT = "one two three. " * 300  # more than a page of SQLite
_DOCUMENTS = [ROOT / "docs" / name for name in ("glossary.md", "design.md", "planner.md")]
_TOKENS = [*range(3, 250), *range(3, 200)]

# -- workloads on what lies in the folder, or beside it --------------------------------------------


def prepare(at: Path) -> None:
    """Make a ``model``, its packed form, which is the ``store``, and ``texts``."""
    (at / "model").mkdir()
    with closing(open_checkpoint(write_tiny_model(at / "model"))) as source:
        pack_store(source, at / "store")
    (at / "texts").mkdir()
    for number in range(3):
        (at / "texts" / f"{number}.txt").write_text(f"straw {number}\n" * 50 + "localrt\n")


def end_faults() -> None:
    """Called by a workload that goes on once its disk is well; a campaign puts its own here."""


def _command(*words: object) -> None:
    if status := main([*map(str, words)]):
        raise SystemExit(status)


def _run(model: object) -> None:
    _command("run", model, "Hi", "--raw", "--max-tokens", 6, "--temperature", 0)


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


def packed(at: Path, said: Said) -> None:
    with closing(open_checkpoint(at / "model")) as source:
        folder = cached_store(source, at / "data" / "stores").path
    print(answer_of(folder))


def quantized(at: Path, said: Said) -> None:
    if not is_there(made := at / "small"):
        with redirect_stdout(io.StringIO()):
            _command("quantize", at / "model", "--format", "int8-g32", "--out", made)
    print(answer_of(made))


def kept_caches(at: Path, said: Said) -> None:
    with localrt.load(at.parent / "model") as model:
        session, other = (engine_of(model).session(512) for _ in range(2))
        session.extend(_TOKENS)
        cache = PromptCache(at / "kv" / "a", limit=1 << 30)
        cache.save(session)
        held = cache.restore(other, [*_TOKENS, 5])
        print(hashlib.sha256(other.extend([*_TOKENS, 5][held:]).tobytes()).hexdigest())


def caches_on_disk(at: Path, said: Said) -> None:
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


def pulled(at: Path, said: Said) -> None:
    hub = FakeHub()
    hub.add("org/tiny", {path.name: path.read_bytes() for path in (at.parent / "model").iterdir()})
    server = start(hub)
    server.handle_error = lambda *_: None  # clients that end
    os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(at / "hf")}
    with redirect_stdout(io.StringIO()):
        _command("pull", "org/tiny")
    server.shutdown()
    _run("org/tiny")


def served(at: Path, said: Said) -> None:
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


# -- workloads that save ---------------------------------------------------------------------------


def packing_models(at: Path, said: Said) -> Iterator[Any]:
    there = [each for each in said if each != _MODELS[1]]
    for number, (name, seed) in enumerate([*there, *_MODELS]):
        source, begun = SyntheticCheckpoint(at / name, seed=seed), list[str]()
        stores, announce = at / "data" / "stores", lambda: begun.append(name)  # noqa: B023
        cached_store(source, stores, tiler=tile_tensor, announce=announce).close()
        assert not begun or number >= len(there), f"{name} was packed again"
        yield [name, seed]


def quantizing(at: Path, said: Said) -> Iterator[Any]:
    out, recipe = at / "data" / "stores" / "small", Recipe("int4-g32", method="rtn")
    assert out.exists() or not said, "the quantized model is lost"
    if not out.exists():
        quantize_model(SyntheticCheckpoint(at / "model"), out, recipe, threads=1)
    yield out.name


def pulling_models(at: Path, said: Said) -> Iterator[Any]:
    first_opening.has_helpers = has_helpers  # in this process: the tests' conftest has none
    hub = FakeHub()
    server = start(hub)
    for number, name in enumerate([*said, *_HUB]):
        hub.add(name, _HUB[name])
        settings = settings_at(at, hub.endpoint if number >= len(said) else "http://[::1]:9")
        if name == "org/adapter":
            found = resolve_adapter(name, settings=settings)
        else:
            found = resolve(name, settings=settings).path
        for file in found.iterdir():
            assert file.read_bytes() == _HUB[name][file.name], f"{file} is damaged"
        yield name
    server.shutdown()


def chatting(
    at: Path, said: Said, id: str | None = None, *, sentences: bool = False
) -> Iterator[Any]:
    with History(at / "data" / "history.db") as history:
        assert not history.notes, history.notes
        for old, turn, text in said:
            content = history.open(old).turn(turn).content
            assert content == text or (sentences and text in content), f"turn {turn} is lost"
        chat = history.open(id) if id else history.new(model="tiny")
        for number in range(3):
            asked = chat.add("user", f"{number}? {_TEXT}")
            yield chat.id, asked.id, asked.content
            with chat.answer(after=asked.id) as writer:
                for text in (f"{number} is the first. ", _TEXT, "The end"):
                    writer.write(text)
                    if sentences and text.endswith(". ") and not writer.problem:
                        yield chat.id, writer.turn, text
            yield chat.id, writer.turn, writer.text


def two_windows(at: Path, said: Said) -> Iterator[Any]:
    id, *_ = next(chatting(at, said))
    fork = multiprocessing.get_context("fork")
    windows = [fork.Process(target=note, args=(at, chatting(at, (), id))) for _ in "ab"]
    for window in windows:
        window.start()
    for window in windows:
        window.join()
    assert [window.exitcode for window in windows] == [0, 0]
    yield from ()


def changing_settings(at: Path, said: Said) -> Iterator[Any]:
    file = PreferencesFile(at / "config")
    value = file.load().options.get("max_tokens")
    assert not said or value in (said[-1], said[-1] + 1), f"{value} after {said}"
    for number in range(1, 9):
        file.remember_options({"max_tokens": number})
        yield number
    options = file.load().options
    print("left out" if file.notes else options)


def check_kv_cache(at: Path) -> int:
    """How many tokens are saved; what is read of them is as ``saving_kv_caches`` wrote it."""
    file = BlockFile(at / "kv")
    tokens = list(range(len(file.tokens)))
    got, found = read(file, len(tokens))
    assert file.tokens.tolist() == tokens
    assert np.array_equal(found[: -(-got // 256)], blocks_of(tokens[:got]))
    assert all((state.data == state.length % 256).all() for state in file.states(got))
    return len(tokens)


def saving_kv_caches(at: Path, said: Said) -> Iterator[Any]:
    assert check_kv_cache(at) >= (said[-1] if said else 0)
    file = BlockFile(at / "kv")
    for length in (300, 700, 1500):
        tokens, data = list(range(length)), np.full(3000, length % 256, np.uint8)
        blocks, states = blocks_of(tokens), [SavedState(length, length, data)]
        file.write(tokens, "a", SIZE, lambda at, n: blocks[at : at + n], states)  # noqa: B023
        yield length


def indexing_documents(
    at: Path, said: Said, names: Sequence[str | Path] = _DOCUMENTS
) -> Iterator[Any]:
    with DocumentIndex(at / "data" / "documents.db") as index:
        assert all(index.search("localrt", within=path) for path in said), "an index is lost"
        for name in names:
            print("left out" if index.update([at / name]) else "")
            yield str(at / name)
        print(sorted(piece.path.name for piece in index.search("localrt")))


POWERLOSS: dict[str, Workload] = {
    "packing models": packing_models,
    "quantizing": quantizing,
    "pulling models": pulling_models,
    "chatting": chatting,
    "two windows": two_windows,
    "changing settings": changing_settings,
    "saving kv caches": saving_kv_caches,
    "indexing documents": indexing_documents,
}
"""In an empty folder."""
DISK: dict[str, Workload] = {
    "resident": lambda at, said: _run(at / "model"),
    "streamed": lambda at, said: print(answer_of(at / "store")),
    "packed": packed,
    "quantized": quantized,
    "kept caches": kept_caches,
    "caches on disk": caches_on_disk,
    "pulled": pulled,
    "served": served,
    "chatting": partial(chatting, sentences=True),
    "changing settings": changing_settings,
    "indexing documents": lambda at, said: indexing_documents(at, (), ["texts"]),
}
"""In a folder that was prepared, beside a sound one."""

# -- a process of a workload -----------------------------------------------------------------------


def preloaded(folder: Path, library: Path, **files: Path) -> dict[str, str]:
    """The environment of a process whose calls below ``folder`` pass through ``file_calls.cpp``,
    with its ``control`` or its ``log``.
    """
    source = Path(__file__).with_name("file_calls.cpp")
    flags = ("-std=c++17", "-O2", "-Wall", "-shared", "-fPIC")
    subprocess.run(["g++", *flags, source, "-o", library, "-ldl"], check=True)
    given = {f"LOCALRT_FILES_{name.upper()}": f"{path}" for name, path in files.items()}
    return {**os.environ, **given, "LD_PRELOAD": f"{library}", "LOCALRT_FILES": f"{folder}"}


class Attempt(NamedTuple):
    """How a workload ended: an exit status, None if it took too long; what it printed and saved."""

    status: int | None
    out: str
    err: str
    said: list[Any]


def attempt(workload: Workload, at: Path, said: Said = (), seconds: float = 120) -> Attempt:
    """Run a workload in a process of its own, at most so long."""
    out, err, saved = (at.with_name(name) for name in ("out", "err", "said"))
    saved.write_bytes(b"")
    sys.stdout.flush()
    if not (process := os.fork()):
        os.setsid()
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR), number)
        os._exit(_status(workload, at, said))
    ends = os.pidfd_open(process)
    ended = bool(select.select([ends], [], [], seconds)[0])
    os.close(ends)
    os.kill(process, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it has no group yet
        os.killpg(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    texts = [path.read_text("utf-8", "replace") for path in (out, err)]
    lines = saved.read_text("utf-8").splitlines()
    return Attempt(status if ended else None, *texts, [json.loads(line) for line in lines])


def _status(workload: Workload, at: Path, said: Said) -> int:
    """Run it, and return an exit status, as a command does."""
    try:
        note(at, workload(at, said) or ())
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except localrt.LocalrtError as error:
        print(f"localrt: {error}", file=sys.stderr)
        status = 1
    except BaseException:  # noqa: BLE001 - it is told
        traceback.print_exc()
        status = 3
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def note(at: Path, saved: Iterable[Any]) -> None:
    """Have a workload save what it yields, and note that in the file ``said`` beside the folder."""
    for each in saved:
        with at.with_name("said").open("a", encoding="utf-8") as file:
            file.write(json.dumps(each) + "\n")
