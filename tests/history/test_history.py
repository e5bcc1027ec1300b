"""Conversations in SQLite: branches, search, crashes, several apps, files that cannot be used."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from localrt import CancelledError, Conversation, History, OptionError, StorageError
from localrt.common.processes import is_alive, own_name
from localrt.history import database
from localrt.history.pictures import small_image
from localrt.models.vision.picture import open_picture
from tests.picture_files import READ


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


def test_search(history: History) -> None:
    for text in ("the quick brown fox", "a slow fox", "100% of nothing"):
        history.new(model="m").add("user", text)
    assert [info.title for info in history.list("FOX qui")] == ["the quick brown fox"]
    assert [info.title for info in history.list("fox")] == ["a slow fox", "the quick brown fox"]
    assert [info.title for info in history.list("100%")] == ["100% of nothing"]
    assert history.list('fox" OR "slow') == []
    long = history.new(model="m")
    long.add("user", "question")
    long.add("assistant", "word " * 100 + "needle in it " + "word " * 100)
    (found,) = history.list("needle")
    assert "needle in it" in found.snippet
    assert len(found.snippet) < 100


def test_delete(history: History) -> None:
    talk = history.new(model="m")
    assert history.list() == []  # it is empty
    talk.set(title="Plans")
    assert [info.title for info in history.list()] == ["Plans"]
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


def test_what_waits_for_the_disk(history: History) -> None:
    """A power cut undoes no message and no ended answer; sentences are saved too often to wait."""

    def waits() -> bool:
        return bool(history._database.rows("PRAGMA synchronous")[0][0] == 2)

    conversation = history.new(model="m")
    conversation.add("user", "Hello")
    assert waits()
    with conversation.answer() as writer:
        assert waits()
        writer.write("One sentence. ")
        assert not waits()
    assert waits()


def test_killed_writer(tmp_path: Path) -> None:
    """What it wrote is found by the next app, and by one that went on."""
    path = tmp_path / "one" / "h.db"
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
        app.kill()
    before = path.with_name("h.db-wal").read_bytes()
    for answer in (talk.turns[-1], talk.turn(talk.turns[-1].id)):
        assert answer.state == "cut"
        assert answer.content.startswith("One sentence is whole. Another is too.")
    assert path.with_name("h.db-wal").read_bytes() == before, "reading writes nothing"
    shutil.copytree(path.parent, tmp_path / "two")
    with History(tmp_path / "two" / "h.db") as later:
        assert later.list("whole")
        assert later.open(talk.id).turns[1].content == answer.content
    talk.add("user", "next")
    assert history.list("whole")
    assert talk.turns[1] == answer


def test_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with History(path) as history:
        talk = history.new(model="m")
        for number in range(200):
            talk.add("user", f"{number} " * 100)
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(os.urandom(4096 * 8))
    damaged = path.read_bytes()
    with History(path) as history:
        (note,) = history.notes
        assert "damaged" in note
        assert history.list() == []
        history.new(model="m").add("user", "again")
    (aside,) = tmp_path.glob("h.db.damaged-*")
    assert aside.read_bytes() == damaged
    with History(path) as history:
        assert history.notes == ()
        assert len(history.list()) == 1


def test_a_failing_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays in its place, for when the disk is well again."""
    with History(tmp_path / "h.db") as history:
        history.new(model="m").add("user", "kept")

    opened, times = database._opened, list[int]()

    def failing(path: Path, **how: bool) -> sqlite3.Connection:
        """As SQLite makes of a read that fails, once."""
        times.append(1)
        if len(times) == 1:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return opened(path, **how)

    def unreadable(self: Path, mode: str) -> io.BytesIO:
        raise OSError(errno.EIO, "Input/output error", str(self))

    monkeypatch.setattr(database, "_opened", failing)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", unreadable)
        with pytest.raises(StorageError, match=r"cannot open .*h\.db: Input/output error$"):
            History(tmp_path / "h.db")
    times.clear()
    with History(tmp_path / "h.db") as history:
        assert history.notes == ()
        assert said(history.open(history.list()[0].id)) == ["kept"]


