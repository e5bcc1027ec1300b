"""Conversations: history, prefix reuse from turn to turn, cancelling, overflow, files; KV caches
that go to the disk and come back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt import History, Model
from localrt.engine import saved_caches
from localrt.server.models import ServedModel
from localrt.server.options import ServeOptions
from localrt.tui.conversation.state import ChatState
from tests.documents.samples import pdf
from tests.inside import core_of
from tests.real_models import real_model
from tests.waits import wait_for

GREEDY = {"temperature": 0.0, "max_tokens": 6}


def test_prefix_reuse(tiny: localrt.Model) -> None:
    chat = tiny.chat(system="Be brief.", **GREEDY)
    first = chat.send("hello")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == first.text
    assert chat.tokens_used >= first.metrics.prompt_tokens
    second = chat.send("and again")
    # At least the whole first prompt is reused; the answer too where its tokens spell the same.
    assert second.metrics.cached_tokens >= first.metrics.prompt_tokens
    fresh = tiny.generate(chat.messages[:-1], **GREEDY)
    assert fresh.text == second.text


def test_cancel_keeps_text(tiny: localrt.Model) -> None:
    chat = tiny.chat(temperature=0, ignore_eos=True)
    shown = ""
    for chunk in chat.stream("go on"):
        shown += chunk.text
        if chunk.metrics.completion_tokens == 3:
            chat.cancel()
    assert chunk.finish_reason == "cancelled"
    assert chunk.metrics.completion_tokens == 3
    assert chat.messages[-1] == {"role": "assistant", "content": shown}
    stream = chat.stream("go on")
    text = next(stream).text
    stream.close()  # type: ignore[attr-defined]
    assert chat.messages[-1]["content"].startswith(text)
    assert chat.send("next", max_tokens=2).finish_reason == "length"


def test_one_answer_at_a_time(tiny: localrt.Model) -> None:
    chat = tiny.chat(**GREEDY)
    stream = chat.stream("one")
    next(stream)
    with pytest.raises(localrt.LocalrtError, match="already answering"):
        chat.send("two")
    list(stream)
    chat.send("two")


def test_failed_turn(tiny: localrt.Model) -> None:
    chat = tiny.chat(**GREEDY)
    chat.send("hi")
    before = list(chat.messages)
    with pytest.raises(localrt.ContextOverflowError):
        chat.send("x" * 600)
    with pytest.raises(localrt.OptionError):
        chat.send("")
    assert chat.messages == before
    chat.send("still works")


def test_overflow_drops_oldest(tiny: localrt.Model) -> None:
    chat = tiny.chat("S" * 40, overflow="drop_oldest", **GREEDY)
    for i in range(12):
        result = chat.send(f"{i:02d}" + "x" * 60)
        assert result.metrics.prompt_tokens + 6 <= tiny.info.ctx
    assert len(chat.messages) == 25  # the history itself is whole
    with pytest.raises(localrt.ContextOverflowError, match="last message alone"):
        chat.send("y" * 600)


def test_save_and_load(tiny: localrt.Model, tmp_path: Path) -> None:
    chat = tiny.chat("Be brief.", **GREEDY)
    chat.send("héllo 🎈")
    path = tmp_path / "chat.json"
    chat.save(path)
    again = tiny.load_chat(path)
    assert (again.messages, again.options) == (chat.messages, chat.options)
    assert again.send("more").text == chat.send("more").text
    assert list(tmp_path.iterdir()) == [path]


def test_bad_files(tiny: localrt.Model, tmp_path: Path) -> None:
    chat = tiny.chat(**GREEDY)
    with pytest.raises(localrt.StorageError, match="cannot write"):
        chat.save(tmp_path / "missing" / "chat.json")
    bad = tmp_path / "bad.json"
    for text in ("not json", json.dumps({"version": 99})):
        bad.write_text(text)
        with pytest.raises(localrt.StorageError, match="not a saved chat"):
            tiny.load_chat(bad)
    with pytest.raises(localrt.StorageError, match="does not exist"):
        tiny.load_chat(tmp_path / "none.json")


async def test_async_chat(tiny: localrt.Model) -> None:
    chat = tiny.chat(**GREEDY)
    result = await chat.asend("hi")
    assert chat.messages[-1]["content"] == result.text
    stream = chat.astream("more", ignore_eos=True, max_tokens=200)
    async with aclosing(stream) as chunks:  # type: ignore[type-var]
        await anext(chunks)
    assert len(chat.messages) == 4


def test_files(tiny: localrt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "a.pdf").write_bytes(pdf("One", ""))
    pages = [f"Page about topic{n}." for n in range(40)]
    (tmp_path / "long.pdf").write_bytes(pdf(*pages))
    chat = tiny.chat(**GREEDY)
    chat.send("About which topic7?", files=[tmp_path / "a.pdf", tmp_path / "long.pdf"])
    sent = chat.messages[0]["content"]
    assert sent.startswith("a.pdf:\n```\n[page 1]\nOne\n\n[page 2]\n[no text]\n```\n\nlong.pdf (")
    assert "[long.pdf, page 8]\nPage about topic7." in sent
    assert sent.endswith("```\n\nAbout which topic7?")
    missing, searched = chat.file_notes
    assert missing == "a.pdf: 1 of 2 pages have little or no text, and are not shown."
    assert searched.startswith("long.pdf does not fit the context: the model gets ")
    with pytest.raises(localrt.StorageError, match=r"cannot read .*nowhere\.pdf"):
        chat.send("About which topic7?", files=[tmp_path / "nowhere.pdf"])
    for one in (str(tmp_path / "a.pdf"), tmp_path / "a.pdf"):
        alone = tiny.chat(**GREEDY)
        alone.send("What?", files=one)
        assert alone.messages[0]["content"].startswith("a.pdf:\n```\n[page 1]\nOne\n")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.tiny_encoders import ENCODERS, save_encoder, word_pieces

    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(ENCODERS["bert"], folder)
    word_pieces(folder)
    return folder


def test_files_are_searched_by_meaning(
    encoder: Path, tiny: localrt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding model is opened for a search, within the budget, and closed after it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "short.txt").write_text("One")
    (tmp_path / "long.pdf").write_bytes(pdf(*(f"Page about topic{n}." for n in range(40))))
    opened: list[localrt.Model] = []

    def opening() -> localrt.Model:
        opened.append(localrt.embedder(encoder)())
        return opened[-1]

    chat = tiny.chat(embedder=opening, **GREEDY)
    chat.send("Zebra?", files=[tmp_path / "short.txt"])
    assert not opened
    chat.send("Zebra?", files=[tmp_path / "long.pdf"])
    assert "pieces matching the message" in chat.file_notes[0]
    assert [repr(each).endswith(": closed>") for each in opened] == [True]
    small = tiny.chat(embedder=localrt.embedder(encoder, ram=1000), **GREEDY)
    small.send("Zebra?", files=[tmp_path / "long.pdf"])
    assert "It was searched by words alone, without the embedding model" in small.file_notes[0]


PROMPT = "Count from one to twenty in words. Then do it backwards, and say which was harder. " * 8


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCALRT_KV_DISK")
    with localrt.load(real_model("smollm2"), ctx=2048) as model:
        yield model


def test_parked_chat_goes_on(model: Model) -> None:
    options = {"max_tokens": 12, "temperature": 0.0}
    stayed, parked = model.chat(), model.chat()
    for chat in (stayed, parked):
        chat.send(PROMPT, **options)
    held = parked.kv_nbytes
    assert parked.park() > 0
    assert parked.kv_nbytes == 0 < held
    assert parked.park() == 0  # there is nothing left
    answers = [chat.send("And now by twos.", **options) for chat in (stayed, parked)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].metrics.cached_tokens == answers[1].metrics.cached_tokens > 100


def test_parked_chat_after_restart(model: Model, tmp_path: Path) -> None:
    chat = model.chat()
    chat.send(PROMPT, max_tokens=8, temperature=0.0)
    chat.park()
    chat.save(tmp_path / "chat.json")
    with localrt.load(real_model("smollm2"), ctx=1024) as later:
        again = later.load_chat(tmp_path / "chat.json")
        answer = again.send("Go on.", max_tokens=4)
        assert answer.metrics.cached_tokens > 100


@pytest.mark.parametrize("disk", ["1GB", "off"])
def test_cache_without_room(
    disk: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another request pushes out comes back from the disk, if that may be used."""
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALRT_KV_DISK", disk)
    monkeypatch.setattr("localrt.service.live.kv_room", lambda _: 0)
    monkeypatch.setattr("localrt.engine.batch.schedule._WORTH_SAVING_S", 0.0)
    with localrt.load(tiny_folder) as model, model.live(most=1) as live:
        first = live.generate(PROMPT[:200], max_tokens=8, temperature=0.0)
        live.generate("A title: " + PROMPT[:200], max_tokens=8)
        again = live.generate(PROMPT[:200], max_tokens=8, temperature=0.0)
    assert again.token_ids == first.token_ids
    assert (again.metrics.cached_tokens > 200) is (disk != "off")
    assert (tmp_path / "cache" / "kv").exists() is (disk != "off")


