"""The line above the composer, one thing at a time; what can be done with a turn, in words."""

from __future__ import annotations

from textual.timer import Timer
from textual.widgets import Static

from localrt.tui.chat.answer import Answer
from localrt.tui.chat.blocks import Block, UserTurn

_CONFIRM_SECONDS = 2.0  # in which a second Ctrl+C quits
_FLASH_SECONDS = 3.0


class HintLine(Static):
    """Shows ``hint``, unless a question or a flash is there for a moment."""

    def __init__(self) -> None:
        super().__init__(id="hint", markup=False)
        self._hint = self._question = self._flash = self._shown = ""
        self._ends: dict[str, Timer] = {}

    @property
    def confirming(self) -> bool:
        """Whether the same key once more means it."""
        return bool(self._question)

    def confirm(self, question: str) -> None:
        """Ask for the same key again, for two seconds."""
        self._question = question
        self._show_for("_question", _CONFIRM_SECONDS)

    def flash(self, text: str) -> None:
        """Show a line for three seconds."""
        self._flash = text
        self._show_for("_flash", _FLASH_SECONDS)

    def show(self, hint: str) -> None:
        """What to show from now on; empty for nothing."""
        self._hint = hint
        text = self._question or self._flash or hint
        if text != self._shown:  # an update lays the whole screen out again
            self._shown = text
            self.update(text)

    def _show_for(self, name: str, seconds: float) -> None:
        if name in self._ends:
            self._ends[name].stop()
        self._ends[name] = self.set_timer(seconds, lambda: self._end(name))
        self.show(self._hint)

    def _end(self, name: str) -> None:
        setattr(self, name, "")
        self.show(self._hint)


def waiting_hint(count: int, *, elsewhere: bool = False) -> str:
    """For messages that wait in line; ``elsewhere``: for the answer in another window."""
    reason = " for the answer in another window" if elsewhere else ""
    if count == 1:
        return f"1 message waits{reason}: Esc takes it back"
    return f"{count} messages wait{reason}: Esc takes them back"


def turn_hint(block: Block) -> str:
    """What can be done with the marked turn."""
    parts = ["Enter menu", "Alt+C copy"]
    parts.append("Alt+E edit" if isinstance(block, UserTurn) else "Ctrl+R again")
    if block.branches > 1:
        parts.append(f"Alt+←→ branch {block.branch}/{block.branches}")
    if block.foldable:
        parts.append("Ctrl+T unfold")
    return " · ".join([*parts, "Esc"])


def turn_menu(block: Block) -> list[tuple[str, str]]:
    """Actions that make sense for a turn, and what the menu calls them."""
    menu = [("copy", "Copy")]
    if isinstance(block, Answer):
        if block.code:
            menu.append(("copy_code", f"Copy its last code block (of {len(block.code)})"))
        menu.append(("retry", "Answer again"))
    elif isinstance(block, UserTurn):
        menu += [("edit", "Edit and send again"), ("retry", "Answer it again")]
    if block.branches > 1:
        menu += [("branch(-1)", "Previous branch"), ("branch(1)", "Next branch")]
    if block.foldable:
        menu.append(("fold", "Show or hide the folded text"))
    return menu
