"""What full disks, locks, kills, clocks and other windows did to conversations: each once.

The machine of ``machine.py`` does all of it in any order. A row here is a report; the next one is
added to the table.
"""

from __future__ import annotations

import errno
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localrt import History, StorageError
from localrt.engine import saved_caches
from localrt.history import conversation as conversations
from localrt.history import history as histories
from localrt.history import operations, outbox
from localrt.history.outbox import Outbox
from tests.history.test_history import said
from tests.history.test_turns import asked


@dataclass
class World:
    """Windows on one history, and what is done to its disk. No thread tries again by itself."""

    path: Path
    alive: set[str] = field(default_factory=set)
    opened: list[History] = field(default_factory=list)
    now: float = 1e9
    name: str = ""

    def window(self, *, patient: bool = True) -> History:
        self.name = f"window {len(self.opened)}"
        self.alive.add(self.name)
        self.opened.append(History(self.path, patient=patient))
        return self.opened[-1]

    def kill(self, window: History) -> None:
        self.alive.discard(window._outbox.window)
        window._database.close()

    @contextmanager
    def full(self) -> Iterator[None]:
        """As full as a disk gets."""
        for window in self.opened:
            (pages,) = window._database.rows("PRAGMA page_count")[0]
            window._database.rows(f"PRAGMA max_page_count = {pages}")
        yield
        for window in self.opened:
            if window._database.is_open:
                window._database.rows("PRAGMA max_page_count = 1000000")

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Moved away, as by a tool that synchronizes."""
        moved = [(each, each.with_name(f"x{each.name}")) for each in self.path.parent.iterdir()]
        for here, there in moved:
            here.rename(there)
        yield
        for here, there in moved:
            there.rename(here)

    def kept(self) -> dict[str, list[str]]:
        """What is in the file, by titles, read by nothing of ours."""
        with closing(sqlite3.connect(self.path)) as connection:
            titles = dict(connection.execute("SELECT id, title FROM conversation").fetchall())
            rows = connection.execute("SELECT conversation, content FROM turn ORDER BY id")
            found: dict[str, list[str]] = {title: [] for title in titles.values()}
            for id, content in rows:
                found[titles[id]].append(content)
            return found


LONG = "A sentence that needs room. " * 400


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path / "data" / "h.db")
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Outbox, "watch", lambda box: None)
    monkeypatch.setattr(outbox, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(outbox, "own_name", lambda: world.name)
    for module in (conversations, histories, operations):
        monkeypatch.setattr(module, "is_alive", lambda name: name in world.alive)
    monkeypatch.setattr(operations.time, "time", lambda: world.now)
    yield world
    for window in world.opened:
        window._database.close()


def another_is_opened(world: World) -> None:
    window = world.window()
    first = asked(window, "one", "1")
    with world.full():
        first.add("user", LONG)
        second = window.new(model="m")
        second.add("user", f"two {LONG}")
        assert (window.unsaved, "full" in window.problem) == (2, True)
        assert said(window.open(first.id))[-1] == LONG
        assert len(window.list()) == 2, "what waits is listed"
    assert window.save()
    assert [len(turns) for turns in world.kept().values()] == [3, 1]


def the_first_start_finds_no_folder(world: World) -> None:
    world.path.parent.write_text("not yet a folder")
    window = world.window()
    talk = window.new(model="m")
    talk.add("user", "first words")
    assert window.problem.startswith("1 change is not on disk yet: cannot ")
    world.path.parent.unlink()
    assert window.save()
    assert world.kept() == {"first words": ["first words"]}


def a_lock_at_the_start(world: World) -> None:
    asked(world.window(), "old")
    with closing(sqlite3.connect(world.path)) as locker:
        locker.execute("PRAGMA locking_mode = EXCLUSIVE")
        world.opened.pop().close()
        locker.execute("BEGIN EXCLUSIVE")
        window = world.window()
        window.new(model="m").add("user", "meanwhile")
        assert {each.title for each in window.list()} == {"old", "meanwhile"}
        assert "another app keeps it locked" in str(window._outbox._reason)
    assert window.save()
    assert [each.title for each in window.list()] == ["meanwhile", "old"]


def a_draft_and_then_a_kill(world: World) -> None:
    window = world.window()
    talk = asked(window, "one")
    with world.full():
        talk.keep_draft(LONG)
        assert window.unsaved == 1
    assert window.save()
    world.kill(window)
    assert world.window().open(talk.id).take_draft() == LONG


def a_draft_and_a_pin_are_carried(world: World) -> None:
    window = world.window()
    talk = asked(window, "one")
    talk.keep_draft("old draft")
    with world.full():
        talk.add("user", LONG)
        talk.keep_draft("")
        talk.set(pinned=True)
    assert window.save()
    world.kill(window)
    later = world.window().open(talk.id)
    assert (later.take_draft(), later.pinned, said(later)[-1]) == ("", True, LONG)


def a_second_message_gives_no_title(world: World) -> None:
    window = world.window()
    talk = window.new(model="m")
    with world.full():
        talk.add("user", f"First. {LONG}")
        talk.add("user", f"Second. {LONG}")
    assert window.save()
    assert [title[:6] for title in world.kept()] == ["First."]


def others_change_its_facts(world: World) -> None:
    window, other = world.window(), world.window()
    talk = asked(window, "one")
    with world.full():
        talk.add("user", LONG)
        talk.change_options({"top_k": 3})
    there = other.open(talk.id)
    there.set(title="renamed", system="other prompt", options={"seed": 2})
    assert (talk.title, talk.system, talk.options) == (
        *("renamed", "other prompt"),
        {"seed": 2, "top_k": 3},
    )
    assert window.save()
    assert (there.title, there.options) == ("renamed", {"seed": 2, "top_k": 3})


def the_file_is_removed(world: World) -> None:
    window = world.window()
    talk = asked(window, "one")
    assert said(talk) == ["one"]
    with world.gone():
        talk.add("user", "two")
        assert window.problem.endswith("h.db was removed")
        assert said(talk) == ["one", "two"]
        assert not window.save()
    assert window.save()
    assert world.kept() == {"one": ["one", "two"]}


def the_file_alone_is_moved(world: World) -> None:
    """Its log stays behind, and is not lost with it: nor by a start meanwhile."""
    window = world.window()
    talk = asked(window, "one")
    away = world.path.with_name("away")
    world.path.rename(away)
    assert window.save(), "nothing waits"
    window.close()
    assert not world.path.exists()
    away.rename(world.path)
    assert world.kept() == {"one": ["one"]}
    killed = world.window()
    killed.open(talk.id).add("user", "two")
    world.path.rename(away)
    later = world.window()  # which begins another file
    assert later.notes[0].startswith(f"{world.path} is missing, beside its log: that is kept as ")


def the_log_is_removed(world: World) -> None:
    window = world.window()
    asked(window, "one")
    for end in ("-wal", "-shm"):
        world.path.with_name(f"{world.path.name}{end}").unlink()
    assert [each.title for each in window.list()] == ["one"]
    world.kill(window)
    assert world.kept() == {"one": ["one"]}


def a_disk_that_can_be_written_again(world: World) -> None:
    """SQLite would go on with a connection that was opened when it could not."""
    window = world.window()
    talk = asked(window, "one")
    window._database.rows("PRAGMA query_only = ON")
    talk.add("user", "two")
    assert window.problem.endswith("it is read-only")
    assert window.save()
    assert world.kept() == {"one": ["one", "two"]}


def the_file_is_gone_for_good(world: World) -> None:
    window = world.window()
    talk = asked(window, "one")
    assert said(talk) == ["one"]
    for file in world.path.parent.iterdir():
        file.unlink()
    talk.add("user", "two")
    window.new(model="m").add("user", "new one")
    assert not window._outbox.flush(anew=True), "as at the end, or after a minute"
    assert world.kept() == {"new one": ["new one"]}
    assert window.problem == "1 change is not saved: this conversation was deleted"
    (written,) = window.write_unsaved(world.path.parent / "beside")
    assert (window.unsaved, said(talk)) == (0, ["one", "two"])
    (again,) = window.load_file(written).conversations
    assert said(again) == ["one", "two"]


def a_clock_is_set_while_an_answer_is_written(world: World) -> None:
    window, other = world.window(), world.window()
    talk = asked(window, "one")
    writer = talk.answer()
    writer.write("The beginning. ")
    world.alive.clear()  # to the other, whose clock differs
    there = other.open(talk.id)
    there.add("user", "two", after=1)
    assert there.branch(writer.turn)[-1].state == "cut"
    writer.write("And on. ")
    writer.finish()
    assert there.branch(writer.turn)[-1].content == "The beginning. And on. "
    assert there.branch(writer.turn)[-1].state == "done"


def an_empty_window_for_a_day(world: World) -> None:
    window = world.window()
    talk = window.new(model="m", system="s")
    world.now += 90_000
    world.window()
    talk.add("user", "late words")
    assert world.kept() == {"late words": ["late words"]}


def two_windows_with_drafts(world: World) -> None:
    window, other = world.window(), world.window()
    talk = asked(window, "one")
    there = other.open(talk.id)
    talk.keep_draft("mine")
    there.keep_draft("theirs")
    assert (talk.take_draft(), there.take_draft()) == ("mine", "theirs")
    for each in (window, other):
        world.kill(each)
    assert world.window().open(talk.id).take_draft().split("\n\n") == ["mine", "theirs"]


def what_is_changed_was_removed(world: World) -> None:
    window, other = world.window(), world.window()
    talk = asked(window, "one", "1")
    other.open(talk.id).remove(2)
    with pytest.raises(StorageError, match="no turn 2: it may have been removed"):
        talk.edit_answer(2, "x")
    assert (talk.title, window.unsaved, window.problem) == ("one", 0, "")


def thousands_of_turns(world: World) -> None:
    window = world.window()
    turns = [operations.TurnData(role="user", content=f"word{n}") for n in range(3000)]
    how: dict[str, Any] = {"model": "m", "system": None, "options": {}}
    for id in "ab":
        window._outbox.submit(operations.Begin(conversation=id, turns=turns, **how))
    talk = window.open("a")
    talk.remove(talk.turns[10].id)
    window.delete("b")
    assert (len(talk.turns), len(window.list("word2999"))) == (10, 0)


def an_import_that_fails(world: World) -> None:
    window = world.window()
    file = world.path.parent / "chats.json"
    file.write_text(json.dumps([[{"role": "user", "content": LONG * 9}] for _ in range(60)]))

    def full(connection: sqlite3.Connection, *args: Any) -> str:
        if len(connection.execute("SELECT id FROM conversation").fetchall()) > 20:
            raise sqlite3.OperationalError("database or disk is full")
        return written(connection, *args)

    from localrt.history import importing

    written = importing._written
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "_written", full)
        with pytest.raises(StorageError, match="full"):
            window.load_file(file)
    assert window.list() == []
    assert len(window.load_file(file).conversations) == 60


def killed_before_the_caches_are_swept(world: World) -> None:
    window, swept = world.window(), list[frozenset[str]]()
    talk = asked(window, "secret")

    def kept(*_: object) -> None:
        raise StorageError("the folder kv cannot be written")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_caches, "forget", kept)
        window.delete(talk.id)
        assert "saved KV caches: the folder kv" in window.problem
        world.kill(window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_caches, "forget", lambda folder, marks, since: swept.append(marks))
        later = world.window()
        later.save()
    assert swept == [saved_caches.marks_of([{"role": "user", "content": "secret"}])]
    assert later.problem == ""


def deleted_while_it_is_answered(world: World) -> None:
    window, other = world.window(), world.window()
    talk = asked(window, "one")
    writer = talk.answer()
    assert [turn.role for turn in talk.turns] == ["user", "assistant"]
    other.delete(talk.id)
    writer.write("It goes on. ")
    assert window.problem == "1 change is not saved: this conversation was deleted"
    writer.finish()
    assert said(talk) == ["one", "It goes on. "]
    assert window.unsaved == 1
    writer = (mine := asked(window, "mine")).answer()
    window.delete(mine.id)  # by itself
    writer.finish()
    assert window.unsaved == 1


def a_message_taken_back(world: World) -> None:
    window = world.window()
    talk = asked(window, "one")
    with world.full():
        turn = talk.add("user", LONG)
        talk.remove(turn.id, sweep=False)
    assert window.save()
    assert world.kept() == {"one": ["one"]}


def an_answer_is_continued(world: World) -> None:
    window = world.window()
    talk = asked(window, "one", "The beginning.")
    with world.full():
        writer = talk.reopen(2)
        writer.write(f"The beginning. {LONG}")
        writer.finish("cancelled")
        assert not window.save()
    assert window.save()
    assert world.kept() == {"one": ["one", f"The beginning. {LONG}"]}


def back_in_a_conversation_that_waits(world: World) -> None:
    window = world.window()
    talk = asked(window, "one")
    for _ in range(2):
        with world.full():
            again = window.open(talk.id)
            again.add("user", LONG)
            with again.answer() as writer:
                writer.write(LONG)
    assert window.save()
    assert len(world.kept()["one"]) == 5


def a_read_only_file_system(world: World) -> None:
    asked(world.window(), "old")
    world.opened.pop().close()

    def refused(path: Path, *_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localrt.history.database.private_file", refused)
        window = world.window()
        assert [each.title for each in window.list()] == ["old"]
        assert "Read-only file system" in window.problem
        window.open(window.list()[0].id).add("user", "new words")
        assert not window.save()
    assert window.save()
    assert world.kept() == {"old": ["old", "new words"]}


def a_clock_of_tomorrow(world: World) -> None:
    window = world.window()
    world.now += 86_400
    asked(window, "tomorrow")
    world.now -= 86_400
    asked(window, "today")
    assert [each.title for each in window.list()] == ["today", "tomorrow"]


def an_answer_without_its_question(world: World) -> None:
    """It is written elsewhere though the question is gone; so is one without its conversation."""
    window, other = world.window(), world.window()
    kept, gone = asked(window, "kept"), asked(window, "gone")
    writers = [talk.answer() for talk in (kept, gone)]
    assert [said(talk) for talk in (kept, gone)] == [["kept", ""], ["gone", ""]]
    other.open(kept.id).remove(kept.turns[0].id)
    other.delete(gone.id)
    for writer in writers:
        writer.write("A whole answer. ")
        writer.finish()
    assert window.problem.startswith("2 changes are not saved: ")
    written = window.write_unsaved(world.path.parent / "beside")
    assert [path.read_text().count("A whole answer. ") for path in written] == [1, 1]
    assert window.unsaved == 0


def a_history_that_was_closed(world: World) -> None:
    window = world.window()
    writer = asked(window, "one").answer()
    window.close()
    with pytest.raises(StorageError, match="the history is closed"):
        writer.write("A sentence. ")


def a_damaged_file_that_stays(world: World) -> None:
    world.path.parent.mkdir()
    world.path.write_bytes(b"nothing that SQLite knows" * 400)

    def refused(path: Path, *_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        window = world.window()
        window.new(model="m").add("user", "words")
        assert window.problem.endswith("cannot be put aside: Read-only file system")
    assert window.save()
    assert "is damaged" in window.notes[0]


ROWS: list[Callable[[World], None]] = [
    another_is_opened,
    the_first_start_finds_no_folder,
    a_lock_at_the_start,
    a_draft_and_then_a_kill,
    a_draft_and_a_pin_are_carried,
    a_second_message_gives_no_title,
    others_change_its_facts,
    the_file_is_removed,
    the_file_alone_is_moved,
    the_log_is_removed,
    a_disk_that_can_be_written_again,
    the_file_is_gone_for_good,
    a_clock_is_set_while_an_answer_is_written,
    an_empty_window_for_a_day,
    two_windows_with_drafts,
    what_is_changed_was_removed,
    thousands_of_turns,
    an_import_that_fails,
    killed_before_the_caches_are_swept,
    deleted_while_it_is_answered,
    a_message_taken_back,
    an_answer_is_continued,
    back_in_a_conversation_that_waits,
    a_read_only_file_system,
    a_clock_of_tomorrow,
    an_answer_without_its_question,
    a_history_that_was_closed,
    a_damaged_file_that_stays,
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_faults(row: Callable[[World], None], world: World) -> None:
    row(world)


def test_tried_again_by_itself(tmp_path: Path) -> None:
    """Without anybody who asks, as soon as the lock is gone."""
    with (
        History(tmp_path / "h.db") as history,
        closing(sqlite3.connect(tmp_path / "h.db")) as other,
    ):
        talk = asked(history, "one")
        other.execute("BEGIN IMMEDIATE")
        talk.add("user", "two")
        assert history.unsaved == 1
        other.rollback()
        done = threading.Event()
        while history.unsaved:
            done.wait(0.01)
        assert other.execute("SELECT count(*) FROM turn").fetchone() == (2,)
