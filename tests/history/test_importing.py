"""Conversations from files of this program and of others; ``tests/data/exports`` has them."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrt import Conversation, History, StorageError
from localrt.common.files import json_words
from localrt.history import importing
from localrt.history.export import as_json
from tests.history.test_history import history
from tests.mutations import changed, is_line, mutated, refusal
from tests.picture_files import READ

__all__ = ["history"]  # a fixture

EXPORTS = Path(__file__).parents[1] / "data" / "exports"
NOT_TEXT = "parts that are neither text nor pictures"
NO_PICTURE = "pictures that are not in the file: 1"
RESULTS = "calls and results of tools: 1"
# file: titles; turns of all branches, and those shown as role, thought and text; what is left out
FILES: dict[str, tuple[list[str], int, list[str], tuple[str, ...]]] = {
    "openai.jsonl": (
        ["Capital of France?", "What is this?"],
        4,
        ["user What is this?", "assistant ", "tool red", "assistant (It says red.) A red dot."],
        (NO_PICTURE, f"{NOT_TEXT}: 1"),
    ),
    "chatgpt.json": (
        ["Slow query"],
        6,
        [
            "user What is slow here?",
            "assistant (A scan of the table.) Both: use an index.",
            "user Show me.",
            "assistant ```python\nprint(1)\n```",
            "assistant It prints 1.",
        ],
        (NO_PICTURE, RESULTS),
    ),
    "tea.conversation.json": (
        ["Tea"],
        5,
        [
            "user How long does tea steep?",
            "assistant Two to five minutes.",
            "user And this one?",
            "assistant Five.",
        ],
        (NO_PICTURE,),
    ),
    "llama_cpp.jsonl": (
        ["Ships"],
        5,
        [
            "user Fastest ship in this list?\n\nships.txt:\n```\nArk\nBeagle\n```\n",
            "assistant (I should look.) ",
            "tool 8 knots",
            "assistant Beagle",
        ],
        (f"{NOT_TEXT}: 1",),
    ),
    "llama_cpp_page.json": (
        ["How long does tea steep?"],
        5,
        [
            "user How long does tea steep?",
            "assistant Tea is typically brewed to a specific length and is typically 10 to",
            "user And green tea?",
            "assistant Green tea is a type of tea that is made from the leaves of the Cam",
        ],
        (),
    ),
    "open_webui.json": (
        ["Tea"],
        5,
        [
            "user How long does tea steep?",
            "assistant (Thought number 1.\nIt has <two> lines.) Answer 1 with a < sign.",
            "user And coffee?",
            "assistant (Thought number 3.\nIt has <two> lines.) Answer 3 with a < sign.",
        ],
        (),
    ),
    "open_webui_folds.json": (
        ["New", "Greeting"],
        3,
        ["user hi", "assistant (A <b>.\nSecond.) Hello!"],
        (f"{NOT_TEXT}: 3",),
    ),
}
FILES["llama_cpp_2025.json"] = FILES["llama_cpp.jsonl"]


def shown(conversation: Conversation) -> list[str]:
    lines = []
    for turn in conversation.turns:
        text = turn.content.replace("<think>", "(").replace("</think>\n\n", ") ")
        lines.append(f"{turn.role} {text}")
    return lines


@pytest.mark.parametrize("name", FILES)
def test_exports(history: History, name: str) -> None:
    titles, turns, lines, left_out = FILES[name]
    loaded = history.load_file(EXPORTS / name)
    last = loaded.conversations[-1]
    assert ([each.title for each in loaded.conversations], shown(last)) == (titles, lines)
    assert sorted(loaded.left_out) == sorted(left_out)
    assert {each.id: each.turns for each in history.list()}[last.id] == turns


def test_facts(history: History) -> None:
    """System prompts, models, times, pictures and calls."""
    of = {name: history.load_file(EXPORTS / name).conversations[-1] for name in FILES}
    assert of["tea.conversation.json"].system == "You know tea."
    assert of["llama_cpp.jsonl"].system == "Answer in one word."
    assert of["open_webui_folds.json"].system == "S"
    models = [each.model for each in of.values()]
    page = "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert models == ["", "gpt-5", "qwen3-4b", "smollm2", page, "scripted", "llama3", "smollm2"]
    assert of["tea.conversation.json"].created == 1727347312.345
    assert of["chatgpt.json"].updated == 1736209450.0
    for name in ("openai.jsonl", "llama_cpp.jsonl", "open_webui_folds.json"):
        (picture,) = of[name].turns[0].pictures
        assert (picture.width, picture.data[:4]) == (1, b"\x89PNG")
    call, result = of["llama_cpp_2025.json"].turns[1:3]
    assert result.info["tool_call_id"] == call.info["tool_calls"][0]["id"]
    assert (result.info["title"], result.info["arguments"]) == ("speed", '{"ship": "Beagle"}')


def test_another_branch_is_shown_to_its_end(history: History, tmp_path: Path) -> None:
    document = json.loads((EXPORTS / "chatgpt.json").read_text("utf-8"))
    path = tmp_path / "a.json"
    path.write_text(json.dumps(changed(document, [((0, "current_node"), "a0")])))
    talk = history.load_file(path).conversations[0]
    assert shown(talk)[1:] == ["assistant Nothing."]
    talk.show(next(each for each in talk.siblings(talk.turns[1].id) if each != talk.turns[1].id))
    assert shown(talk) == FILES["chatgpt.json"][2]


def test_archive_with_pictures(history: History, tmp_path: Path) -> None:
    path = tmp_path / "chatgpt.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(EXPORTS / "chatgpt.json", "conversations-000.json")
        archive.writestr("file-AbC123-plan.png", next(iter(READ.values()))[0])
        archive.writestr("user.json", '{"id": "user-1"}')
        archive.writestr("broken.json", "{")
    loaded = history.load_file(path)
    assert loaded.conversations[0].turns[0].pictures[0].name == "file-AbC123-plan.png"
    assert loaded.left_out == ("lines or files that are not JSON: 1", RESULTS)


def test_no_file_beside_is_read(history: History, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(next(iter(READ.values()))[0])
    part = {"type": "image", "image": str(tmp_path / "a.png")}
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"role": "user", "content": ["Look: ", part]}]))
    loaded = history.load_file(path)
    assert loaded.conversations[0].turns[0].pictures == ()
    assert loaded.left_out == (NO_PICTURE,)


def test_own_export(history: History, tmp_path: Path) -> None:
    talk = history.load_file(EXPORTS / "llama_cpp.jsonl").conversations[0]
    talk.set(options={"seed": 3})
    path = tmp_path / "a.json"
    path.write_text(as_json(talk, talk.turns))
    again = history.load_file(path)
    (same,) = again.conversations
    assert (same.title, same.model, same.system) == (talk.title, talk.model, talk.system)
    assert (same.options, same.messages, again.left_out) == ({"seed": 3}, talk.messages, ())


def broken_files() -> Iterator[bytes]:
    """Each export cut, and with other values."""
    draw = random.Random(0)
    files = [b"\n" + (EXPORTS / name).read_bytes() for name in FILES]  # the first line stays
    for data in files:
        yield from (data[: len(data) * cut // 50] for cut in range(50))
        # ``mutated`` keeps the first line.
        yield from (
            mutated(b"\n" + data, draw, [b"\n" + each for each in files]) for _ in range(60)
        )


def test_broken_files(history: History, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data in broken_files():
        path.write_bytes(data)
        assert is_line(refusal(lambda: history.load_file(path)))
    assert len(history.list(limit=10_000)) > 100
    for each in history.list(limit=10_000):
        assert history.open(each.id).turns, each


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06", b"hello", b"[]", b'{"a": 1}', b"[" * 10**5])
def test_other_files(history: History, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    with pytest.raises(StorageError, match="is not a saved chat"):
        history.load_file(path)
    path.write_text('[{"role": "user", "content": "q", "id": "a", "parent": "a"}]')
    with pytest.raises(StorageError, match="is not a saved chat"):
        history.load_file(path)
    with pytest.raises(StorageError, match="does not exist"):
        history.load_file(tmp_path / "b.json")


MANY = 500  # for the limits of these tests
# what a file has too much of: the file in the archive, or two of them
BOMBS = {
    "values": (["conversations.json"], b"[%s{}]" % (b"{}," * 700)),
    "values of an object": (["a.json"], b'{"mapping": {"a": %s1}}' % (b'{"b":' * 600 + b"}" * 600)),
    "values of two files": (["a.json", "b.json"], b"[%s]" % b",".join([b"[[[[]]]]"] * 100)),
    "entries in a list": (["a.json"], b"[%s1]" % (b"1," * MANY)),
    "entries in a list of messages": (["a.json"], b'[{"messages": [%s1]}]' % (b"1," * MANY)),
    "lines": (["a.jsonl"], b"1\n" * (MANY + 1)),
    "entries in a list of files": ([f"{number}.json" for number in range(MANY + 1)], b"1"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_too_many_values(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A small archive can hold more than fits in the memory."""
    names, data = BOMBS[what]
    monkeypatch.setattr(importing, "_MOST_WORDS", 5000)
    monkeypatch.setattr(importing, "_MOST_ENTRIES", MANY)
    plain, packed = tmp_path / "a.json", tmp_path / "a.zip"
    plain.write_bytes(data)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, data)
    for path in (packed, plain) if len(names) == 1 else (packed,):
        assert refusal(lambda path=path: history.load_file(path)) == (  # type: ignore[misc]
            f"{path} cannot be read: it has too many {what.partition(' of ')[0]}: export fewer "
            "conversations at once"
        )
    assert history.list() == []


