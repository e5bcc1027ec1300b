"""Conversations from files: our own, and what other programs export.

A translator per format gives a conversation OpenAI's form, with ``id`` and ``parent`` in messages
of branches. A value of another type than it should have counts as missing. All texts are read
before anything is written; what could not be taken is told in lines.
"""

from __future__ import annotations

import html
import re
import sqlite3
import uuid
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from localrt.chat_format.thinking import CLOSE, OPEN, THOUGHT_FIELDS
from localrt.common.errors import OptionError, StorageError, reason_of
from localrt.common.files import MOST_BYTES, json_words, parse_json, read_bytes, read_stream
from localrt.common.formatting import one_line
from localrt.common.progress import Progress, ProgressCallback
from localrt.history.database import Database
from localrt.history.operations import Begin, KeepDraft, TurnData, forget, show, title_of
from localrt.history.pictures import LARGEST_PICTURE, KeptPicture, read_picture
from localrt.history.presets import check_options

_MOST_UNPACKED = 1 << 30  # bytes of all texts in a ZIP file
# Of the values of all texts: about 1 GB. Most have those of ChatGPT's exports, 270 words a message.
_MOST_WORDS = 96 << 20  # for 20,000 conversations of 18 messages
_MOST_ENTRIES = 400_000  # conversations, messages of one, lines, or files of an archive
_DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_ROLES, _SYSTEM = ("user", "assistant"), ("system", "developer")
_LARGEST_TIME = 1e11  # in seconds; larger ones are in milliseconds
_PICTURES = "pictures that are not in the file"
_OTHERS = "parts that are neither text nor pictures"
_CALLS, _LINES = "calls and results of tools", "lines or files that are not JSON"
# Each is looked for once from each place: what has no end takes no time.
_FOLD, _FOLD_END = re.compile(r'<details type="(\w{1,99})"[^>]{0,999}>\s*'), "</details>"
_SPACE = re.compile(r"\s*")
_CITATION = re.compile("\ue200[^\ue200\ue201]*\ue201")  # ChatGPT's
_DATED = """
    UPDATE conversation SET title = ?, (created, updated) =
        (SELECT min(created), max(created) FROM turn WHERE turn.conversation = conversation.id)
    WHERE id = ?
"""
_FIRST = """
    SELECT turn.content FROM conversation JOIN turn ON turn.id = first WHERE conversation.id = ?
"""
_Json = dict[str, Any]


def load_file(
    database: Database, path: Path, progress: ProgressCallback | None
) -> tuple[list[str], tuple[str, ...]]:
    """Write the conversations of a file, in one transaction; return their ids, and lines about what
    was left out: see ``History.load_file``.
    """
    left: Counter[str] = Counter()
    with ExitStack() as stack:
        archive, documents = _documents(path, stack, left)
        record = _dict(documents[0]) if archive is None else {}
        if "version" in record and "messages" in record:
            items = [_own(path, record)]
        else:
            items = [each for document in documents for each in _items(document)]
        connection = stack.enter_context(database.transaction())
        found = []
        for done, item in enumerate(items, 1):
            found.append(_written(connection, item, archive, left))
            if progress is not None:
                about = one_line(path.name)
                progress(Progress("import", done, len(items), "conversations", about))
        ids = [*filter(None, found)]
        if not ids:
            raise StorageError(
                f"{path} is not a saved chat, and no export of ChatGPT, LM Studio, llama.cpp or "
                "Open WebUI that has messages"
            )
    return ids, tuple(f"{what}: {count}" for what, count in (+left).items())