def test_deleted_conversation_leaves_no_word(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def found(word: str) -> list[str]:
        """The files in which the word is: as bytes, or as tokens."""
        texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for path in texts:
            if path.name == "tokens.json":
                about = json.loads(texts[path])
                texts[path] += model.detokenize(about["tokens"]).encode()
        return [path.name for path, text in texts.items() if word.encode() in text]

    state = ChatState(History, model="m", system="Be brief. " * 40, options={"max_tokens": 4})
    ids = []
    state.take_model(model)
    for word in ("xylophone", "gramophone"):
        if ids:
            state.new()  # the first one is parked
        ids.append(state.conversation.id)
        turn = state.conversation.add("user", f"My password is {word}. {PROMPT}", after=0)
        assert state.session is not None
        said = state.session.chat.send(turn.content)
        state.conversation.add("assistant", f"{said.text} So it is {word}.", after=turn.id)
    state.new()
    assert {"tokens.json", "history.db-wal"} <= {*found("xylophone")}
    assert "tokens.json" in found("gramophone")
    with History() as history:
        history.delete(ids[0])
    assert found("xylophone") == []
    assert "tokens.json" in found("gramophone")
    state.close()
    assert found("xylophone") == []


# -- every way of a cache to the disk: deleted words take none -------------------------------------

SECRET = [{"role": "user", "content": "My password is xylophone. " * 4}]
OTHERS = [{"role": "user", "content": "What does a gramophone play? " * 4}]
FEW = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
End = Callable[[], object]


def in_batch(model: Model, messages: Any, private: bool, close: Callable[[Any], object]) -> End:
    live = model.live(most=1)
    live.generate(messages, private=private, **FEW)
    return lambda: (close(live), live.close())


def parked(model: Model, messages: Any, private: bool) -> End:
    return in_batch(model, messages, private, lambda live: live.park())


def closed(model: Model, messages: Any, private: bool) -> End:
    """With a copy in RAM, as of a GPU's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_of(model).saver._prompts, "_room", lambda: 1 << 40)
        live = model.live(most=1)
        live.generate(messages, private=private, **FEW)
        live.park("ram")
    assert bool(live.stats().parked_bytes) is not private
    return live.close


def pushed_out(model: Model, messages: Any, private: bool) -> End:
    """By another client, where there is no room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localrt.service.live.kv_room", lambda _: 0)
        live = model.live(most=1)
    live.generate(messages, private=private, **FEW)
    return lambda: (live.generate("Play. " * 40, private=True, **FEW), live.close())


def served(model: Model, messages: Any, private: bool) -> End:
    server = ServedModel(model, "m", ServeOptions())
    server.live.generate(messages, private=private, **FEW)
    return server.close


def chat_of(model: Model, messages: Any, private: bool) -> localrt.ChatSession:
    chat = model.chat(**FEW)
    if private:
        chat.save_while(lambda: False)
    chat.send(messages[0]["content"])
    return chat


def chat_parked(model: Model, messages: Any, private: bool) -> End:
    return chat_of(model, messages, private).park


def waiting(model: Model, messages: Any, private: bool) -> End:
    """A chat that waits, until its room is needed."""
    chat = chat_of(model, messages, private)
    return lambda: (core_of(model).saver.keeper.make_room(1 << 60), chat.close())


def refused(model: Model, messages: Any, private: bool) -> End:
    """A chat whose next message does not fit: it still holds the words of those before."""
    chat = chat_of(model, messages, private)
    chat.clear()
    with pytest.raises(localrt.LocalrtError):
        chat.send("too long " * 2000)
    return chat.park


WAYS = [parked, closed, pushed_out, served, chat_parked, waiting, refused]


@pytest.fixture
def saving(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCALRT_KV_DISK")
    monkeypatch.setattr("localrt.engine.batch.schedule._WORTH_SAVING_S", 0.0)
    with localrt.load(tiny_folder) as model:
        yield model


def saved_words(model: Model, folder: Path) -> str:
    """What the caches in the folder hold, which has no other files."""
    files = [path for path in folder.glob("kv/*/*/*") if path.is_file()]
    found = [path for path in files if path.name == "tokens.json"]
    assert {path.parent for path in files} == {path.parent for path in found}
    return " ".join(model.detokenize(json.loads(path.read_text())["tokens"]) for path in found)


@pytest.mark.parametrize("why", ["deleted here", "deleted by another process", "private"])
@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_the_disk(
    saving: Model,
    tmp_path: Path,
    way: Callable[..., End],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others' caches stay, and what is said again goes the same way."""
    cache, private = tmp_path / "cache", why == "private"
    chat_of(saving, OTHERS, False).park()
    end, marks = way(saving, SECRET, private), saved_caches.marks_of(SECRET)
    if not private:
        with monkeypatch.context() as patch:
            if why == "deleted by another process":
                patch.setattr(saved_caches, "IDLE", weakref.WeakSet())
            saved_caches.forget(cache / "kv", marks, time.time() - 100)
    end()
    words = saved_words(saving, cache)
    assert "xylophone" not in words
    assert "gramophone" in words
    way(saving, SECRET, False)()
    words = saved_words(saving, cache)
    assert "xylophone" in words
    assert "gramophone" in words


def test_deletion_frees_idle_caches_and_disturbs_no_answer(saving: Model, tmp_path: Path) -> None:
    long = {**FEW, "max_tokens": 60}
    whole = saving.generate(OTHERS, **long)
    chats = [chat_of(saving, messages, False) for messages in (SECRET, OTHERS)]
    with saving.live() as live:
        live.generate(SECRET, **FEW)
        answer = live.submit(OTHERS, **long)
        first = next(answer)
        saved_caches.forget(tmp_path / "cache" / "kv", saved_caches.marks_of(SECRET), 0.0)
        assert [chat.kv_nbytes > 0 for chat in chats] == [False, True]
        rest = list(answer)
        tokens = [token for chunk in (first, *rest) for token in chunk.token_ids]
        assert tokens == list(whole.token_ids)
        saved_caches.forget(tmp_path / "cache" / "kv", saved_caches.marks_of(SECRET), 0.0)
        wait_for(lambda: live.stats().kv_bytes == 0)
        live.park()
    assert saved_words(saving, tmp_path / "cache") == ""


PROCESS = """
import sys, localrt
from localrt.offload.kv import saved
write = saved._write_all
def held(file, blocks):
    write(file, blocks[:len(blocks) // 2 or 1])
    print("writing", flush=True)
    sys.stdin.readline()
    write(file, blocks[len(blocks) // 2 or 1:])
if sys.argv[2] == "held":
    saved._write_all = held
with localrt.load(sys.argv[1]) as model, model.live() as live:
    for line in sys.stdin:
        if not line.strip():
            break
        live.generate([{"role": "user", "content": line.strip()}], max_tokens=4, ignore_eos=True)
        print("answered", flush=True)
    live.park()
"""


@pytest.mark.slow
@pytest.mark.parametrize("deleted", ["idle", "never", "before", "writing", "killed"])
def test_deleted_while_another_process_holds_it(
    saving: Model, tiny_folder: Path, tmp_path: Path, deleted: str
) -> None:
    """A process that only then saves it, is saving it, or is killed while it does."""
    held = "held" if deleted in ("writing", "killed") else ""
    kv, secret = tmp_path / "cache" / "kv", SECRET[0]["content"].strip()
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(tiny_folder), held],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def tell(line: str, answer: str = "") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        assert not answer or process.stdout.readline() == answer + "\n"

    def delete() -> None:
        saved_caches.forget(kv, saved_caches.marks_of(SECRET), time.time() - 100)

    try:
        if deleted == "before":
            delete()
        tell(secret, "answered")
        if deleted == "idle":
            delete()
        tell("", "writing" if held else "")
        if deleted == "killed":
            process.kill()
            process.wait()
        if held:
            delete()
        if deleted == "writing":
            tell("")
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert ("xylophone" in saved_words(saving, tmp_path / "cache")) is (
        deleted in ("never", "before")
    )
