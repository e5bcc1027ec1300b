"""KV caches on the disk: a restored session is the session, bit for bit; others are left alone."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import StorageError
from localrt.common.settings import Settings
from localrt.engine import saved_caches
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import EngineSession
from localrt.engine.saved_caches import NOBODY, Owner, PromptCache, forget, model_key
from localrt.loading.context import LoadContext
from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions
from localrt.offload.kv.saved import BlockFile
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.service.core import prompt_cache
from tests.conftest import needs_kernels
from tests.models.tiny import save_tiny, tokens

KINDS = [
    pytest.param("gemma4", {}, id="shared"),
    pytest.param("qwen3.5", {}, id="states"),
    pytest.param("qwen2", {"kv_format": "int4"}, id="int4", marks=needs_kernels),
    pytest.param("granite-hybrid", {"format": "f32"}, id="torch", marks=pytest.mark.slow),
]


def engine_of(folder: Path, name: str, **options: object) -> NativeEngine:
    folder.mkdir(exist_ok=True)
    if not any(folder.iterdir()):
        save_tiny(name, folder)
    parts = load_model(folder, LoadOptions(ctx=2048, **options))  # type: ignore[arg-type]
    assert isinstance(parts.engine, NativeEngine)
    return parts.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    return engine_of(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    return engine_of(tmp_path_factory.mktemp("recurrent"), "qwen3.5")


def filled(engine: NativeEngine, ids: Sequence[int]) -> EngineSession:
    session = engine.session(2048)
    session.extend(ids)
    return session


def cache_in(tmp_path: Path, limit: int = 1 << 30, name: str = "a") -> PromptCache:
    return PromptCache(tmp_path / "kv" / name, limit=limit)


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize(("name", "options"), KINDS)
def test_restore(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    engine = engine_of(tmp_path / "model", name, **options)
    ids = [int(t) for t in tokens(700)]
    session = filled(engine, ids)
    assert cache_in(tmp_path).save(session) > 0
    other = engine.session(2048)
    assert cache_in(tmp_path).restore(other, [*ids, 5]) == 700
    assert list(other.tokens) == ids
    for token in (5, 6, 7):
        assert np.array_equal(session.extend([token]), other.extend([token]).copy())


def test_one_file(tmp_path: Path, engine: NativeEngine) -> None:
    ids = [int(t) for t in tokens(900)]
    cache = cache_in(tmp_path)
    session = filled(engine, ids[:300])
    cache.save(session)
    session.extend(ids[300:])
    cache.save(session)
    assert len(list(cache.folder.iterdir())) == 1
    session.trim(200)
    cache.save(session)  # holds less: nothing to do
    other = engine.session(2048)
    assert cache.restore(other, ids) == 900
    longer = filled(engine, ids[:890])
    assert cache.restore(longer, ids) == 0  # it holds more already
    assert len(longer.tokens) == 890
    shutil.rmtree(cache.folder)
    assert cache.restore(engine.session(2048), ids) == 0


def test_states(tmp_path: Path, recurrent: NativeEngine) -> None:
    """To where one was kept; a damaged one is as good as none."""
    engine = recurrent
    ids = [int(t) for t in tokens(700)]
    cache = cache_in(tmp_path)
    cache.save(filled(engine, ids))
    other = engine.session(2048)
    assert cache.restore(other, [*ids[:600], *([3] * 100)]) == 512
    want = filled(engine, ids[:513]).extend([7]).copy()
    other.extend(ids[512:513])
    assert np.array_equal(other.extend([7]), want)
    for state in cache.folder.rglob("state-512.bin"):
        state.write_bytes(bytes(state.stat().st_size))
    again = cache_in(tmp_path)
    other = engine.session(2048)
    assert again.restore(other, [*ids[:600], *([3] * 100)]) == 0
    assert not other.tokens


def test_damage(tmp_path: Path, engine: NativeEngine) -> None:
    ids = [int(t) for t in tokens(700)]
    cache = cache_in(tmp_path)
    cache.save(filled(engine, ids))
    (data,) = cache.folder.glob("*/blocks.bin")
    content = bytearray(data.read_bytes())
    content[len(content) * 2 // 3] ^= 255
    data.write_bytes(content)
    other = engine.session(2048)
    assert cache.restore(other, ids) == 512
    assert np.array_equal(other.extend(ids[512:]).copy(), filled(engine, ids[:-1]).extend(ids[-1:]))
    assert not list(cache.folder.iterdir())


def test_full_folder(tmp_path: Path, engine: NativeEngine) -> None:
    sequences = [[(n * 7 + i) % 50 for i in range(300)] for n in range(4)]
    size = cache_in(tmp_path).save(filled(engine, sequences[0]))
    cache = cache_in(tmp_path, limit=int(size * 3.5), name="b")  # limits are for all models
    for age, ids in enumerate(sequences[1:]):
        cache.save(filled(engine, ids))
        for path in tmp_path.glob("kv/*/*/tokens.json"):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100 + age))
    assert not list((tmp_path / "kv" / "a").iterdir())
    found = [cache.restore(engine.session(2048), ids) for ids in sequences]
    assert found == [0, 300, 300, 300]


@needs_kernels
def test_other_model(tmp_path: Path, engine: NativeEngine, recurrent: NativeEngine) -> None:
    """Another format, and where a folder was copied: the key of a folder tells models apart."""
    ids = [int(t) for t in tokens(300)]
    cache_in(tmp_path).save(filled(engine, ids))
    narrow = engine_of(tmp_path / "model", "llama", kv_format="int8")
    for other in (narrow, recurrent):
        session = other.session(2048)
        assert cache_in(tmp_path).restore(session, ids) == 0
        assert not session.tokens
    assert cache_in(tmp_path).restore(engine.session(2048), ids) == 300
    keys = {model_key(*facts) for facts in (("a", "q4"), ("a", "q8"), ("b", "q4"), ("a q4",))}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("name", "changed", "copied"),
    [
        ("model.safetensors", lambda data: data[:-3000] + b"!" + data[-2999:], False),
        ("config.json", lambda data: data.replace(b'eps": 1e-06', b'eps": 3e-06'), False),
        ("tokenizer.json", lambda data: b"{ }", True),
    ],
)
def test_same_name_size_and_time(
    tmp_path: Path, name: str, changed: Callable[[bytes], bytes], copied: bool
) -> None:
    """What one model computed is never taken for another's."""
    model = tmp_path / "one" / "model"
    model.mkdir(parents=True)
    save_tiny("llama", model)
    (model / "tokenizer.json").write_text("{}\n")
    settings = Settings.from_environment({"LOCALRT_CACHE": str(tmp_path / "cache")})
    ids = [int(t) for t in tokens(300)]

    def cached_tokens(path: Path) -> int:
        parts = load_model(path, LoadOptions(ctx=2048), LoadContext(settings=settings))
        prompts = prompt_cache(parts, settings)
        assert prompts is not None
        session = parts.engine.session(2048)
        got = prompts.restore(session, ids)
        if got < len(ids):
            session.extend(ids[got:])
            prompts.save(session)
        return got

    assert cached_tokens(model) == 0
    assert cached_tokens(model) == 300
    times = {file: file.stat() for file in model.iterdir()}
    if copied:
        model = Path(shutil.copytree(model, tmp_path / "two" / "model"))
    before = (model / name).read_bytes()
    (model / name).write_bytes(changed(before))
    assert (model / name).read_bytes() != before
    for file, status in times.items():
        os.utime(model / file.name, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (model / file.name).stat().st_size == status.st_size
    assert cached_tokens(model) == 0


@given(
    steps=st.lists(st.tuples(st.sampled_from(["hold", "restore"]), st.integers(0, 5)), max_size=16),
    budgets=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_copies_within_a_budget(
    steps: list[tuple[str, int]], budgets: list[int], engine: NativeEngine
) -> None:
    """What left its device first leaves RAM first, only what does not fit leaves, and never is more
    taken than there is. The budget, in blocks, changes meanwhile.
    """
    texts = [[3 + number, *tokens(200 + 130 * number)[1:]] for number in range(6)]
    sizes = [-(-len(text) // BLOCK_TOKENS) for text in texts]
    taken, expected, now = 0, list[int](), 0
    block = filled(engine, texts[0]).nbytes

    def take(nbytes: int) -> None:
        nonlocal taken
        taken += nbytes
        assert nbytes < 0 or taken <= now * block

    cache = PromptCache(Path(), limit=0, room=lambda: now * block - taken, take=take)
    for step, (what, number) in enumerate(steps):
        now = budgets[step % len(budgets)]
        if what == "hold" and number not in expected:
            fits = sizes[number] <= now
            assert bool(cache.hold(filled(engine, texts[number]))) is fits
            while fits and sum(sizes[n] for n in [*expected, number]) > now:
                expected.pop(0)
            expected += [number] * fits
        elif what == "restore":
            session = engine.session(2048)
            restored = cache.restore(session, texts[number])
            while sum(sizes[n] for n in expected) > now:  # others need the memory
                expected.pop(0)
            assert restored == (len(texts[number]) if number in expected else 0)
            expected = [n for n in expected if n != number]
        assert taken == cache.ram_nbytes == sum(sizes[n] for n in expected) * block


def test_no_disk_on_a_gpu(
    engine: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM may be used all the same, and is counted."""
    parts: Any = SimpleNamespace(engine=engine, fingerprint="the model's files")
    names = {"LOCALRT_CACHE": str(tmp_path / "cache"), "LOCALRT_KV_DISK": "off"}
    off = Settings.from_environment(names)
    assert prompt_cache(parts, off) is None  # caches are in RAM
    monkeypatch.setattr(engine, "free_memory", lambda: 0)
    counted = list[int]()
    monkeypatch.setattr(engine, "take_ram", counted.append)
    cache, ids = prompt_cache(parts, off), tokens(300)
    assert cache is not None
    nbytes = cache.hold(filled(engine, ids))
    assert cache.restore(engine.session(2048), ids) == 300
    cache.hold(filled(engine, ids))
    assert cache.settle() == nbytes > 0
    assert counted == [nbytes, -nbytes] * 2
    assert cache.restore(engine.session(2048), ids) == 0
    assert not (tmp_path / "cache").exists()


def test_full_disk(engine: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk does not take leaves RAM all the same, for others."""

    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(BlockFile, "write", full)
    one, other = tokens(300), tokens(300, seed=1)
    room = filled(engine, one).nbytes
    taken = [0]
    cache = PromptCache(
        tmp_path / "kv" / "a",
        limit=1 << 30,
        room=lambda: room - taken[0],
        take=lambda nbytes: taken.__setitem__(0, taken[0] + nbytes),
    )
    assert cache.hold(filled(engine, one)) == cache.hold(filled(engine, other)) == room
    assert cache.restore(engine.session(2048), one) == 0
    with pytest.raises(StorageError, match="disk is full"):
        cache.settle()
    assert cache.restore(engine.session(2048), other) == 300
    assert taken == [0]


@pytest.mark.parametrize("way", ["save", "settle"])
@pytest.mark.parametrize("exists", [[False], [True, False], [True, True]])
def test_a_deleted_conversation_is_not_saved(
    tmp_path: Path, engine: NativeEngine, way: str, exists: list[bool]
) -> None:
    """Whether another process deleted it before or while it was saved."""
    ids = [int(t) for t in tokens(700)]
    cache, owner = cache_in(tmp_path), Owner(frozenset("m"), iter(exists).__next__)
    if way == "save":
        saved = cache.save(filled(engine, ids), owner) > 0
    else:
        cache.hold(filled(engine, ids), owner)
        cache.settle()
        saved = any(path.is_file() for path in cache.folder.rglob("*"))
    assert saved == all(exists)
    assert any(path.is_file() for path in cache.folder.rglob("*")) == saved
    assert (cache_in(tmp_path).restore(engine.session(2048), ids) == 700) == saved


# -- what was deleted ------------------------------------------------------------------------------

MARKED = Owner(frozenset({"deleted", "kept"}))
OTHER = Owner(frozenset({"other"}))
DELETED = frozenset({"deleted"})


class Case:
    """A conversation's session, its cache in RAM or on the disk, and a folder that others share."""

    def __init__(self, folder: Path, engine: NativeEngine, owner: Owner = MARKED) -> None:
        self.folder, self.engine, self.owner, self.room = folder, engine, owner, 1 << 40
        self.cache = PromptCache(folder / "a", limit=1 << 30, room=lambda: self.room)
        self.ids = [int(t) for t in tokens(700)]
        folder.mkdir(exist_ok=True)
        self.begin()

    def begin(self) -> None:
        """A request with the conversation's words."""
        self.session = self.engine.session(2048)
        self.session.known = self.cache.log
        got = self.cache.restore(self.session, self.ids)
        if got < len(self.ids):
            self.session.extend(self.ids[got:])

    def save(self) -> None:
        self.cache.save(self.session, self.owner)

    def hold(self) -> None:
        assert self.cache.hold(self.session, self.owner)

    def settle(self) -> None:
        self.cache.settle()

    def settle_own(self) -> None:
        self.cache.settle(self.owner)

    def press(self) -> None:
        """Other programs need the RAM."""
        self.room = -1
        self.cache.restore(self.engine.session(2048), [7] * 99)
        self.room = 1 << 40

    def go_on(self) -> None:
        """Save it, and continue it with a message that the file lacks."""
        self.save()
        self.begin()
        self.ids += [int(t) for t in tokens(300, seed=5)]
        self.session.extend(self.ids[-300:])

    def forget(
        self, marks: frozenset[str] = DELETED, since: float = 0.0, *, here: bool = True
    ) -> None:
        """Not ``here``: another process does, which does not reach this one's memory."""
        with pytest.MonkeyPatch.context() as patch:
            if not here:
                patch.setattr(saved_caches, "IDLE", weakref.WeakSet())
            forget(self.folder, marks, since)

    @property
    def saved(self) -> list[list[int]]:
        """The tokens of all files in the folder; nothing else is there but a log."""
        kept = [path for path in self.folder.rglob("*") if path.is_file()]
        found = [each for each in kept if each.name == "tokens.json"]
        assert {path.parent for path in kept} <= {self.folder, *(path.parent for path in found)}
        return [json.loads(path.read_text())["tokens"] for path in found]


WAYS: dict[str, tuple[Callable[[Case], object], Callable[[Case], object]]] = {
    # What happens to the cache before its words are deleted, and after.
    "parked": (lambda case: None, Case.save),
    "parked twice": (Case.save, Case.save),
    "restored, continued and parked": (Case.go_on, Case.save),
    "in RAM, settled": (Case.hold, Case.settle),
    "in RAM, its own settled": (Case.hold, Case.settle_own),
    "in RAM, pushed out": (Case.hold, Case.press),
    "to RAM, then pushed out": (lambda case: None, lambda case: (case.hold(), case.press())),
    "in RAM and on the disk": (lambda case: (case.save(), case.hold()), Case.settle),
}


@pytest.mark.parametrize("here", [True, False], ids=["here", "in another process"])
@pytest.mark.parametrize("owner", [MARKED, NOBODY], ids=["a chat's", "a server's"])
@pytest.mark.parametrize("way", WAYS)
def test_what_was_deleted_reaches_no_disk(
    tmp_path: Path, engine: NativeEngine, way: str, owner: Owner, here: bool
) -> None:
    """On no way; what others said does, and the same words once they are said again."""
    before, after = WAYS[way]
    case = Case(tmp_path / "kv", engine, owner)
    known, other = case.cache.log, [int(t) for t in tokens(400, seed=3)]
    case.cache.save(filled(engine, other), OTHER)
    before(case)
    running = filled(engine, other[::-1])
    running.known = known
    case.forget(here=here)
    if here:
        assert case.cache.ram_nbytes == 0
    after(case)
    assert case.saved == [other]
    assert case.cache.ram_nbytes == 0
    assert case.cache.save(running, OTHER) > 0
    case.forget()  # it does no harm
    assert len(case.saved) == 2
    case.begin()
    case.save()
    assert case.ids in case.saved
    assert case.cache.restore(engine.session(2048), case.ids) == len(case.ids)


def test_caches_of_unknown_messages_from_before_the_conversation_stay(
    tmp_path: Path, engine: NativeEngine
) -> None:
    case = Case(tmp_path / "kv", engine, NOBODY)
    case.save()
    case.forget(since=time.time() + 100)
    assert case.saved == [case.ids]
    case.forget(since=time.time() - 100)
    assert case.saved == []


@pytest.mark.parametrize("owner", [MARKED, NOBODY], ids=["a chat's", "a server's"])
@pytest.mark.parametrize("moment", ["before the first block", "before the tokens", "at the end"])
def test_deleted_while_it_is_written(
    tmp_path: Path,
    engine: NativeEngine,
    moment: str,
    owner: Owner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another process."""
    case = Case(tmp_path / "kv", engine, owner)
    whole, steps = BlockFile.write, iter(range(9))

    def write(file: BlockFile, ids: Any, layout: str, width: int, take: Any, states: Any) -> None:
        def taken(first: int, count: int) -> Any:
            if moment == "before the tokens" and next(steps) == 0:
                case.forget(here=False)
            return take(first, count)

        if moment == "before the first block":
            case.forget(here=False)
        whole(file, ids, layout, width, taken, states)
        if moment == "at the end":
            case.forget(here=False)

    monkeypatch.setattr(BlockFile, "write", write)
    with suppress(StorageError):  # its folder is gone
        case.save()
    assert case.saved == []
    assert not case.cache.save(case.session, owner)


@pytest.mark.parametrize("owner", [MARKED, NOBODY], ids=["a chat's", "a server's"])
def test_deletion_finds_what_a_killed_writer_left(
    tmp_path: Path, engine: NativeEngine, owner: Owner
) -> None:
    """Also where it had begun to change a file of another conversation."""
    case, began = Case(tmp_path / "kv", engine, owner), time.time() - 100
    case.cache.save(filled(engine, case.ids[:500]), OTHER)
    (file,) = case.folder.glob("a/*")

    def killed(first: int, count: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BlockFile(file).write(case.ids, case.session.kv_layout, 4096, killed)
    (case.folder / "a" / "empty").mkdir()
    copy = shutil.copytree(case.folder, tmp_path / "without deletion")
    assert not PromptCache(case.folder / "a", limit=1).restore(engine.session(2048), case.ids)
    case.forget(since=began)
    assert not list(case.folder.glob("a/*"))
    for day, left in ((began, 2), (began - 90_000, 1)):  # whoever looks removes it a day later
        os.utime(copy / "a" / file.name / "blocks.bin", (day, day))
        PromptCache(copy / "a", limit=1).restore(engine.session(2048), case.ids)
        assert len(list(copy.glob("a/*"))) == left


def test_marks_of_a_part_are_not_those_of_the_whole(tmp_path: Path, engine: NativeEngine) -> None:
    """An app uses the beginning of what a server saved: the rest has unknown messages still."""
    case = Case(tmp_path / "kv", engine, NOBODY)
    case.save()
    assert case.cache.save(filled(engine, case.ids[:600]), OTHER) > 0
    case.forget()
    assert case.saved == []


def test_private_sessions_are_never_saved(tmp_path: Path, engine: NativeEngine) -> None:
    case = Case(tmp_path / "kv", engine)
    case.session.private = True
    assert case.cache.save(case.session, MARKED) == case.cache.hold(case.session, MARKED) == 0
    assert case.cache.settle() == 0
    assert case.saved == []


def test_hashes_of_what_was_deleted_stay_for_a_day(
    tmp_path: Path, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no older session is saved, whatever it holds; those of before a lost log neither."""
    case = Case(tmp_path / "kv", engine, OTHER)
    log, now = case.folder / "deleted.txt", time.time_ns()
    case.forget()
    assert "deleted" in log.read_text()
    assert case.cache.log == log.read_text()
    monkeypatch.setattr(time, "time_ns", lambda: now + 90_000 * 10**9)
    PromptCache(case.folder / "b", limit=1).log  # noqa: B018  a request of another model
    assert "deleted" not in log.read_text()
    case.save()
    assert case.saved == []
    case.begin()
    case.save()
    assert case.saved == [case.ids]
    case.begin()
    log.unlink()
    case.forget()
    case.owner = Owner(frozenset({"nothing of it"}))
    case.ids = case.ids[::-1]
    case.save()
    assert len(case.saved) == 1


@pytest.mark.parametrize("lost", ["log", "cache", "model"])
def test_what_cannot_be_deleted_is_said(
    tmp_path: Path, engine: NativeEngine, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, after all else was deleted; again it works, once it can be done."""
    case = Case(tmp_path / "kv", engine)
    case.save()
    log, (file,) = case.folder / "deleted.txt", case.folder.glob("a/*")
    with monkeypatch.context() as patch:
        if lost == "log":
            log.mkdir()
        elif lost == "cache":
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        else:
            patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(StorageError, match=r"delete .* yourself") as caught:
            case.forget()
    named = {"log": log, "cache": file, "model": case.folder / "a"}[lost]
    assert f"{named} " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(case.saved) == (lost == "cache")
    if lost == "log":
        log.rmdir()
    case.forget()
    case.save()
    assert case.saved == []


def test_without_a_folder_nothing_is_noted(tmp_path: Path) -> None:
    forget(tmp_path / "kv", DELETED, 0.0)
    assert not list(tmp_path.iterdir())


def test_deletions_of_many_at_once(tmp_path: Path, engine: NativeEngine) -> None:
    """None is lost, however many messages each has."""
    case, words = Case(tmp_path / "kv", engine), [f"{number:016x}" for number in range(6000)]
    parts = [frozenset(words[first::6]) for first in range(6)]
    threads = [threading.Thread(target=case.forget, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*words} < {*case.cache.log.split()}
    assert len(case.cache.log.split("\n")) == 7
