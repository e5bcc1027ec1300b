"""What can be done with a turn: edit, answer again, change branch, copy, unfold.

Each works on the marked turn, or on the last one that it makes sense for. Knows the chat screen's
parts; keys, menu and slash commands all come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrt.tui.answer import Answer
from localrt.tui.blocks import Block, UserTurn
from localrt.tui.dialogs import Choose
from localrt.tui.showing import draft_of

if TYPE_CHECKING:
    from localrt.history import Turn
    from localrt.tui.chat_screen import ChatScreen

__all__ = ["TurnActions"]


class TurnActions:
    """``do`` one by name; ``editing`` is the user's turn that the composer holds, if any."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self.editing: int | None = None
        self._copied: tuple[Block, int] | None = None  # the code block that was copied last

    def do(self, name: str) -> None:
        """``edit``, ``retry``, ``previous``, ``next``, ``copy``, ``code`` or ``fold``."""
        actions = {
            "edit": self.edit,
            "retry": self.retry,
            "previous": lambda: self.branch(-1),
            "next": lambda: self.branch(+1),
            "copy": self.copy,
            "code": self.copy_code,
            "fold": self.fold,
        }
        actions[name]()

    def menu(self) -> None:
        """Offer what can be done with the marked turn."""
        block = self._screen.view.marked
        if block is None:
            return
        options = [("copy", "Copy")]
        if isinstance(block, Answer):
            if block.code:
                options.append(("code", f"Copy its last code block (of {len(block.code)})"))
            options.append(("retry", "Answer again"))
        elif isinstance(block, UserTurn):
            options += [("edit", "Edit and send again"), ("retry", "Answer it again")]
        if block.branches > 1:
            options += [("previous", "Previous branch"), ("next", "Next branch")]
        if block.foldable:
            options.append(("fold", "Show or hide the folded text"))

        def chosen(name: str | None) -> None:
            if name is not None:
                self.do(name)

        self._screen.app.push_screen(Choose("This turn", options), chosen)

    # -- changing --------------------------------------------------------------------------------

    def edit(self) -> None:
        """Put a user's turn into the composer; sending it begins a branch there."""
        if not self._screen.idle("edit"):
            return
        turn = self._question()
        if turn is None:
            self._screen.flash("There is no message to edit")
            return
        self.editing = turn.id
        self._screen.composer.put_draft(draft_of(turn))
        self._screen.view.mark(self._screen.view.turn(turn.id))
        self._screen.show_hint()

    def take_edit(self) -> int | None:
        """The turn that the edited message is to follow, None when none is edited; ends editing."""
        number, self.editing = self.editing, None
        if number is None:
            return None
        turns = self._screen.turns.talk.turns
        for before, turn in zip((None, *turns), turns, strict=False):
            if turn.id == number:
                return before.id if before is not None else 0
        return None

    def stop_editing(self) -> bool:
        """Leave the turn as it is; whether one was being edited."""
        was, self.editing = self.editing is not None, None
        if was:
            self._screen.composer.put("")
        return was

    def retry(self) -> None:
        """Answer a user's turn once more."""
        if not self._screen.idle("retry"):
            return
        turn = self._question()
        if turn is None:
            self._screen.flash("There is no message to answer again")
            return
        self._screen.view.mark(None)
        self._screen.answer_again(turn.id)

    def branch(self, step: int) -> None:
        """Show the next or previous turn in the place of the marked one, or of the last that has
        any.
        """
        if not self._screen.idle("branch"):
            return
        view, talk = self._screen.view, self._screen.turns.talk
        block = view.marked
        if block is None or block.branches < 2:
            block = next((b for b in reversed(view.blocks) if b.branches > 1), None)
        if block is None or block.turn is None:
            self._screen.flash("There are no other branches: Alt+E or Ctrl+R begins one")
            return
        beside = talk.siblings(block.turn)
        if block.turn not in beside or len(beside) < 2:
            return
        number = beside[(beside.index(block.turn) + step) % len(beside)]
        talk.show(number)
        self._screen.turns.sync()
        view.mark(view.turn(number))
        self._screen.count_tokens()
        self._screen.show_hint()

    def _question(self) -> Turn | None:
        """The marked user's turn, the one before the marked answer, or the last."""
        marked = self._screen.view.marked
        found: Turn | None = None
        for turn in self._screen.turns.talk.turns:
            if turn.role == "user":
                found = turn
            if marked is not None and turn.id == marked.turn:
                break
        return found

    # -- looking ---------------------------------------------------------------------------------

    def fold(self) -> None:
        """Show or hide what is folded in a turn."""
        view = self._screen.view
        block = view.marked if view.marked is not None and view.marked.foldable else None
        block = block or next((b for b in reversed(view.blocks) if b.foldable), None)
        if block is None:
            self._screen.flash("Nothing is folded here")
            return
        block.toggle()
        view.changed(block)

    def copy(self) -> None:
        """Copy a turn: as written, an answer without its thinking."""
        view = self._screen.view
        block = view.marked or self._last_answer()
        if block is None:
            self._screen.flash("There is nothing to copy yet")
            return
        text = block.spoken if isinstance(block, Answer) else block.source
        self._screen.app.copy_to_clipboard(text)
        what = "answer" if isinstance(block, Answer) else "message"
        self._screen.flash(f"Copied the {what}: {len(text):,} characters")

    def copy_code(self) -> None:
        """Copy an answer's last code block; again, the one before it."""
        marked = self._screen.view.marked
        block = marked if isinstance(marked, Answer) else self._last_answer(with_code=True)
        code = block.code if block is not None else []
        if block is None or not code:
            self._screen.flash("There is no code block to copy")
            return
        place = len(code) - 1
        if self._copied is not None and self._copied[0] is block:
            place = (self._copied[1] - 1) % len(code)
        self._copied = (block, place)
        language, text = code[place]
        self._screen.app.copy_to_clipboard(text)
        of = f" {place + 1} of {len(code)}" if len(code) > 1 else ""
        lines = text.count("\n")
        self._screen.flash(f"Copied code block{of}: {language or 'text'}, {lines} lines")

    def _last_answer(self, *, with_code: bool = False) -> Answer | None:
        answers = (b for b in reversed(self._screen.view.blocks) if isinstance(b, Answer))
        return next((answer for answer in answers if not with_code or answer.code), None)