def _documents(
    path: Path, stack: ExitStack, left: Counter[str]
) -> tuple[zipfile.ZipFile | None, list[Any]]:
    """The JSON of a file, or of all such files in an archive, which stays open."""
    archive, names, documents = None, [path.name], []
    room, words = _MOST_UNPACKED, _MOST_WORDS
    try:
        if path.is_file() and zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            names = [each for each in archive.namelist() if each.endswith((".json", ".jsonl"))]
            _check_entries(names)
        for name in names:
            data = _member(archive, name, min(room, MOST_BYTES)) if archive else read_bytes(path)
            room -= len(data)
            words -= json_words(data.decode("utf-8", "replace"))
            if words < 0:
                raise _too_many("values")
            try:
                documents.append(_parsed(data, left))
            except ValueError:
                if archive is None:
                    raise
                left[_LINES] += 1
        return archive, documents
    except OptionError as error:
        raise StorageError(error.marked) from error
    except ValueError as error:
        raise StorageError(f"{path} is not a saved chat: it is not JSON") from error
    except (OSError, *_DAMAGED_ZIP) as error:
        raise StorageError(f"{path} cannot be read: {reason_of(error)}") from error


def _parsed(data: bytes, left: Counter[str]) -> Any:
    """A JSON value, or the list of the lists and objects on each line."""
    try:
        value = parse_json(data, _MOST_WORDS)
    except ValueError:
        if data.count(b"\n") > _MOST_ENTRIES:
            raise _too_many("lines") from None
        lines = [*filter(bytes.strip, data.split(b"\n"))]
        values: list[Any] = []
        for line in lines:
            with suppress(ValueError):
                values.append(parse_json(line, _MOST_WORDS))
        if not any(map(_dict, values)) and not any(map(_list, values)):
            raise
        left[_LINES] += len(lines) - len(values)
        value = values
    _check_entries(value)
    return value


def _check_entries(value: Any, depth: int = 8) -> None:
    """Refuse a list or object with too many entries: each becomes more than its words."""
    entries = value.values() if isinstance(value, dict) else _list(value)
    if len(entries) > _MOST_ENTRIES:
        raise _too_many("entries in a list")
    for each in entries if depth else ():
        _check_entries(each, depth - 1)


def _too_many(what: str) -> StorageError:
    return StorageError(f"it has too many {what}: export fewer conversations at once")


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    with archive.open(name) as stream:
        return read_stream(cast(BinaryIO, stream), name, most)


# -- formats -------------------------------------------------------------------------------------


def _items(document: Any) -> list[_Json]:
    """The conversations of a document in OpenAI's form."""
    entries = [document] if isinstance(document, dict) else _list(document)
    if entries and all("role" in _dict(each) for each in entries):
        return [{"messages": entries}]
    items: list[_Json] = []
    for each in entries:
        item = {"messages": each} if isinstance(each, list) else _dict(each)
        if item.get("type") == "session":  # of llama.cpp, a line a message
            items.append({"conv": item, "messages": []})
        elif item.get("type") == "message" and items:
            _list(items[-1].get("messages")).append(item.get("message"))
        elif "mapping" in item:
            items.append(_chatgpt(item))
        elif "chat" in item or "history" in item:
            items.append(_open_webui(_dict(item.get("chat", item))))
        elif any("versions" in _dict(message) for message in _list(item.get("messages"))):
            items.append(_lm_studio(item))
        else:
            items.append(item)
    return items


def _own(path: Path, record: _Json) -> _Json:
    """A chat that we saved or exported, whose messages and options must be right."""
    from localrt.chat import check_saved  # brings models

    model, messages, options = check_saved(record, path)
    check_options(options)
    return {**record, "model": model, "messages": messages, "options": options}


def _open_webui(chat: _Json) -> _Json:
    history = _dict(chat.get("history"))
    messages = [*_dict(history.get("messages")).values()] or _list(chat.get("messages"))
    return {
        "title": chat.get("title"),
        "system": _dict(chat.get("params")).get("system"),
        "model": next(iter(_list(chat.get("models"))), ""),
        "messages": [_open_webui_message(_dict(message)) for message in messages],
        "current": history.get("currentId"),
    }