def test_newer_file(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    History(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with History(path) as history:
        assert "newer" in history.notes[0]
        history.new(model="m").add("user", "here")
        assert history.path.name == "h.v3.db"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (99,)


def test_full_disk(history: History) -> None:
    talk = history.new(model="m")
    talk.add("user", "q")
    writer = talk.answer()
    (pages,) = history._database.rows("PRAGMA page_count")[0]
    history._database.rows(f"PRAGMA max_page_count = {pages}")
    text = "A sentence that needs room. " * 2000
    writer.write(text)
    assert (history.unsaved, writer.text, said(talk)) == (1, text, ["q", text])
    assert "1 change is not on disk yet" in history.problem
    assert "disk is full" in history.problem
    writer.finish()
    assert not history.save()
    history._database.rows("PRAGMA max_page_count = 1000000")
    assert history.save()
    assert (history.unsaved, history.problem) == (0, "")
    assert history.path is not None
    with History(history.path) as later:
        assert said(later.open(talk.id)) == ["q", text]


def test_unusable_path(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    with pytest.raises(StorageError, match="cannot keep conversations"):
        History(tmp_path / "folder" / "h.db")
    with pytest.raises(StorageError, match="cannot open"):
        History(tmp_path)


# -- who may read it -------------------------------------------------------------------------------


def rights(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX's")
def test_private_files(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    path = folder / "h.db"
    before = os.umask(0)
    try:
        for damaged in (False, True):
            if damaged:
                path.write_bytes(b"nothing that SQLite knows" * 400)
            with History(path) as history:
                assert len(history.notes) == damaged
                history.new(model="m").add("user", "secret")
                assert len(list(folder.iterdir())) == 3 + damaged  # with -wal and -shm
                assert rights(folder) == {0o600}
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def picture(color: str = "red", size: tuple[int, int] = (8, 4), kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, kind)
    return stream.getvalue()


def files(history: History) -> list[bytes]:
    assert history.path is not None
    with closing(sqlite3.connect(history.path)) as connection:
        return [data for (data,) in connection.execute("SELECT data FROM picture")]


def asking(*content: str | bytes) -> list[dict[str, Any]]:
    """Content parts: texts, and files of pictures."""
    texts = {str: ("text", "text"), bytes: ("image", "image")}
    return [{"type": texts[type(each)][0], texts[type(each)][1]: each} for each in content]


def test_pictures(tmp_path: Path) -> None:
    red, blue = picture("red"), picture("blue", (3, 9), "JPEG")
    with History(tmp_path / "h.db") as history:
        talk = history.new(model="m")
        talk.add("user", asking("What changed from ", red, " to ", blue, "?"))
        talk.add("assistant", "The color.")
        path = tmp_path / "photo.png"
        path.write_bytes(red)
        talk.add("user", [{"type": "image", "image": path}])
    with History(tmp_path / "h.db") as history:
        talk = history.open(history.list()[0].id)
        first, _, last = talk.turns
        assert first.content == "What changed from  to ?"
        assert first.message["content"] == asking("What changed from ", red, " to ", blue, "?")
        sizes = [(each.name, each.width, each.height) for each in first.pictures]
        assert sizes == [("picture.png", 8, 4), ("picture.jpeg", 3, 9)]
        assert [each.media_type for each in first.pictures] == ["image/png", "image/jpeg"]
        assert (last.content, last.pictures[0].name) == ("", "photo.png")
        assert last.info == {}
        assert sorted(files(history)) == sorted([red, blue])
        assert history.list("changed")[0].title == "What changed from  to ?"


def test_pictures_end_with_last_turn(history: History) -> None:
    red, blue = picture("red"), picture("blue")
    first, second = history.new(model="m"), history.new(model="m")
    first.add("user", asking(red, blue))
    second.add("user", asking(red, red))
    assert len(files(history)) == 2
    history.delete(first.id)
    assert files(history) == [red]
    assert second.turns[0].message["content"] == asking(red, red)
    history.delete(second.id)
    assert files(history) == []


def test_bad_arguments_and_pictures(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = history.new(model="m")
    with pytest.raises(OptionError, match="no colour"):
        talk.set(colour="red")
    with pytest.raises(StorageError, match="no turn 77"):
        talk.add("user", "hi", after=77)
    with pytest.raises(OptionError, match="not a PNG"):
        talk.add("user", asking(b"text"))
    with pytest.raises(OptionError, match="parts are texts and images"):
        talk.add("user", [{"type": "audio"}])
    monkeypatch.setattr("localrt.history.pictures.LARGEST_PICTURE", 50)
    with pytest.raises(OptionError, match="at most"):
        talk.add("user", asking(picture()))
    assert talk.turns == ()


@pytest.mark.parametrize("kind", READ)
def test_pictures_of_many_kinds(history: History, kind: str) -> None:
    data, media_type, size = READ[kind]
    (picture,) = history.new(model="m").add("user", asking(data)).pictures
    assert (picture.media_type, (picture.width, picture.height)) == (media_type, size)
    assert picture.name == f"picture.{media_type.removeprefix('image/')}"
    opened = open_picture(data)
    assert (opened.width, opened.height) == size
    small = np.asarray(small_image(picture, 4, 3), np.float32)
    assert abs(small.mean() - opened.pixels.mean()) < 25  # what the model sees


def test_texts_that_are_no_unicode(history: History) -> None:
    """Lone surrogates, as of arguments in another encoding and of JSON; a pair in two pieces."""
    talk = history.new(model="m", system="\ud800")
    talk.add("user", "one \udcff")
    with talk.answer() as writer:
        writer.write("first \ud83d")
        writer.write("\ude00. \udcff\n")
    assert said(talk) == ["one \ufffd", "first 😀. \ufffd\n"]
    assert (talk.title, talk.system) == ("one \ufffd", "\ufffd")
    talk.set(title="\udcff title")
    assert [info.title for info in history.list("tit")] == ["\ufffd title"]
    assert history.list("\udcff\0") == history.list("tit")
    with pytest.raises(StorageError, match="no conversation"):
        history.open("\ud800")


def test_lost_picture(history: History) -> None:
    talk = history.new(model="m")
    turn = talk.add("user", asking("What is ", picture()))
    assert history.path is not None
    with closing(sqlite3.connect(history.path)) as connection, connection:
        connection.execute("DELETE FROM turn_picture")
    with pytest.raises(StorageError, match="not in the history"):
        _ = turn.pictures[0].data
    assert "picture.png: this picture is lost" in str(talk.messages)


def test_a_folder_without_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network drives, which refuse SQLite's write-ahead log."""
    connect = sqlite3.connect

    class Refusing(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if "WAL" in sql:
                raise sqlite3.OperationalError("locking protocol")
            return super().execute(sql, *args)

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Refusing))
    with History(tmp_path / "h.db") as history:
        history.new(model="m").add("user", "kept")
    monkeypatch.undo()
    with History(tmp_path / "h.db") as history:
        assert [info.title for info in history.list()] == ["kept"]


@pytest.mark.parametrize("named", ["1@0.00", "x", "", None], ids=repr)
def test_names_of_processes(named: str | None) -> None:
    """Another process may have got the id since."""
    assert is_alive(own_name())
    assert not is_alive(named)


def test_withdraw(history: History) -> None:
    """The turn and what follows it are gone; what was shown before it is shown again."""
    conversation = history.new(model="m")
    first = conversation.add("user", "First words")
    conversation.remove(first.id, sweep=False)
    assert (conversation.turns, conversation.title, history.list()) == ((), "", [])
    question = conversation.add("user", "Hi")
    with conversation.answer() as writer:
        writer.write("Hello.")
    again = conversation.add("user", "Hi!", after=0)
    with conversation.answer() as writer:
        writer.write("unheard")
    conversation.remove(again.id, sweep=False)
    assert [(turn.content, turn.branches) for turn in conversation.turns] == [
        ("Hi", 1),
        ("Hello.", 1),
    ]
    assert conversation.siblings(question.id) == (question.id,)
    assert (conversation.title, history.list("unheard")) == ("Hi", [])
