"""Chats that others saved, opened as conversations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from localrt.chat import ChatSession
from localrt.common.errors import OptionError, StorageError
from localrt.engine.options import read_options
from localrt.tui.conversation.state import ChatState
from tests.mutations import changed, is_line
from tests.tui.fakes import FakeModel

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
SAVED: dict[str, Any] = {
    "version": 1,
    "model": "m",
    "options": {"temperature": 0.5},
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
}


class _Model(FakeModel):
    check = staticmethod(read_options)

    def open_chat(self) -> Any:
        return SimpleNamespace(tokens=0, cancel=lambda: None, close=lambda: None)

    def load_chat(self, path: str | Path) -> Any:
        return ChatSession.load(cast(Any, self), path)


def loaded(path: Path) -> list[Any]:
    """The messages of a saved chat, once the app has opened it."""
    state = ChatState(None, model="m", system=None, options={}, on_problem=lambda line: None)
    state._model = cast(Any, _Model())
    state.load(path)
    try:
        return state.conversation.messages()
    finally:
        state.history.close()


def test_a_saved_chat(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SAVED))
    assert [each["role"] for each in loaded(tmp_path / "a.json")] == [
        *("system", "user", "assistant", "tool")
    ]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("messages", 1, "content"), [3]),
        (("messages", 1, "content"), {"a": 1}),
        (("messages", 2, "tool_calls"), 3),
        (("messages", 2, "tool_calls", 0), 3),
        (("messages", 3, "tool_call_id"), []),
    ],
)
def test_what_is_malformed_is_one_line(tmp_path: Path, place: Any, value: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(changed(SAVED, [(place, value)])))
    with pytest.raises(StorageError, match="is not a saved chat: ") as caught:
        loaded(path)
    assert is_line(str(caught.value))


@pytest.mark.parametrize("options", [{"host": 1}, {"self": 1}, {"temperature": "hot"}])
def test_options_are_checked(tmp_path: Path, options: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**SAVED, "options": options}))
    with pytest.raises(OptionError, match=next(iter(options))):
        loaded(tmp_path / "a.json")


def test_deep_nesting_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(StorageError, match="is not JSON"):
        loaded(tmp_path / "a.json")