def _open_webui_message(message: _Json) -> _Json:
    """Thoughts and calls are items of ``output``, in older exports folds in the text."""
    text = _text(message.get("content"))
    said: dict[str, list[str]] = {"message": [], "reasoning": []}
    for item in map(_dict, _list(message.get("output"))):
        said.setdefault(_text(item.get("type")), []).append(_joined(item))
    folds, text = _folds(text)
    for kind, body in folds if not message.get("output") else ():
        lines = html.unescape(body).strip().splitlines()
        said.setdefault(kind, []).append("\n".join(re.sub("^> ?", "", line) for line in lines))
    text = text or "\n".join(said.pop("message"))
    thinking = "\n\n".join(said.pop("reasoning"))
    calls: list[_Json] = [{} for kind, each in said.items() if kind != "message" for _ in each]
    return {**message, "content": [text, *calls], "thinking": thinking}


def _folds(text: str) -> tuple[list[tuple[str, str]], str]:
    """The kinds and bodies of a text's folds, and the text without them."""
    folds, rest, at = list[tuple[str, str]](), list[str](), 0
    while (begun := _FOLD.search(text, at)) and (end := text.find(_FOLD_END, begun.end())) >= 0:
        body = text[begun.end() : end]
        if body.startswith("<summary>") and (summary := body.find("</summary>")) >= 0:
            body = body[summary + len("</summary>") :]
        folds.append((begun[1], body))
        rest.append(text[at : begun.start()])
        after = _SPACE.match(text, end + len(_FOLD_END))
        assert after is not None, "it may be empty"
        at = after.end()
    return folds, "".join([*rest, text[at:]])


def _chatgpt(item: _Json) -> _Json:
    messages = []
    for id, node in _dict(item.get("mapping")).items():
        message = _dict(_dict(node).get("message"))
        content, about = _dict(message.get("content")), _dict(message.get("metadata"))
        role = _dict(message.get("author")).get("role")
        parts = [*_list(content.get("parts"))]
        if content.get("content_type") == "code":
            parts = [f"```{_text(content.get('language'))}\n{_text(content.get('text'))}\n```"]
        if role == "tool" and any(map(_dict, parts)):
            role = "assistant"  # a picture that was drawn
        if role == "system" or about.get("is_visually_hidden_from_conversation"):
            role, parts = "system", []
        thoughts = [_text(_dict(each).get("content")) for each in _list(content.get("thoughts"))]
        messages.append(
            {
                "id": id,
                "parent": _dict(node).get("parent"),
                "role": role,
                "content": [_CITATION.sub("", p) if isinstance(p, str) else p for p in parts],
                "thinking": "\n\n".join(thoughts),
                "created": message.get("create_time"),
                "model": about.get("model_slug"),
            }
        )
    return {"title": item.get("title"), "messages": messages, "current": item.get("current_node")}


def _lm_studio(item: _Json) -> _Json:
    """Each version of a message follows the selected one of the message before."""
    fields = map(_dict, _list(_dict(item.get("perChatPredictionConfig")).get("fields")))
    systems = [e.get("value") for e in fields if e.get("key") == "llm.prediction.systemPrompt"]
    messages: list[_Json] = []
    last = ""
    for number, message in enumerate(map(_dict, _list(item.get("messages")))):
        versions = _list(message.get("versions"))
        for place, version in enumerate(map(_dict, versions)):
            parts: list[Any] = []
            thoughts: list[Any] = []
            for step in (version, *map(_dict, _list(version.get("steps")))):
                thinks = _dict(step.get("style")).get("type") == "thinking"
                (thoughts if thinks else parts).extend(_list(step.get("content")))
            messages.append(
                {
                    "id": f"{number}.{place}",
                    "parent": last,
                    "role": version.get("role"),
                    "content": parts,
                    "thinking": _joined({"content": thoughts}, "\n\n"),
                    "created": item.get("createdAt"),
                }
            )
        selected = message.get("currentlySelected")
        last = f"{number}.{selected if selected in range(len(versions)) else 0}"
    return {
        "title": item.get("name"),
        "system": next(filter(None, systems), item.get("systemPrompt")),
        "model": _dict(item.get("lastUsedModel")).get("identifier"),
        "messages": messages,
        "current": last,
    }


