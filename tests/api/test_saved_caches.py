"""A conversation whose KV cache goes to the disk and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import localrt
from localrt import History, LocalrtError, Model
from localrt.tui.conversation.state import ChatState
from tests.inside import core_of
from tests.real_models import real_model

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


def test_short_chat_is_not_parked(model: Model) -> None:
    chat = model.chat(system="Go.")
    chat.send("Hi", max_tokens=2)
    assert chat.park() == 0
    assert chat.kv_nbytes > 0


def test_answering_chat_is_not_parked(model: Model) -> None:
    chat = model.chat()
    chunks = chat.stream(PROMPT, max_tokens=20)
    next(chunks)
    with pytest.raises(LocalrtError, match="answering"):
        chat.park()
    chat.cancel()
    list(chunks)


def test_short_memory_parks_idle_chat(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = model.chat()
    chat.send(PROMPT, max_tokens=4)
    assert chat.kv_nbytes
    monkeypatch.setattr(core_of(model).saver.keeper, "_room", lambda: 0)
    assert core_of(model).saver.keeper.make_room() > 0
    assert chat.kv_nbytes == 0
    assert chat.send("Go on.", max_tokens=4).metrics.cached_tokens > 100


def test_new_answer_parks_idle_chat(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it begins, if there is no room for it."""
    one, other = model.chat(), model.chat()
    one.send(PROMPT, max_tokens=4)
    assert one.kv_nbytes
    monkeypatch.setattr(core_of(model).saver.keeper, "_room", lambda: 1 << 20)
    chunks = other.stream(PROMPT, max_tokens=4)
    next(chunks)
    assert one.kv_nbytes == 0
    list(chunks)
    assert one.send("Go on.", max_tokens=4).metrics.cached_tokens > 100


def test_saving_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    with localrt.load(real_model("smollm2"), ctx=2048) as model:
        chat = model.chat()
        chat.send(PROMPT, max_tokens=4)
        assert chat.park() == 0
        assert chat.kv_nbytes > 0
    assert not (tmp_path / "cache" / "kv").exists()


def test_park_idle_caches_of_batch(model: Model) -> None:
    options = {"max_tokens": 8, "temperature": 0.0}
    with model.live() as live:
        before = live.generate(PROMPT, **options)
        held = live.stats().kv_bytes
        live.park()
        assert live.stats().kv_bytes == 0 < held
        after = live.generate(PROMPT, **options)
    assert after.token_ids == before.token_ids
    assert after.metrics.cached_tokens > 100 > before.metrics.cached_tokens


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


@pytest.mark.parametrize("how", ["library", "other-window", "waiting", "open", "listed"])
def test_deleted_conversation_leaves_no_word(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
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

    state = ChatState(
        History,
        model="m",
        system="Be brief. " * 40,
        options={"max_tokens": 4},
        on_problem=pytest.fail,
    )
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
    if how != "open":
        state.new()
    assert {"tokens.json", "history.db-wal"} <= {*found("xylophone")}
    assert ("tokens.json" in found("gramophone")) == (how != "open")
    gone, kept = ("gramophone", "xylophone") if how == "open" else ("xylophone", "gramophone")
    number = ids[how == "open"]
    if how == "library":
        with History() as history:
            history.delete(number)
    elif how in ("other-window", "waiting"):
        state.open(number)
        if how == "waiting":
            assert state.session is not None
            state.session.chat.messages = state.conversation.messages()[:-1]
            state.session.chat.send(max_tokens=2)
        with History() as history:
            history.delete(number)
        if how == "waiting":  # and memory gets short
            monkeypatch.setattr(core_of(model).saver.keeper, "_room", lambda: 0)
            core_of(model).saver.keeper.make_room()
            assert found(gone) == []
        state.new()
    else:
        state.delete(number)
    assert found(gone) == []
    assert "tokens.json" in found(kept)
    state.close()
    assert found(gone) == []
