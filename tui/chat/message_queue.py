"""The queue of messages, and the answer in progress.

Updates turns on screen and in the history as their state changes: waiting, sent, answered, stopped,
refused. Knows the view, one conversation and one generation at a time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrt.history.messages import call_line
from localrt.mcp.toolbox import Toolbox
from localrt.tui.chat.blocks import AnswerBlock, TurnBlock, UserTurn
from localrt.tui.chat.tool_calls import AnswerCalls, AskAboutCall, CallBlock, ended_call
from localrt.tui.chat.view import ConversationView
from localrt.tui.conversation.attachments import SentMessage, draft_of
from localrt.tui.conversation.generation import ROUNDS_OVER, AnswerUpdate, Reply
from localrt.tui.conversation.open_conversation import OpenConversation, answer_note
from localrt.tui.text import clean, explained

if TYPE_CHECKING:
    from localrt import ChatSession, Turn

NOT_ANSWERED = "Not answered: Ctrl+R (or /retry) answers it"
FRAME_SECONDS = 0.05  # seconds between updates from a thread
_SHARE = 0.01  # CPU share for drawing; decoding loses about twice that
_CORES = 8  # cores counted at most: drawing needs no more
_LONGEST = 0.5  # most seconds between drawings, whatever they cost


class RedrawLimit:
    """Limits redrawing of new text to 20 times a second and 1 % of the processor.

    The engine computes on the same machine: when drawing becomes slow (a slow terminal, a huge
    paragraph), the app draws less often instead of slowing the model.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
        *,
        cores: int | None = None,
    ) -> None:
        self._share = _SHARE * min(cores or os.cpu_count() or 1, _CORES)  # share of one core
        self._wall = wall
        self._cpu = cpu
        self._began = wall() - _LONGEST
        self._spent = cpu()

    def due(self) -> bool:
        """Whether enough time has passed since the last drawing, given its cost."""
        now, spent = self._wall(), self._cpu()
        pause = min((spent - self._spent) / self._share, _LONGEST)
        if now - self._began < pause:
            return False
        self._began, self._spent = now, spent
        return True


@dataclass(slots=True)
class _Waiting:
    block: UserTurn
    draft: SentMessage
    after: int | None  # the turn it follows; None: the last one at the time of sending


@dataclass(slots=True)
class _Running:
    reply: Reply
    before: int | None  # the answer shown before, if a question is answered again
    block: UserTurn | None  # the new message's block; None if a question is answered again
    draft: SentMessage
    answer: AnswerBlock
    began: float
    thought_s: float | None = None
    calls: AnswerCalls | None = None  # the answer's calls, while they run