# -- one form ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Message:
    id: str
    parent: str
    role: str
    parts: list[_Json]
    thought: str
    created: float  # in seconds since the epoch; 0 if the file has no time
    calls: list[_Json]
    call_id: str


def _written(
    connection: sqlite3.Connection,
    item: _Json,
    archive: zipfile.ZipFile | None,
    left: Counter[str],
) -> str | None:
    """Write a conversation in OpenAI's form; return its id, or None if it has no messages."""
    about, entries = _dict(item.get("conv")) or item, [*map(_dict, _list(item.get("messages")))]
    messages: dict[str, _Message] = {}
    last = ""
    for number, entry in enumerate(entries, 1):
        message = _message(entry, number, last)
        messages[message.id], last = message, message.id
    if not any(each.parts and each.role in _ROLES for each in messages.values()):
        return None
    options = _dict(item.get("options"))
    try:
        check_options(options)
    except OptionError:
        options = {}
    said = [each.parts for each in messages.values() if each.role in _SYSTEM]
    systems = [_text(item.get("system")), *(part.get("text", "") for each in said for part in each)]
    id = uuid.uuid4().hex
    Begin(
        conversation=id,
        model=next(filter(None, (_text(each.get("model")) for each in (item, *entries))), ""),
        system="\n\n".join(filter(None, systems)) or None,
        options=options,
    ).apply(connection)
    numbers = _write_turns(connection, id, messages, archive, left)
    shown = numbers.get(str(about.get("currNode") or about.get("current") or last))
    shown = shown or max(filter(None, numbers.values()), default=None)
    if shown is None:  # the messages follow each other in a circle
        forget(connection, id)
        return None
    show(connection, id, shown)
    first = connection.execute(_FIRST, (id,)).fetchone()["content"]
    title = title_of(_text(about.get("title", about.get("name"))).strip() or first)
    connection.execute(_DATED, (title, id))
    if draft := _text(item.get("draft")):
        KeepDraft(conversation=id, writer="", text=draft).apply(connection)
    return id


def _write_turns(
    connection: sqlite3.Connection,
    conversation: str,
    messages: Mapping[str, _Message],
    archive: zipfile.ZipFile | None,
    left: Counter[str],
) -> dict[str, int | None]:
    """Write the turns, parents first. For each message the number of its turn, or of the one above
    it.
    """
    children: dict[str | None, list[_Message]] = defaultdict(list)
    for message in messages.values():
        children[message.parent if message.parent in messages else None].append(message)
    calls = {call["id"]: call["function"] for each in messages.values() for call in each.calls}
    numbers: dict[str, int | None] = {}
    thoughts: dict[str, str] = {}  # that precede the answer which follows a message
    waiting = children[None][::-1]
    while waiting:
        message = waiting.pop()
        waiting += children[message.id][::-1]
        above = numbers[message.id] = numbers.get(message.parent)
        before = thoughts.get(message.parent)
        thought = "\n\n".join(filter(None, (before, message.thought)))
        info = _info(message, calls, left)
        if info is None or not (message.parts or info or not children[message.id]):
            thoughts[message.id] = thought
            continue
        content, pictures = _content(message, thought, archive, left)
        turn = TurnData(role=message.role, content=content, parent=above, info=info)
        turn = replace(turn, pictures=pictures, created=message.created or turn.created)
        number = numbers[message.id] = turn.add(connection, conversation)
        # So that each branch is shown to its end.
        connection.execute("UPDATE turn SET next = ? WHERE id = ?", (number, above))
    return numbers


