"""Conversations in SQLite: branches, search, crashes, several apps, files that cannot be used."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt import CancelledError, Conversation, History, OptionError, StorageError
from localrt.history.history import copy_to_memory, end_answer, merge

posix = pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX's")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "history.db")


def said(conversation: Conversation) -> list[str]:
    return [turn.content for turn in conversation.turns]


def test_conversation(tmp_path: Path) -> None:
    with History(tmp_path / "h.db") as history:
        talk = history.new(model="smollm2", system="Be brief.", options={"temperature": 0.2})
        talk.add("user", "What is a tier?\nA long question.")
        with talk.answer() as writer:
            writer.write("Memory of a kind. ")
            writer.write("Fast or large")
            writer.finish("done", info={"tok_s": 12.5})
    with History(tmp_path / "h.db") as history:
        (info,) = history.list()
        assert (info.title, info.model, info.turns) == ("What is a tier?", "smollm2", 2)
        talk = history.open(info.id)
        assert talk.messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is a tier?\nA long question."},
            {"role": "assistant", "content": "Memory of a kind. Fast or large"},
        ]
        assert talk.options == {"temperature": 0.2}
        assert talk.turns[1].info == {"tok_s": 12.5}
        assert talk.turns[1].state == "done"


def test_branches(history: History) -> None:
    talk = history.new(model="m")
    first = talk.add("user", "one")
    answer = talk.add("assistant", "1")
    talk.add("user", "two")
    other = talk.add("assistant", "uno", after=first.id)
    assert said(talk) == ["one", "uno"]
    assert (other.branch, other.branches) == (2, 2)
    talk.show(answer.id)
    assert said(talk) == ["one", "1", "two"]  # what was below it is remembered
    assert talk.siblings(answer.id) == (answer.id, other.id)
    edited = talk.add("user", "ONE", after=0)
    assert said(talk) == ["ONE"]
    assert talk.siblings(edited.id) == (first.id, edited.id)
    talk.show(other.id)
    assert said(talk) == ["one", "uno"]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=25))
def test_show_any_turn(steps: list[tuple[bool, int]]) -> None:
    with TemporaryDirectory() as folder, History(Path(folder) / "h.db") as history:
        talk = history.new(model="m")
        parents: dict[int, int] = {}
        for number, (add, where) in enumerate(steps):
            numbers = [0, *parents]
            after = numbers[where % len(numbers)]
            if add or not parents:
                turn = talk.add("user", str(number), after=after)
                parents[turn.id] = after
                assert talk.turns[-1].id == turn.id
            elif after:
                talk.show(after)
                assert after in [turn.id for turn in talk.turns]
        for turn in parents:
            talk.show(turn)
            shown = [shown.id for shown in talk.turns]
            assert turn in shown
            assert [parents[t] for t in shown] == [0, *shown[:-1]]


def test_search(history: History) -> None:
    for text in ("the quick brown fox", "a slow fox", "100% of nothing"):
        history.new(model="m").add("user", text)
    assert [info.title for info in history.list("FOX qui")] == ["the quick brown fox"]
    assert [info.title for info in history.list("fox")] == ["a slow fox", "the quick brown fox"]
    assert [info.title for info in history.list("100%")] == ["100% of nothing"]
    assert history.list('fox" OR "slow') == []
    assert history.list("NEAR(") == []
    long = history.new(model="m")
    long.add("user", "question")
    long.add("assistant", "word " * 100 + "needle in it " + "word " * 100)
    (found,) = history.list("needle")
    assert "needle in it" in found.snippet
    assert len(found.snippet) < 100


def test_empty_conversation(history: History) -> None:
    talk = history.new(model="m")
    assert history.list() == []
    talk.set(title="Plans")
    assert [info.title for info in history.list()] == ["Plans"]


def test_delete(history: History) -> None:
    talk = history.new(model="m")
    talk.add("user", "secret")
    history.delete(talk.id)
    assert history.list() == history.list("secret") == []
    with pytest.raises(StorageError, match="was deleted"):
        talk.add("user", "more")
    with pytest.raises(StorageError, match="no conversation"):
        history.open(talk.id)


def test_answer_states(history: History) -> None:
    talk = history.new(model="m")
    talk.add("user", "q")
    writer = talk.answer()
    writer.write("half of")
    with pytest.raises(CancelledError), writer:
        raise CancelledError("stopped")
    with pytest.raises(ValueError, match="oops"), talk.answer(after=0):
        raise ValueError("oops")
    failed = talk.turns[-1]
    assert (failed.state, failed.content) == ("failed", "")
    talk.show(1)
    assert (talk.turns[1].state, talk.turns[1].content) == ("cancelled", "half of")


_WRITER = """
import sys, time
from localrt import History
talk = History(sys.argv[1]).open(sys.argv[2])
with talk.answer() as writer:
    writer.write("One sentence is whole. Another is too.\\nBut this")
    writer.write(" one is not")
    print("written", flush=True)
    time.sleep(60)