class MessageQueue:
    """A queue of messages over a view and the open conversation.

    The model is offered the tools of ``toolbox``; ``ask`` asks the user about calls.
    """

    def __init__(
        self,
        view: ConversationView,
        conversation: OpenConversation,
        toolbox: Toolbox,
        ask: AskAboutCall,
    ) -> None:
        self.conversation = conversation
        self._view = view
        self._toolbox, self._ask = toolbox, ask
        self._waiting: deque[_Waiting] = deque()
        self._now: _Running | None = None
        self._redraws = RedrawLimit()
        self._memory_note = ""
        self._prepared: dict[int, TurnBlock] = {}
        self._elsewhere: dict[int, int] = {}  # other windows' turns: characters shown so far

    @property
    def answering(self) -> bool:
        return self._now is not None

    @property
    def calling(self) -> bool:
        """Whether the answer's tool calls are running."""
        return self._now is not None and self._now.calls is not None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def drafts(self) -> list[SentMessage]:
        """The waiting messages."""
        return [waiting.draft for waiting in self._waiting]

    def add(self, draft: SentMessage, *, waiting: bool, after: int | None = None) -> None:
        """Put a message at the end of the queue; ``waiting`` shows it as not sent yet.

        ``after`` is the turn that it follows, if not the last: it then begins a branch.
        """
        if after is not None:
            self._show_until(after)
        block = _user_turn(draft, waiting=waiting)
        self._view.add(block)
        self._view.follow()
        self._waiting.append(_Waiting(block, draft, after))

    def add_waiting(self, drafts: Iterable[SentMessage]) -> None:
        for draft in drafts:
            self.add(draft, waiting=True)

    def send_next(self, chat: ChatSession) -> bool:
        """Send the first waiting message, unless one is being answered here or elsewhere.

        Raises:
            StorageError: what it follows was deleted elsewhere; the message still waits.
        """
        if self.answering or not self._waiting:
            return False
        self.catch_up()
        first = self._waiting[0]
        if first.after is None and self.conversation.written_elsewhere:
            first.block.waiting = True
            self._changed(first.block)
            return False
        after = self.conversation.end if first.after is None else first.after
        self._show_until(after)
        draft = first.draft
        turn = self.conversation.add("user", draft.content, after=after, info=draft.info)
        self._waiting.popleft()
        block = first.block
        block.turn, block.branch, block.branches = turn.id, turn.branch, turn.branches
        block.waiting = False
        self._changed(block)
        self._start(chat, turn.id, draft, block)
        return True

    def answer_again(self, chat: ChatSession, question: int) -> None:
        """Answer a user's turn once more, as a sibling of its answers."""
        turns = self.conversation.turns
        place = next(place for place, turn in enumerate(turns) if turn.id == question)
        before = turns[place + 1].id if place + 1 < len(turns) else None
        self._show_until(question)
        self._start(chat, question, draft_of(turns[place]), None, before=before)

    def continue_answer(self, chat: ChatSession, turn: int) -> None:
        """Go on with the last answer, which was stopped or cut, in its place.

        Raises:
            OptionError: turn ``turn`` cannot be continued.
        """
        self._start(chat, turn, SentMessage(""), None, continues=True)

    def look(self) -> AnswerUpdate | None:
        """Draw and return the text since the last call; None if there is nothing to do yet.

        It also runs tool calls; when all have ended, the model continues.
        """
        now = self._now
        if now is not None and now.calls is not None:
            if now.calls.look():
                self._go_on(now)
            return None
        if now is None or not (now.reply.work.done or self._redraws.due()):
            return None
        update = now.reply.work.take()
        if update.text:
            now.answer.write(update.text)
            self._time_thinking(now)
            self._view.changed(now.answer)
        return update

    def end(self, update: AnswerUpdate) -> list[SentMessage]:
        """Close the answer with its last ``update``; if it calls tools, begin the calls.

        Args:
            update: with ``done`` set.

        Returns:
            Unanswered messages: a message refused or stopped before its first word, and those after
            it.
        """
        now, self._now = self._now, None
        assert now is not None
        answer, reply, state = now.answer, now.reply, update.state
        text = bool(answer.source)
        self._tell_memory(update)
        self._tell(reply.note())
        reply.end(update, now.thought_s)
        if reply.calls:
            answer.calls = True
            answer.finish()
            self._view.changed(answer)
            now.calls = AnswerCalls(
                reply.calls, self._view, answer, self._ask, ctx=reply.chat.capacity
            )
            self._now = now
            return []
        if answer.reopened:  # nothing has come: it is as it was
            _fill(answer, self.conversation.turns[-1])
            self._view.changed(answer)
            if update.error is not None:
                self._view.add_notice(explained(update.error), "error")
            return []
        taken_back = state == "cancelled" and not reply.rounds
        if (update.error is not None or taken_back) and not text:
            block = None if reply.rounds else now.block
            gone: list[TurnBlock] = [answer] if block is None else [block, answer]
            self._view.drop(*gone)
            if gone[0].turn is not None:
                self.conversation.leave(gone[0].turn)
            if update.error is not None:
                self._view.add_notice(explained(update.error), "error")
            if block is not None:
                return [now.draft, *self.take_back()]
            if reply.rounds:
                self._view.add_notice(NOT_ANSWERED, "mark")
            elif now.before is not None:
                self.conversation.show(now.before)
            self.sync()
            return self.take_back()
        full = update.is_full(reply.chat.capacity)
        answer.mark = answer_note(state, update.finish_reason, full=full)
        if not text and not answer.mark:
            answer.mark = "no answer"
        answer.finish()
        self._view.changed(answer)
        if update.error is not None:
            self._view.add_notice(explained(update.error), "error", after=answer)
        return []

    def _tell_memory(self, update: AnswerUpdate) -> None:
        """Explain once why answers are slower or faster: weights were evicted or restored."""
        note = "" if update.metrics is None else update.metrics.memory or ""
        if note != self._memory_note:
            self._memory_note = note
            self._tell(note)

    def _tell(self, note: str) -> None:
        if note:
            self._view.add_notice(note)

    def take_back(self) -> list[SentMessage]:
        """Remove and return the waiting messages."""
        taken = list(self._waiting)
        self._waiting.clear()
        self._view.drop(*(waiting.block for waiting in taken))
        if any(waiting.after is not None for waiting in taken):
            self.sync()
        return [waiting.draft for waiting in taken]

    def cancel(self) -> None:
        """Stop the answer, keeping its text so far, or the tool call."""
        if self._now is not None:
            self._now.reply.cancel()

    def join(self, seconds: float) -> bool:
        """Wait for the answering thread; returns whether it ended."""
        return self._now is None or self._now.reply.work.join(seconds)

    def close(self) -> None:
        """Called when the app ends: the answer keeps its text so far, and calls stop."""
        now, self._now = self._now, None
        if now is not None:
            now.reply.close(now.thought_s)

    def prepare(self, conversation: OpenConversation) -> None:
        """Make and measure the blocks of a conversation that is shown next; for a thread."""
        self._prepared = {turn.id: _block_of(turn) for turn in conversation.turns}
        self._view.prepare(self._prepared.values())

    def show(self, conversation: OpenConversation) -> None:
        """Show a conversation. No message may be waiting."""
        if conversation is not self.conversation:
            self.conversation = conversation
            self._elsewhere.clear()
            self._view.clear()
        self.sync()
        self._prepared.clear()

    def catch_up(self) -> bool:
        """Show what other windows have written; returns whether there was anything new."""
        return self.conversation.refresh() and self.sync()

    def sync(self) -> bool:
        """Update the screen to the conversation's current branch, above waiting messages.

        Returns:
            Whether anything on the screen has changed.
        """
        view, turns = self._view, self._turns_until(self._branch_waits)
        shown = {block.turn: block for block in view.blocks if block.turn is not None}
        numbers = {turn.id for turn in turns}
        view.drop(*(block for number, block in shown.items() if number not in numbers))
        added: list[TurnBlock] = []
        changed = False
        for turn in turns:
            block = shown.get(turn.id)
            before = self._elsewhere.pop(turn.id, None)
            last = before is None and turn is turns[-1] and not self.answering
            if last and isinstance(block, AnswerBlock) and block.source != clean(turn.content):
                block.reopen()  # another window has continued it
                before = 0
            if block is None:
                added.append(self._prepared.get(turn.id) or _block_of(turn))
            elif before is not None:
                _fill(block, turn, start=before)
                view.changed(block)
                changed = True
            if block is not None and block.branches != turn.branches:
                block.branch, block.branches = turn.branch, turn.branches
                self._changed(block)
            if turn.state == "writing" and (block is None or before is not None):
                self._elsewhere[turn.id] = len(turn.content)
        if added:
            waiting = [each.block for each in self._waiting]
            view.drop(*waiting)
            view.add(*added, *waiting)
        return changed or bool(added)

    def give_up(self) -> None:
        """Leave an answer that does not go on, as its conversation was deleted elsewhere."""
        now, self._now = self._now, None
        if now is not None:
            now.reply.cancel()
            now.answer.finish()

    @property
    def _branch_waits(self) -> int | None:
        """The turn after which a waiting message begins a branch."""
        return next((each.after for each in self._waiting if each.after is not None), None)

    def _start(
        self,
        chat: ChatSession,
        question: int,
        draft: SentMessage,
        block: UserTurn | None,
        *,
        before: int | None = None,
        continues: bool = False,
    ) -> None:
        reply = Reply(chat, self.conversation, self._toolbox, question, continues=continues)
        if continues:
            shown = self._view.turn(reply.writer.turn)
            assert isinstance(shown, AnswerBlock), "as its turn is one"
            shown.reopen()
            answer = shown
        else:
            answer = self._new_answer(reply, block or self._view.turn(question))
        began = time.monotonic()
        self._now = _Running(reply, before, block, draft, answer, began, reply.thought_s)
        reply.work.start()
        self._tell(reply.note())

    def _new_answer(self, reply: Reply, above: TurnBlock | None) -> AnswerBlock:
        """Show an empty answer."""
        answer = AnswerBlock()
        self._view.add(answer, after=above)
        answer.turn = reply.writer.turn
        siblings = self.conversation.siblings(answer.turn)
        answer.branch = answer.branches = max(len(siblings), 1)
        self._redraws = RedrawLimit()
        return answer

    def _go_on(self, now: _Running) -> None:
        """Let the model continue after the results of its calls."""
        above = self._view.turn(now.reply.calls[-1].turn)
        now.reply.go_on()
        now.answer = self._new_answer(now.reply, above)
        if now.reply.last:
            self._view.add_notice(ROUNDS_OVER, after=above)
        now.calls, now.thought_s, now.began = None, None, time.monotonic()
        now.reply.work.start()

    def _show_until(self, last: int) -> None:
        """Remove turns of other branches from the screen: those that do not lead to ``last``."""
        numbers = {turn.id for turn in self._turns_until(last)}
        view = self._view
        view.drop(*(b for b in view.blocks if b.turn is not None and b.turn not in numbers))

    def _turns_until(self, last: int | None) -> list[Turn]:
        """The shown turns up to turn ``last``: 0 for none, None for all."""
        turns = list(self.conversation.turns)
        places = [place for place, turn in enumerate(turns, 1) if turn.id == last]
        return turns if last is None else turns[: places[0]] if places else []

    def _changed(self, block: TurnBlock) -> None:
        block.changed()
        self._view.changed(block)

    def _time_thinking(self, now: _Running) -> None:
        if now.thought_s is None and now.answer.foldable:
            seconds = time.monotonic() - now.began
            now.answer.thinking_s = seconds
            if not now.answer.thinking:
                now.thought_s = seconds


