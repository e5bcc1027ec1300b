"""Messages in line, and the answer to the one that is being answered.

Puts turns on screen and into the history as they move on: waiting, sent, answered, stopped,
refused. Knows the view, one conversation and one generation at a time; what the rest of the screen
shows is the app's business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localrt.errors import LocalrtError
from localrt.tui.chips import Draft
from localrt.tui.pace import Pace
from localrt.tui.showing import block_of, ending
from localrt.tui.text import one_line
from localrt.tui.work import Generation, News

if TYPE_CHECKING:
    from localrt import ChatSession
    from localrt.tui.answer import Answer
    from localrt.tui.blocks import UserTurn
    from localrt.tui.conversation import Conversation
    from localrt.tui.talk import Talk, Writer

__all__ = ["Turns", "explained"]


@dataclass(slots=True)
class _Waiting:
    block: UserTurn
    draft: Draft
    after: int | None  # the turn that it follows; None: whatever is last by then


@dataclass(slots=True)
class _Running:
    before: int | None  # the answer that was shown, when it is answered again
    block: UserTurn | None  # of a new message, None when an old one is answered again
    draft: Draft
    answer: Answer
    writer: Writer
    work: Generation
    began: float
    thought_s: float | None = None


class Turns:
    """A queue of messages over a view and a ``Talk``."""

    def __init__(self, view: Conversation, talk: Talk) -> None:
        self.talk = talk
        self._view = view
        self._line: deque[_Waiting] = deque()
        self._now: _Running | None = None
        self._pace = Pace()

    @property
    def answering(self) -> bool:
        """Whether a message is being answered."""
        return self._now is not None

    @property
    def waiting(self) -> int:
        """How many messages wait."""
        return len(self._line)

    def add(self, draft: Draft, *, waiting: bool, after: int | None = None) -> None:
        """Put a message at the end of the line; ``waiting`` shows it as not sent yet.

        ``after`` is the turn that it follows, when it is not the last: it begins a branch there.
        """
        if after is not None:
            self._show_until(after)
        block = self._view.add_user(draft.text, waiting=waiting, folds=draft.folds)
        self._line.append(_Waiting(block, draft, after))

    def send_next(self, chat: ChatSession) -> bool:
        """Send the first in line, unless there is none or one is being answered."""
        if self.answering or not self._line:
            return False
        first = self._line.popleft()
        after = self.talk.end if first.after is None else first.after
        self._show_until(after)
        folds = [[fold.start, fold.end, fold.label] for fold in first.draft.folds]
        info = {"folds": folds} if folds else {}
        turn = self.talk.add("user", first.draft.text, after=after, info=info)
        block = first.block
        block.turn, block.branch, block.branches = turn.id, turn.branch, turn.branches
        block.sent()
        self._view.changed(block)
        self._start(chat, turn.id, first.draft, block)
        return True

    def answer_again(self, chat: ChatSession, question: int) -> None:
        """Answer a user's turn once more: a branch beside its answers."""
        turns = self.talk.turns
        place = next(place for place, turn in enumerate(turns) if turn.id == question)
        before = turns[place + 1].id if place + 1 < len(turns) else None
        self._show_until(question)
        self._start(chat, question, Draft(turns[place].content), None, before=before)

    def look(self) -> News | None:
        """What came since the last look, drawn; None when there is nothing to do yet."""
        now = self._now
        if now is None or not (now.work.done or self._pace.due()):
            return None
        news = now.work.take()
        if news.text:
            now.answer.write(news.text)
            self._time_thinking(now)
            self._view.changed(now.answer)
        return news

    def end(self, news: News, *, full: bool) -> list[Draft]:
        """Close the answer that ``news`` is the last of.

        Args:
            news: with ``done`` set.
            full: whether the context is.

        Returns:
            Messages that were not answered: the refused one, and those behind it.
        """
        now, self._now = self._now, None
        assert now is not None
        answer = now.answer
        text = bool(answer.source)
        state = "failed" if news.error is not None else "done"
        if news.finish_reason == "cancelled":
            state = "cancelled"
        self.talk.finish(now.writer, state, _info(news, now.thought_s))
        if news.error is not None and not text:
            self._view.drop(answer)
            self._view.add_notice(explained(news.error), "error")
            if now.block is None:
                if now.before is not None:
                    self.talk.show(now.before)
                self.sync()
                return self.take_back()
            self._view.drop(now.block)
            return [now.draft, *self.take_back()]
        answer.mark = ending(state, news.finish_reason, full=full)
        if not text and not answer.mark:
            answer.mark = "no answer"
        answer.finish()
        self._view.changed(answer)
        if news.error is not None:
            self._view.add_notice(explained(news.error), "error", after=answer)
        return []

    def take_back(self) -> list[Draft]:
        """Remove the messages that wait, and return them."""
        drafts = [waiting.draft for waiting in self._line]
        for waiting in self._line:
            self._view.drop(waiting.block)
        self._line.clear()
        return drafts

    def cancel(self) -> None:
        """Stop the answer; its text so far is kept."""
        if self._now is not None:
            self._now.work.cancel()

    def join(self, seconds: float) -> bool:
        """Wait for the answering thread; whether it ended."""
        return self._now is None or self._now.work.join(seconds)

    def close(self) -> None:
        """The app ends: what is written so far is the answer."""
        now, self._now = self._now, None
        if now is not None:
            news = now.work.take()
            self.talk.finish(now.writer, "cancelled", _info(news, now.thought_s))

    def sync(self) -> None:
        """Show the branch that the conversation shows."""
        view, turns = self._view, self.talk.turns
        shown = {block.turn: block for block in view.blocks if block.turn is not None}
        numbers = {turn.id for turn in turns}
        view.drop(*(block for number, block in shown.items() if number not in numbers))
        for turn in turns:
            block = shown.get(turn.id)
            if block is not None and block.branches != turn.branches:
                block.branch, block.branches = turn.branch, turn.branches
                block.changed()
                view.changed(block)
        view.add(*(block_of(turn) for turn in turns if turn.id not in shown))

    def moved(self, numbers: Mapping[int, int]) -> None:
        """Turns have other numbers now."""
        for block in self._view.blocks:
            if block.turn is not None:
                block.turn = numbers.get(block.turn, block.turn)

    def _start(
        self,
        chat: ChatSession,
        question: int,
        draft: Draft,
        block: UserTurn | None,
        *,
        before: int | None = None,
    ) -> None:
        chat.messages = self.talk.messages(before=question)
        writer = self.talk.answer(after=question)
        answer = self._view.add_answer(after=block or self._view.turn(question))
        answer.turn = writer.turn
        beside = self.talk.siblings(writer.turn)
        answer.branch = answer.branches = max(len(beside), 1)
        self._pace = Pace()
        work = Generation(chat, draft.text, writer)
        self._now = _Running(before, block, draft, answer, writer, work, time.monotonic())
        work.start()

    def _show_until(self, last: int) -> None:
        """Take turns off the screen that do not lead to turn ``last``: they are another branch."""
        kept = set[int]()
        for turn in self.talk.turns:
            if last == 0:
                break
            kept.add(turn.id)
            if turn.id == last:
                break
        view = self._view
        view.drop(*(b for b in view.blocks if b.turn is not None and b.turn not in kept))

    def _time_thinking(self, now: _Running) -> None:
        if now.thought_s is None and now.answer.foldable:
            seconds = time.monotonic() - now.began
            now.answer.thinking_s = seconds
            if not now.answer.thinking:
                now.thought_s = seconds


def _info(news: News, thought_s: float | None) -> dict[str, Any]:
    info: dict[str, Any] = {"finish_reason": news.finish_reason}
    if news.metrics is not None:
        info["tokens"] = news.metrics.completion_tokens
        info["tok_s"] = news.metrics.decode_tok_s
    if thought_s is not None:
        info["thinking_s"] = thought_s
    if news.error is not None:
        info["error"] = one_line(news.error)
    return info


def explained(error: Exception) -> str:
    """One line for the user; anything but localrt's own errors is a bug, and says so."""
    if isinstance(error, LocalrtError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)} (a bug in localrt: please report it)"
