"""Messages in line, and the answer to the one that is being answered.

Puts turns on screen as they move on: waiting, sent, answered, stopped, refused. Knows the
conversation and one generation at a time; what the rest of the screen shows is the app's business.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from localrt.errors import LocalrtError
from localrt.tui.pace import Pace
from localrt.tui.text import one_line
from localrt.tui.work import Generation, News

if TYPE_CHECKING:
    from localrt import ChatSession
    from localrt.tui.answer import Answer
    from localrt.tui.conversation import Conversation, UserTurn

__all__ = ["Turns", "explained"]


class Turns:
    """A queue of user turns over a ``Conversation``."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._line: deque[UserTurn] = deque()
        self._turn: UserTurn | None = None  # the message being answered
        self._answer: Answer | None = None
        self._generation: Generation | None = None
        self._pace = Pace()

    @property
    def answering(self) -> bool:
        """Whether a message is being answered."""
        return self._generation is not None

    @property
    def waiting(self) -> int:
        """How many messages wait."""
        return len(self._line)

    def add(self, text: str, *, waiting: bool) -> None:
        """Put a message at the end of the line; ``waiting`` shows it as not sent yet."""
        self._line.append(self._conversation.add_user(text, waiting=waiting))

    def send_next(self, chat: ChatSession) -> bool:
        """Send the first in line, unless there is none or one is being answered."""
        if self.answering or not self._line:
            return False
        self._turn = self._line.popleft()
        self._turn.sent()
        self._answer = self._conversation.add_answer(after=self._turn)
        self._pace = Pace()
        self._generation = Generation(chat, self._turn.message)
        self._generation.start()
        return True

    def look(self) -> News | None:
        """What came since the last look, drawn; None when there is nothing to do yet."""
        generation, answer = self._generation, self._answer
        if generation is None or answer is None:
            return None
        if not generation.done and not self._pace.due():
            return None
        news = generation.take()
        answer.write(news.text)
        return news

    def end(self, news: News, *, cut_off: str) -> list[str]:
        """Close the answer that ``news`` is the last of.

        Args:
            news: with ``done`` set.
            cut_off: what to say below an answer that met its limit.

        Returns:
            Messages that were not answered: the refused one, and those behind it.
        """
        turn, answer = self._turn, self._answer
        assert turn is not None
        assert answer is not None
        self._generation = self._turn = self._answer = None
        last: UserTurn | Answer = answer
        if answer.source:
            answer.finish()
        else:
            answer.remove()
            last = turn
        if news.error is not None:
            if answer.source:
                self._conversation.add_notice(explained(news.error), "error", after=last)
                return []
            turn.remove()
            self._conversation.add_notice(explained(news.error), "error")
            return [turn.message, *self.take_back()]
        if news.finish_reason == "cancelled":
            self._conversation.add_notice("stopped", "mark", after=last)
        elif news.finish_reason == "length":
            self._conversation.add_notice(cut_off, "mark", after=last)
        elif not answer.source:
            self._conversation.add_notice("no answer", "mark", after=last)
        return []

    def take_back(self) -> list[str]:
        """Remove the messages that wait, and return them."""
        messages = [turn.message for turn in self._line]
        for turn in self._line:
            turn.remove()
        self._line.clear()
        return messages

    def cancel(self) -> None:
        """Stop the answer; its text so far is kept."""
        if self._generation is not None:
            self._generation.cancel()

    def join(self, seconds: float) -> bool:
        """Wait for the answering thread; whether it ended."""
        return self._generation is None or self._generation.join(seconds)


def explained(error: Exception) -> str:
    """One line for the user; anything but localrt's own errors is a bug, and says so."""
    if isinstance(error, LocalrtError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)} (a bug in localrt: please report it)"
