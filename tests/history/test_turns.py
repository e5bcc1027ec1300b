"""Turns that are edited, continued, removed and forked; pins, drafts, and what models get."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localrt import Chunk, Conversation, History, Metrics, OptionError, StorageError
from localrt.engine import saved_caches
from localrt.history.messages import AnswerRecord, messages_for_model, summary_turns, ways_out
from localrt.history.operations import Begin
from localrt.planning.forecast import PlannedContext
from tests.history.test_history import history, said
from tests.picture_files import READ

__all__ = ["history"]  # a fixture

PICTURE = {"type": "image", "image": next(iter(READ.values()))[0]}


def asked(history: History, *said: str) -> Conversation:
    """A conversation with these turns, of which every second is an answer."""
    talk = history.new(model="m", system="Be brief.", options={"seed": 1})
    for number, text in enumerate(said):
        talk.add("assistant" if number % 2 else "user", text)
    return talk


# -- edit, continue --------------------------------------------------------------------------------


def test_edit_answer(history: History) -> None:
    talk = asked(history, "q", "<think>\nHm.\n</think>\n\nOne.", "more")
    edited = talk.edit_answer(talk.turns[1].id, "Two.")
    assert said(talk) == ["q", "<think>Hm.</think>\n\nTwo."]
    assert (edited.branch, edited.info) == (2, {"edited": True})
    assert said(asked(history, "q", "One.")) == ["q", "One."]
    calls = talk.add("assistant", "", info={"tool_calls": [{"id": "1"}]})
    for turn in (talk.turns[0], calls):
        with pytest.raises(OptionError, match="only an answer that calls no tools"):
            talk.edit_answer(turn.id, "x")


_CONTINUES = """
import os, sys
from localrt import History
talk = History(sys.argv[1]).open(sys.argv[2])
writer = talk.reopen(talk.turns[-1].id)
if sys.argv[3]:
    writer.write(sys.argv[3])