def _info(
    message: _Message, calls: Mapping[str, _Json], left: Counter[str]
) -> dict[str, object] | None:
    """What the turn of a message keeps besides its content; None if it is no turn."""
    if message.role == "tool" and message.call_id in calls:
        function = calls[message.call_id]
        title = {"tool_call_id": message.call_id, "title": function.get("name", "")}
        return {**title, "arguments": function.get("arguments", "")}
    if message.role not in _ROLES:
        kind = _CALLS if message.role == "tool" else f"messages of role {message.role:.20}"
        left[kind] += message.role == "tool" or bool(message.parts and message.role not in _SYSTEM)
        return None
    if not (message.parts or message.thought or message.calls):
        return None
    return {"tool_calls": message.calls} if message.calls else {}


def _content(
    message: _Message, thought: str, archive: zipfile.ZipFile | None, left: Counter[str]
) -> tuple[str, list[KeptPicture]]:
    thinks = thought and message.role == "assistant"
    text = f"{OPEN}{thought}{CLOSE}\n\n" if thinks else ""
    pictures = []
    for part in message.parts:
        text += part.get("text", "")
        picture = _picture(part, len(text), archive) if "image" in part else None
        if picture is not None:
            pictures.append(picture)
        elif "text" not in part:
            left[_PICTURES if "image" in part else _OTHERS] += 1
    return text, pictures


def _picture(part: _Json, place: int, archive: zipfile.ZipFile | None) -> KeptPicture | None:
    """The picture in a data URI, or in the archive."""
    source, name = part["image"], part["name"]
    try:
        if source.startswith("data:"):
            return read_picture(source, name=name, place=place)
        id = source.rpartition("/")[2]
        for member in archive.namelist() if archive is not None and id else ():
            if archive is not None and id in member:
                data = _member(archive, member, LARGEST_PICTURE)
                return read_picture(data, name=Path(member).name, place=place)
    except (OptionError, OSError, *_DAMAGED_ZIP):
        pass
    return None


def _message(each: _Json, number: int, last: str) -> _Message:
    """A message of any form, number ``number``, by default after message ``last``."""
    content = each.get("content")
    parts = [content] if isinstance(content, str) else _list(content)
    parts = [*parts, *_list(each.get("extra")), *_list(each.get("files"))]
    thoughts = [_text(each.get(name)) for name in (*THOUGHT_FIELDS, "reasoningContent")]
    calls = each.get("tool_calls", each.get("toolCalls"))
    if isinstance(calls, str):
        with suppress(ValueError):
            calls = parse_json(calls)
    call_id = each.get("tool_call_id", each.get("toolCallId"))
    created = each.get("created", each.get("timestamp"))
    created = created if isinstance(created, int | float) and 0 < created < 1e15 else 0.0
    return _Message(
        id=str(each.get("id") or number),
        parent=str(each.get("parent", each.get("parentId", last))),
        role=_text(each.get("role")),
        parts=[*map(_part, parts)],
        thought=next(filter(None, thoughts), ""),
        created=created / 1000 if created > _LARGEST_TIME else created,
        calls=[call for call in _list(calls) if _is_call(call)],
        call_id=_text(call_id),
    )


def _part(part: Any) -> _Json:
    """A text, or a picture and its name; empty for what is neither."""
    from localrt.documents.reading import fenced

    match part:
        case str(text) | {"text": str(text)}:
            return {"text": text}
        case {"name": str(name), "content": str(text)}:
            return {"text": f"\n\n{fenced(f'{name}:', text)}"}
        case (
            {"image_url": {"url": str(picture)}}
            | {"image_url": str(picture)}
            | {"image": str(picture)}
            | {"base64Url": str(picture)}
            | {"asset_pointer": str(picture)}
            | {"fileType": "image", "fileIdentifier": str(picture)}
            | {"type": "image", "url": str(picture)}
        ):
            return {"image": picture, "name": _text(part.get("name"))}
    return {}


def _joined(item: _Json, gap: str = "") -> str:
    """The texts of an item's content."""
    return gap.join(_text(_dict(part).get("text")) for part in _list(item.get("content")))


def _is_call(call: object) -> bool:
    match call:
        case {"id": str(), "function": {"name": str()}}:
            return True
    return False


def _dict(value: object) -> _Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
