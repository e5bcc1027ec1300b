"""May a call of a tool run? The window shows all of it.

It may open while the user is typing a message. So that no letter of that decides, keys count once
none has come for a moment.
"""

from __future__ import annotations

import json
from time import monotonic
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.widgets import Static

from localrt.tools.toolbox import Call
from localrt.tui.conversation.tool_calls import Decision
from localrt.tui.screens.dialogs import HEADING, Dialog
from localrt.tui.text import clean

__all__ = ["AskCall"]

_QUIET_SECONDS = 0.5
_DECISIONS: dict[str, Decision] = {"y": "once", "a": "always", "n": "refuse"}


class AskCall(Dialog[Decision]):
    """y runs it, a also runs its tool without a question in this conversation; n and Esc refuse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "leave", show=False, priority=True),
    ]
    DEFAULT_CSS = """
    AskCall VerticalScroll { height: auto; max-height: 50vh; margin: 1 0 0 0; }
    """

    def __init__(self, call: Call) -> None:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False, indent=2)
        question = Content.assemble("The model wants to run ", (clean(call.title), HEADING))
        shown = VerticalScroll(Static(clean(arguments), markup=False))
        keys = "y run once · a always in this conversation · n refuse"
        super().__init__(Static(question, markup=False), shown, keys=keys)
        self._last_key = monotonic()

    def on_key(self, event: Key) -> None:
        """Close with the decision, unless the key may be a letter of a message."""
        before, self._last_key = self._last_key, monotonic()
        decision = _DECISIONS.get(event.key)
        if decision is not None and self._last_key - before >= _QUIET_SECONDS:
            self.dismiss(decision)