os.kill(os.getpid(), 9)
"""


def end_of_child(code: str, *args: object) -> None:
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], check=False)
    assert done.returncode == (1 if os.name == "nt" else -9)


@pytest.mark.parametrize(("written", "left"), [("", "Half."), ("Half. And more. ", None)])
def test_continued_and_killed(history: History, written: str, left: str | None) -> None:
    talk = asked(history, "q", "Half.")
    end_of_child(_CONTINUES, history.path, talk.id, written)
    assert (said(talk)[-1], talk.turns[-1].state) == (left or written, "cut")
    with talk.reopen(talk.turns[-1].id) as writer:
        writer.write("Half. And more. And an end.")
    assert (said(talk)[-1], talk.turns[-1].state) == ("Half. And more. And an end.", "done")


def test_reopen(history: History) -> None:
    talk = asked(history, "q", "Half.")
    question, answer = talk.turns
    with pytest.raises(OptionError, match="only an answer"):
        talk.reopen(question.id)
    before = talk.updated
    writer = talk.reopen(answer.id)
    assert (said(talk)[-1], talk.turns[-1].state) == ("Half.", "writing")
    assert talk.updated > before
    with pytest.raises(OptionError, match="only the last answer"):
        talk.reopen(answer.id)
    writer.finish("failed", info={"error": "no"})  # nothing came
    assert talk.turns[-1] == answer
    talk.add("user", "more")
    with pytest.raises(OptionError, match="only the last answer"):
        talk.reopen(answer.id)
    with pytest.raises(OptionError, match="answer the question again"):
        talk.reopen(talk.add("assistant", "").id)
    with pytest.raises(OptionError, match="the answer is finished: edit it"):
        talk.reopen(talk.add("assistant", "All.", info={"finish_reason": "stop"}).id)
    talk.set(options={"stop": "."})  # which ends answers that are not
    talk.reopen(talk.turns[-1].id)


def test_what_a_stopped_answer_keeps() -> None:
    record, metrics = AnswerRecord(), Metrics(prompt_tokens=5, completion_tokens=2)
    assert record.info("m") == {}
    record.add(Chunk("old x", (8,), metrics, info={"begun": (7,)}))
    record.add(Chunk("x", (9,), metrics, "length"))
    info = record.info("m")
    facts = {"tokens": 3, "tok_s": None, "context": [7, "m"], "finish_reason": "length"}
    assert info == {**facts, "ids": [7, 8, 9]}
    record.add(Chunk("", (), metrics, "stop"))
    assert "ids" not in record.info("m")


@pytest.mark.parametrize(("model", "ids"), [("m", [7, 8]), ("other", []), (None, [])])
def test_messages_of_a_continued_answer(
    history: History, model: str | None, ids: list[int]
) -> None:
    talk = asked(history, "q")
    answer = talk.add("assistant", "Half", info={"ids": [7, 8], "context": [9, "m"]})
    found = messages_for_model(talk.turns, None, continued=answer.id, model=model)
    begun = {"role": "assistant", "content": "Half", "prefix": True, "token_ids": ids}
    assert found == [{"role": "user", "content": "q"}, begun]


# -- remove, fork ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "left", "forgotten"),
    [
        (4, ["q", "a", "r"], {"r"}),  # its caches are found by the question
        (3, ["q", "a"], {"r"}),
        (2, ["q", "b", "t"], {"q", "r"}),
        (1, [], {"q", "r", "t"}),
        (5, ["q", "a", "r", "s"], {"q", "t"}),
        (6, ["q", "a", "r", "s"], set()),  # another branch asks the same
    ],
)
def test_remove(
    history: History,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    left: list[str],
    forgotten: set[str],
) -> None:
    talk = asked(history, "q", "a", "r", "s")
    shown = talk.turns[-1].id
    for after, text in ((1, "b"), (5, "t"), (5, "t")):
        talk.add("assistant" if text == "b" else "user", text, after=after)
    talk.show(shown)
    marks: list[frozenset[str]] = []
    monkeypatch.setattr(saved_caches, "forget", lambda folder, found, since: marks.append(found))
    gone, before = talk.turn(number).content, talk.updated
    talk.remove(number)
    assert said(talk) == left
    assert (history.list(gone) == []) is bool(forgotten)
    said_by_user = [{"role": "user", "content": text} for text in forgotten]
    assert marks == [saved_caches.marks_of(said_by_user)]
    assert talk.updated > before
    assert talk.title == ("" if number == 1 else "q")


def test_fork(history: History) -> None:
    talk = asked(history, "q", "a")
    talk.add("user", [PICTURE, {"type": "text", "text": "What is it?"}], info={"x": 1})
    talk.add("assistant", "b", after=1)
    talk.add("assistant", "writing", after=3)
    before = talk.turns
    copy = history.fork(talk.id, 3)
    assert said(copy) == ["q", "a", "What is it?"]
    (picture,) = copy.turns[-1].pictures
    assert picture.data == talk.turn(3).pictures[0].data
    assert {turn.branches for turn in copy.turns} == {1}
    facts = ("model", "system", "options")
    assert [getattr(copy, each) for each in facts] == [getattr(talk, each) for each in facts]
    assert (copy.title, history.fork(copy.id, copy.turns[0].id).title) == ("q (copy)",) * 2
    assert (talk.turns, len(history.list())) == (before, 3)
    with pytest.raises(StorageError, match="no turn 99"):
        history.fork(talk.id, 99)
    history.delete(talk.id)
    assert copy.turns[-1].pictures[0].data


# -- pins and drafts -------------------------------------------------------------------------------


def test_pins(history: History) -> None:
    old, *_ = [asked(history, f"fox {name}") for name in "abc"]
    old.set(pinned=True)
    for found in (history.list(), history.list("fox")):
        assert [info.title for info in found] == ["fox a", "fox c", "fox b"]
        assert [info.pinned for info in found] == [True, False, False]
    assert old.pinned
    old.set(pinned=False, title="x")
    assert [info.title for info in history.list()] == ["fox c", "fox b", "x"]
    history.delete(old.id)
    assert history._database.rows("SELECT * FROM aside") == []


_DRAFTS = """
import os, sys
from localrt import History
History(sys.argv[1]).open(sys.argv[2]).keep_draft(sys.argv[3])
os.kill(os.getpid(), 9)
"""


def test_a_draft_outlives_its_app(history: History) -> None:
    talk, empty = asked(history, "q"), [history.new(model="m") for _ in range(3)]
    for one in empty:
        one.keep_draft("here")  # by this app, which runs
    talk.keep_draft("And")
    for one in (talk, *empty[:2]):
        end_of_child(_DRAFTS, history.path, one.id, "Not yet")
    assert talk.draft == "And"
    assert talk.take_draft() == talk.draft == "And\n\nNot yet"
    for one in empty[:2]:
        one.keep_draft("")
    for one in (empty[1], empty[0]):  # the newest first, each once
        found = history.unsent()
        assert found is not None
        assert (found.id, found.draft) == (one.id, "Not yet")
    assert history.unsent() is None
    empty[0].keep_draft("")
    assert empty[0].draft == ""
    history.delete(empty[0].id)
    empty[0].keep_draft("it is gone")  # never an error


# What releases of version 2 made; ``aside`` came later, without another version.
_ASIDES = """
    CREATE TABLE aside (
        conversation TEXT PRIMARY KEY REFERENCES conversation (id) ON DELETE CASCADE,
        pinned REAL, draft TEXT NOT NULL DEFAULT '', writer TEXT
    );
    INSERT INTO aside VALUES ('c', 1.0, 'not sent', '1@0.00'), ('d', NULL, 'nor this', NULL);