"""


def test_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    history = History(path)
    talk = history.new(model="m")
    talk.add("user", "q")
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), talk.id], stdout=subprocess.PIPE
    ) as app:
        assert app.stdout is not None
        app.stdout.readline()
        answer = talk.turns[-1]  # seen by this app meanwhile
        assert answer.state == "writing"
        assert answer.content.startswith("One sentence is whole. Another is too.")
        os.kill(app.pid, signal.SIGKILL)
    answer = talk.turns[-1]
    assert answer.state == "cut"
    assert answer.content.startswith("One sentence is whole. Another is too.")
    assert history.list("whole")


def test_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    path.write_bytes(b"this is no database, but a text that somebody wrote" * 100)
    with History(path) as history:
        (note,) = history.notes
        assert "damaged" in note
        history.new(model="m").add("user", "again")
    (aside,) = tmp_path.glob("h.db.damaged-*")
    assert aside.read_bytes().startswith(b"this is no database")
    with History(path) as history:
        assert history.notes == ()
        assert len(history.list()) == 1


def test_damaged_pages(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with History(path) as history:
        talk = history.new(model="m")
        for number in range(200):
            talk.add("user", f"{number} " * 100)
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(os.urandom(4096 * 8))
    with History(path) as history:
        assert "damaged" in history.notes[0]
        assert history.list() == []


def test_newer_file(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    History(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with History(path) as history:
        assert "newer" in history.notes[0]
        history.new(model="m").add("user", "here")
        assert history.path.name == "h.v1.db"
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (99,)


def test_full_disk(history: History) -> None:
    talk = history.new(model="m")
    talk.add("user", "q")
    writer = talk.answer()
    (pages,) = history._database.rows("PRAGMA page_count")[0]
    history._database.rows(f"PRAGMA max_page_count = {pages}")
    text = "A sentence that needs room. " * 2000
    writer.write(text)
    assert writer.problem is not None
    assert "disk is full" in writer.problem
    assert writer.text == text
    with pytest.raises(StorageError, match="disk is full"):
        writer.finish()
    history._database.rows("PRAGMA max_page_count = 1000000")
    writer.finish()
    assert said(talk) == ["q", text]


def test_unusable_path(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    with pytest.raises(StorageError, match="cannot keep conversations"):
        History(tmp_path / "folder" / "h.db")
    with pytest.raises(StorageError, match="cannot open"):
        History(tmp_path)


def test_bad_arguments(history: History) -> None:
    talk = history.new(model="m")
    with pytest.raises(OptionError, match="no colour"):
        talk.set(colour="red")
    with pytest.raises(OptionError, match="robot"):
        talk.add("robot", "hi")
    with pytest.raises(StorageError, match="no turn 77"):
        talk.add("user", "hi", after=77)


def test_in_memory(tmp_path: Path) -> None:
    with History(":memory:") as history:
        assert history.path is None
        talk = history.new(model="m", options={"seed": 1})
        talk.add("user", "a quick question")
        with talk.answer() as writer:
            writer.write("an answer")
        assert [info.title for info in history.list("quick")] == ["a quick question"]
        assert said(history.open(talk.id)) == ["a quick question", "an answer"]
    with History(":memory:") as other:
        assert other.list() == []


def test_merge_copy(history: History) -> None:
    with History(":memory:") as memory:
        talk = history.new(model="m", system="Be brief.")
        question = talk.add("user", "q")
        writer = talk.answer()
        writer.write("half")
        facts = {"title": talk.title, "model": "m", "system": "Be brief.", "options": {"seed": 1}}
        copy = copy_to_memory(memory, talk.id, talk.turns, facts)
        end_answer(copy, writer.turn, "cancelled", "half", {"tokens": 1})
        first = copy.add("user", "more", after=writer.turn)
        other = copy.add("user", "other", after=writer.turn)
        assert min(first.id, other.id) > 1 << 39  # no number of the file
        unfinished = copy.answer(after=other.id)
        with pytest.raises(StorageError, match="still being written"):
            merge(talk, copy)
        unfinished.finish()
        numbers = merge(talk, copy)
        assert said(talk) == ["q", "half", "other", ""]
        assert [turn.state for turn in talk.turns] == ["done", "cancelled", "done", "done"]
        assert talk.options == {"seed": 1}
        assert talk.siblings(numbers[other.id]) == (numbers[first.id], numbers[other.id])
        assert talk.siblings(question.id) == (question.id,)


# -- who may read it -------------------------------------------------------------------------------


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def rights(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@posix
@pytest.mark.parametrize("fate", ["whole", "damaged", "newer"])
def test_private_files(tmp_path: Path, fate: str, open_umask: None) -> None:
    folder = tmp_path / "new"
    path = folder / "h.db"
    with History(path) as history:
        history.new(model="m").add("user", "secret")
        assert len(list(folder.iterdir())) == 3  # with -wal and -shm
        assert rights(folder) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if fate == "damaged":
        path.write_bytes(b"nothing that SQLite knows" * 400)
    elif fate == "newer":
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    with History(path) as history:
        assert len(history.notes) == (fate != "whole")
        history.new(model="m").add("user", "secret")
        assert rights(folder) == {0o600}


@posix
def test_shared_files_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = tmp_path / "localrt"
    History().close()
    copy = folder / "history.db.damaged-20260101-000000"
    copy.write_bytes(b"secret")
    folder.chmod(0o755)
    for path in (folder / "history.db", copy):
        path.chmod(0o644)
    History().close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert rights(folder) == {0o600}