def _user_turn(draft: SentMessage, *, waiting: bool = False) -> UserTurn:
    return UserTurn(
        draft.text,
        waiting=waiting,
        folds=draft.folds,
        pictures=draft.pictures,
        captions=draft.captions,
    )


def _block_of(turn: Turn) -> TurnBlock:
    """The block that shows a turn."""
    block: TurnBlock
    if turn.role == "user":
        block = _user_turn(draft_of(turn))
    else:
        block = AnswerBlock() if turn.role == "assistant" else CallBlock(call_line(turn.info))
        _fill(block, turn)
    block.turn, block.branch, block.branches = turn.id, turn.branch, turn.branches
    block.changed()
    return block


def _fill(block: TurnBlock, turn: Turn, *, start: int = 0) -> None:
    """Show what the model or a tool has written after the first ``start`` characters."""
    if isinstance(block, AnswerBlock):
        block.write(turn.content[start:])
        seconds = turn.info.get("thinking_s")
        block.thinking_s = seconds if isinstance(seconds, float) else None
        block.mark = answer_note(turn.state, turn.info.get("finish_reason"))
        block.calls = bool(turn.info.get("tool_calls"))
        if turn.state != "writing":
            if not (turn.content or block.calls):
                block.mark = block.mark or "no answer"
            block.finish()
    elif isinstance(block, CallBlock):
        mark, result = ended_call(str(turn.info.get("ending", "")), turn.content)
        block.set_state(answer_note(turn.state) or mark, result)