"""


@pytest.mark.parametrize("asides", [_ASIDES, ""], ids=["asides", "before"])
def test_older_file(tmp_path: Path, asides: str) -> None:
    """It opens as before, and the earlier release refuses it from then on."""
    path = tmp_path / "h.db"
    with History(path) as history:
        for id in "cd":
            change = Begin(conversation=id, model="m", system=None, options={})
            with history._database.transaction() as connection:
                change.apply(connection)
            history.open(id).add("user", f"word {id}")
    with closing(sqlite3.connect(path)) as connection:
        old = f"DROP TABLE draft; DROP TABLE debt; DROP TABLE gone; DROP TABLE aside; {asides}"
        connection.executescript(f"{old} PRAGMA user_version = 2")
    with History(path) as history:
        found = {info.id: info for info in history.list("word")}
        assert [found["c"].pinned, found["d"].pinned] == [bool(asides), False]
        drafts = [history.open(id).take_draft() for id in "cd"]
        assert drafts == (["not sent", "nor this"] if asides else ["", ""])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)


# -- the context is full ---------------------------------------------------------------------------


def context(tokens: int) -> PlannedContext:
    return PlannedContext(tokens, 5.0, whole=True, nbytes=tokens * 1000)


@pytest.mark.parametrize(
    ("contexts", "label"),
    [
        ([], None),
        ([context(4096)], None),
        ([context(8192)], "A context of 8,192 tokens: 4.1 MB more"),
        ([context(8192), context(65536)], "A context of 16,384 tokens: 12 MB more"),
    ],
)
def test_ways_out(contexts: list[Any], label: str | None) -> None:
    ways = ways_out(4096, 4096, contexts)
    names = ["oldest", "summary", *(["longer"] if label else []), "new"]
    assert [way.name for way in ways] == names
    assert label in [None, *(way.label for way in ways)]


def test_summary_branch(history: History) -> None:
    talk = asked(history, "q", "a", "too much")
    messages, request = summary_turns(talk.turns, talk.system)
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[-1]["content"] == request
    last = talk.turns[-1]
    asked_for = talk.add("user", request, after=0)
    summary = talk.add("assistant", "s", after=asked_for.id, info={"summary": True})
    talk.add("user", last.content, after=summary.id)
    assert said(talk) == [request, "s", "too much"]
    talk.show(last.id)
    assert said(talk) == ["q", "a", "too much"]