def test_room_for_real_exports() -> None:
    """20,000 conversations of 18 messages in ChatGPT's form, which has most values."""
    text = (EXPORTS / "chatgpt.json").read_text("utf-8")
    messages = sum(len(each["mapping"]) for each in json.loads(text))
    assert json_words(text) / messages * 18 * 20_000 < importing._MOST_WORDS


def test_unpacked_size(history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_MOST_UNPACKED", 3000)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", b"[" + b" " * 10_000 + b"]")
    with pytest.raises(StorageError, match="too large"):
        history.load_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "\ue200" * 200_000,
        '<details type="a">' * 50_000,
        '<details type="a" ' * 50_000,
        '<details type="a"><summary>' * 50_000,
    ],
    ids=["citations", "folds", "half folds", "summaries"],
)
def test_marks_without_an_end(history: History, tmp_path: Path, text: str) -> None:
    """Each was looked for to the end of the text: minutes."""
    path = tmp_path / "export.json"
    node = {"message": {"author": {"role": "user"}, "content": {"parts": [text]}}}
    chat = {"history": {"messages": {"1": {"id": "1", "role": "user", "content": text}}}}
    path.write_text(json.dumps([{"mapping": {"1": node}}, {"chat": chat}]))
    found = history.load_file(path).conversations
    assert [talk.turns[0].content for talk in found] == [text, text]
