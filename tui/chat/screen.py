"""The chat screen: conversation, composer, live panel, footer, and actions.

It polls the answering thread on a timer and computes nothing itself. Models, settings and help are
windows of the app.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import BindingType
from textual.screen import Screen
from textual.timer import Timer
from textual.worker import Worker

from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.history.messages import Decision, Way
from localrt.mcp.toolbox import PendingCall
from localrt.tui.chat.bars import (
    FindBar,
    Footer,
    HintLine,
    Phase,
    StatusBar,
    turn_hint,
    turn_menu,
    waiting_hint,
)
from localrt.tui.chat.blocks import AnswerBlock, Kind
from localrt.tui.chat.composer import CommandMenu, Composer, edited
from localrt.tui.chat.message_queue import FRAME_SECONDS, NOT_ANSWERED, MessageQueue
from localrt.tui.chat.panel import LivePanel
from localrt.tui.chat.thumbnails import Graphics
from localrt.tui.chat.view import ConversationView
from localrt.tui.commands import Command, Entry, as_typed, read_line
from localrt.tui.conversation.attachments import draft_of, read_attachment, read_mentioned
from localrt.tui.conversation.state import ChatState, Session
from localrt.tui.inputs import TextArea
from localrt.tui.keys import bindings
from localrt.tui.loading_line import LoadingLine, WorkLine
from localrt.tui.screens.dialogs import NEW, Ask, AskCall, Choose, Confirm, ConversationsScreen, ask
from localrt.tui.text import one_line

if TYPE_CHECKING:
    from localrt import KeptPicture, Turn

Work = Callable[[], Awaitable[None] | None]
_TOOLS_SECONDS = 1.0  # seconds between checks of MCP servers
_OTHERS_SECONDS = 0.5  # seconds between checks for other windows' messages
_WAITS_FOR_MODEL = "Type a message: it is sent when the model is ready"


class ChatScreen(Screen[None]):
    """Shows the open conversation of ``state``.

    ``stop_loading`` stops loading another model; it returns whether one was loading. ``copy`` takes
    a text and its description for the hint.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]

    def __init__(
        self,
        state: ChatState,
        stop_loading: Callable[[], bool],
        copy: Callable[[str, str], None],
        *,
        model: str,
        graphics: Graphics = "",
    ) -> None:
        super().__init__(id="chat")
        self.state = state
        self.view = ConversationView(graphics)
        self.queue = MessageQueue(
            self.view, state.conversation, state.toolbox, self._ask_about_call
        )
        self.loading_line, self.reader = LoadingLine(), WorkLine()
        self.reader.display = False
        self.menu = CommandMenu()
        self.composer = Composer(self.menu)
        self.composer.placeholder = _WAITS_FOR_MODEL
        self.find = FindBar(self.view, self.composer)
        self.panel = LivePanel()
        self.hint = HintLine()
        self.footer = Footer()
        self.footer.status = StatusBar(model=model)
        self._stop_loading, self._copy_text = stop_loading, copy
        self._editing: Turn | None = None  # in the composer
        self._kept = ""  # the draft that the history has
        self._ticker: Timer | None = None  # while an answer is generated
        self._next: Work | None = None  # runs when the answer has ended
        self._reading: str | None = None  # what was typed, while its files are read
        self._parking: set[asyncio.Task[None]] = set()
        self._for_later: list[Command] = []  # commands that wait for the model

    def compose(self) -> ComposeResult:
        """From top to bottom; on a wide terminal the panel is on the right."""
        yield from (self.panel, self.view, self.loading_line, self.reader)
        yield from (self.menu, self.find, self.hint, self.composer, self.footer)

    def on_mount(self) -> None:
        self.set_focus(self.composer)
        self._ticker = self.set_interval(FRAME_SECONDS, self._watch_answer, pause=True)
        self.set_interval(_OTHERS_SECONDS, self._watch_others)
        self._show_conversation()

    # -- the model -------------------------------------------------------------------------------

    async def model_loaded(self, session: Session) -> None:
        """Show the model's description, above waiting messages, and run waiting commands."""
        info = session.model.info
        waiting = self.queue.take_back()
        self.view.add_notices(session.describe(), *info.notes, *session.notes)
        self.queue.add_waiting(waiting)
        self.footer.change(
            model=session.title,
            engine=f"{info.engine} {info.quantization}".strip(),
            phase=Phase.READY,
            ctx=info.ctx or None,  # a server may not report it
        )
        self.composer.placeholder = "Message (/ for commands, F1 for help)"
        self.panel.take(session.model)
        self._count_tokens()
        commands, self._for_later = self._for_later, []
        for command in commands:
            await self._run(command)

    def model_leaves(self, name: str) -> None:
        """Called when the model is being unloaded and the model ``name`` loaded."""
        self.reader.stop()
        self.panel.take(None)
        self.loading_line.progress, self.loading_line.display = None, True
        self.footer.status = StatusBar(model=name, temporary=self.state.conversation.temporary)
        self.composer.placeholder = _WAITS_FOR_MODEL

    def idle(self, what: str) -> bool:
        """Whether nothing is being answered or loaded; if not, tell the user."""
        if self.queue.answering or self._reading is not None:
            reason = "is answering; Esc stops it"
        elif self.state.session is None:
            reason = "is still loading"
        else:
            return True
        self.say(f"/{what} has to wait: the model {reason}", "error")
        return False

    def when_answered(self, what: str, work: Work) -> None:
        """Run an action next, or when the answer ends; a later call replaces an earlier one. Until
        it ends, the screen does nothing else, but keys are taken.
        """
        if self.queue.answering:
            self._next = work
            self.say(f"{what} when this answer ends; Esc stops it")
        else:
            self.call_next(work)

    @property
    def failed(self) -> bool:
        """Whether the first model could not be loaded: Enter then leaves."""
        return self.footer.status.phase is Phase.FAILED

    def _count_tokens(self) -> None:
        """Count the conversation's tokens, and show them when known."""
        session = self.state.session
        if session is None or not self.state.conversation.turns:
            return

        async def count() -> None:
            with suppress(LocalrtError):
                used = await asyncio.to_thread(session.tokens)
                if session is self.state.session and not self.queue.answering:
                    self.footer.change(used=used, metrics=None)

        # Pass a function, not a coroutine: a later worker may cancel it before it starts.
        _: Worker[None] = self.run_worker(count, exclusive=True, group="tokens")

    # -- tools -----------------------------------------------------------------------------------

    def watch_tools(self) -> None:
        """Start reporting MCP servers that cannot be used."""
        self._tell_tools()
        self.set_interval(_TOOLS_SECONDS, self._tell_tools)

    def _tell_tools(self) -> None:
        for line in self.state.toolbox.take_news():
            self.say(line, "error")

    def _ask_about_call(self, call: PendingCall, decide: Callable[[Decision], None]) -> bool:
        if not self.is_active:  # another window gets the keys
            return False
        self.app.push_screen(AskCall(call), lambda decision: decide(decision or "refuse"))
        return True

    # -- answering -------------------------------------------------------------------------------

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        """Run a command now, or queue a message until the model is free."""
        line, attachments = read_line(event.line), self.composer.attachments
        self.hint.refuse("")
        if isinstance(line, Command):
            await self._run(line)
        elif self.failed:
            self.composer.put(event.line)
            self.hint.flash("Not sent: no model is loaded. F4 loads another, Ctrl+Q quits")
        elif self._editing is not None and not self.idle("edit"):
            self.composer.put(event.line)
        elif self._editing is not None and self._editing.role != "user":
            await self._try(event.line, partial(self._edit_answer, self._editing.id, line))
        elif self._reading is not None or "@" in line or attachments.holds_files(line):
            self._read_for(event.line, partial(self._send, line))
        else:
            await self._try(event.line, partial(self._send, line))
        self._show_hint()

    def _read_for(self, typed: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do what reads files, without waiting for it."""
        if self._reading is None:
            self._reading = typed
            _: Worker[None] = self.run_worker(partial(self._try, typed, work))
        else:
            self.composer.put_before(typed)
            self.hint.flash("Not yet: files are being read. Esc stops that")

    async def _try(self, typed: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do what was ``typed``; if it fails or is stopped, it is back in the composer."""
        try:
            await work()
        except LocalrtError as error:
            self.composer.put_before(typed)
            self.hint.refuse(one_line(error))
        self._reading = None
        self._show_hint()

    async def _send(self, text: str) -> None:
        session, attachments = self.state.session, self.composer.attachments
        notes: list[str] = []
        if "@" in text:
            sees = session is None or session.sees
            read = await self.reader.run(partial(read_mentioned, text, sees=sees))
            text = attachments.labelled(text, read)
            notes = [file.note for _, file in read]
        if attachments.holds_files(text):
            keep = not self.state.conversation.temporary
            fit = partial(attachments.fitted, keep=keep)
            if session is not None:
                fit = partial(session.fitted, attachments)
            text, more = await self.reader.run(partial(fit, text))
            notes += more
        for line in filter(None, notes):
            self.say(line)
        draft = attachments.expanded(text)
        if draft.pictures and session is not None:
            draft = await asyncio.to_thread(session.measured, draft)
        editing, self._editing = self._editing, None
        after = None if editing is None else self.state.conversation.before(editing.id)
        self.view.mark(None)
        busy = session is None or self.queue.answering
        self.queue.add(draft, waiting=busy, after=after)
        self.send_next()

    async def _edit_answer(self, number: int, text: str) -> None:
        text = self.composer.attachments.unfolded(text)
        await asyncio.to_thread(self.state.conversation.edit_answer, number, text)
        self._editing = None
        self._changed()

    def _changed(self) -> None:
        """Show the branch that the conversation shows now."""
        self.view.mark(None)
        self.queue.sync()
        self.footer.change(metrics=None, used=0)
        self._count_tokens()
        self._show_hint()

    def send_next(self) -> None:
        session = self.state.session
        if not all(self._takes(draft.pictures) for draft in self.queue.drafts[:1]):
            self.composer.put_back(self.queue.take_back())
        try:
            if session is not None and self.queue.send_next(session.chat):
                self._begin_watching()
        except StorageError as error:
            self._give_up(error)
        self.keep_draft()

    def _give_up(self, error: StorageError) -> None:
        """Tell why an answer or a message does not go on. What was typed is typed again."""
        self.queue.give_up()
        self.composer.put_back(self.queue.take_back())
        self.queue.sync()
        self.say(one_line(error), "error")

    def keep_draft(self) -> None:
        """Keep what is not sent yet with its conversation, if it has changed."""
        if self.unsent != self._kept:
            self._kept = self.unsent
            self.state.conversation.keep_draft(self._kept)

    def _takes(self, pictures: Sequence[KeptPicture]) -> bool:
        """Whether the model sees pictures, or there are none; if not, tell the user."""
        if pictures and self.state.session is not None:
            try:
                self.state.session.check_sees()
            except OptionError as error:
                self.hint.refuse(one_line(error))
                return False
        return True

    def _begin_watching(self) -> None:
        self.footer.change(phase=Phase.PREFILL, percent=None, metrics=None)
        self.panel.begin()
        if self._ticker is not None:
            self._ticker.resume()

    async def _watch_answer(self) -> None:
        try:
            await self._look_at_answer()
        except StorageError as error:
            self._give_up(error)

    async def _look_at_answer(self) -> None:
        update = self.queue.look()
        if update is None:
            if self.footer.status.phase is Phase.TOOLS and not self.queue.calling:
                self._begin_watching()  # the model continues
            return
        self.footer.show(update)
        if self.footer.status.percent is not None or self.footer.status.phase is Phase.GENERATING:
            self.panel.read(self.footer.status.percent)
        if update.done:
            unanswered = self.queue.end(update)
            phase = Phase.TOOLS if self.queue.calling else Phase.READY
            self.footer.change(phase=phase, percent=None)
            if unanswered:
                stopped = update.finish_reason == "cancelled"
                self.composer.put_back(unanswered, select=stopped)
            elif update.finish_reason in ("cancelled", "length"):
                self.hint.flash("Alt+G goes on with this answer")
            session = self.state.session
            if session is not None and update.is_full(session.chat.capacity):
                _: Worker[None] = self.run_worker(self.action_full)
            if not self.queue.answering and self._next is not None:
                work, self._next = self._next, None
                if (ends := work()) is not None:
                    await ends
            self.send_next()
            if not self.queue.answering and self._ticker is not None:
                self._ticker.pause()
                self.panel.end()
        self._show_hint()

    async def _watch_others(self) -> None:
        """Show other windows' messages; a queued message may have waited for their answer."""
        self.keep_draft()
        # A search in the history may keep it waiting.
        changed = await asyncio.to_thread(self.queue.conversation.refresh)
        news = changed and self.queue.sync()
        if self.state.session is not None and not self.queue.answering:
            self.state.session.take_facts()
        if line := self.state.news():
            self.say(line, "error" if self.state.history.problem else "info")
        if not self.state.conversation.written_elsewhere:
            if news:
                self._count_tokens()
            self.send_next()
        if news:
            self._show_hint()

    def action_stop(self) -> None:
        """Esc does the first that applies: close the search, stop reading files, take back waiting
        messages, stop loading another model, stop the answer, unmark, stop editing.
        """
        self.hint.refuse("")
        if self.find.close() or self.reader.stop():
            return
        if waiting := self.queue.take_back():
            self.composer.put_back(waiting)
        elif self._stop_loading():
            return
        elif self.queue.answering:
            self.queue.cancel()
        else:
            self.view.mark(None)
            if self._editing is not None:
                self._editing = None
                self.composer.put("")
        self._show_hint()

    async def action_interrupt(self) -> None:
        """Ctrl+C: copy the selection, else stop; pressed twice in a row, quit."""
        selected = self.composer.selected_text
        if not selected and self.selections:  # perhaps of much that has to be laid out
            found: str | None = await asyncio.to_thread(self.get_selected_text)
            selected = found or ""
        if self.hint.confirming:
            await self.app.action_quit()
        elif selected:
            self.app.copy_to_clipboard(selected)
            self.clear_selection()
        elif self.composer.text and not self.queue.answering:
            self.composer.clear()
            self.hint.flash("Cleared: Alt+Z brings it back")
        else:
            if not self.reader.stop():
                self.queue.cancel()
            self.hint.confirm("Ctrl+C again quits")

    # -- conversations ---------------------------------------------------------------------------

    def open_conversation(self, change: Callable[[], str | None]) -> None:
        """Show another conversation once the current answer has ended; ``change`` returns a line
        about it.
        """
        what = "The other conversation will open"
        self.when_answered(what, partial(self._open_conversation, change))

    async def _open_conversation(self, change: Callable[[], str | None]) -> None:
        left = self.state.conversation
        self.keep_draft()
        try:
            done = await asyncio.to_thread(change)
        except LocalrtError as error:
            self.say(one_line(error), "error")
            return
        if self.state.conversation is not self.queue.conversation:
            await asyncio.to_thread(self.queue.prepare, self.state.conversation)
            text = self.composer.text
            self.reader.stop()
            self._editing = None
            waiting = self.queue.take_back()
            # What was typed stays with a conversation that the list shows.
            taken = "" if left.turns or left.temporary else text
            left.keep_draft("" if taken else self.composer.attachments.unfolded(text))
            self._show_conversation(taken)
            self.queue.add_waiting(waiting)
            self.view.add_notices(*(self.state.session.notes if self.state.session else ()))
            self.footer.change(metrics=None, used=0)
            self._count_tokens()
        if done:
            self.say(done)

    def park(self, session: Session) -> None:
        """Save the KV cache of a conversation that was closed, in a thread. A thread may call
        this.
        """
        self.call_later(self._park, session)

    def _park(self, session: Session) -> None:
        task = asyncio.create_task(asyncio.to_thread(session.leave))
        self._parking.add(task)
        task.add_done_callback(self._parking.discard)

    @property
    def unsent(self) -> str:
        """The waiting messages and the one being written, as text."""
        waiting = (as_typed(draft.text) for draft in self.queue.drafts)
        written = map(self.composer.attachments.unfolded, (self._reading or "", self.composer.text))
        return "\n\n".join(filter(None, (*waiting, *written)))

    async def wait_for_parking(self) -> None:
        if self._parking:
            await asyncio.wait(self._parking)

    def _show_conversation(self, typed: str = "") -> None:
        """Show the open conversation, with its draft before what was ``typed``."""
        self.hint.refuse("")
        conversation = self.state.conversation
        self.queue.show(conversation)
        self.footer.change(temporary=conversation.temporary)
        self._kept = conversation.take_draft()
        self.composer.put("\n\n".join(filter(None, (self._kept, typed))))
        turns = conversation.turns
        self.composer.remember(draft_of(turn) for turn in turns if turn.role == "user")
        open_end = turns and (turns[-1].role != "assistant" or "tool_calls" in turns[-1].info)
        if open_end and not self.state.conversation.written_elsewhere:
            self.view.add_notice(NOT_ANSWERED, "mark")
        if conversation.prompt_line:
            self.view.add_notice(conversation.prompt_line)
        self.view.follow()

    def action_conversations(self, search: str = "") -> None:

        def chosen(id: str) -> None:
            if id == NEW:
                self.action_new()
            elif id != self.state.conversation.id:
                self.open_conversation(lambda: self.state.open(id))

        ask(self, ConversationsScreen(self.state, search), chosen)

    def action_new(self) -> None:
        if self.state.conversation.turns or self.view.blocks:
            self.open_conversation(self.state.new)

    def action_temporary(self) -> None:
        self.open_conversation(lambda: self.state.new(temporary=True))

    def action_fork(self) -> None:
        """Copy the conversation up to the marked or last turn, and open the copy."""
        if turn := self._marked_or_last():
            self.open_conversation(lambda: self.state.fork(turn.id))

    async def action_rename(self, title: str = "") -> None:
        """Name the conversation; without a name ask for one."""
        conversation = self.state.conversation
        if title:
            await self._rename(title)
            self.hint.flash(f"Named “{title}”")
        else:
            dialog = Ask("Name of this conversation", conversation.title)
            ask(self, dialog, lambda title: self.call_next(self._rename, title.strip()))

    async def _rename(self, title: str) -> None:
        await asyncio.to_thread(self.state.conversation.set, title=title)

    # -- turns: the marked one, or else the last suitable one --------------------------------

    def action_mark(self, step: int) -> None:
        self.view.mark_next(step)
        self._show_hint()

    def _marked_or_last(self) -> Turn | None:
        """The marked or last turn; if there is none, tell the user."""
        turns, marked = self.state.conversation.turns, self.view.marked_turn
        if not turns:
            self.hint.flash("Nothing has been said yet")
            return None
        return next((turn for turn in turns if turn.id == marked), turns[-1])

    def action_edit(self) -> None:
        """Put a user's turn or the marked answer into the composer; sending it begins a branch."""
        if (turn := self._question("edit")) is None:
            return
        marked = self.view.marked
        if isinstance(marked, AnswerBlock) and (answer := self._marked_or_last()):
            turn = answer
            self.composer.put(as_typed(marked.spoken))
        else:
            self.composer.put_draft(draft_of(turn))
        self._editing = turn
        self.view.mark(self.view.turn(turn.id))
        self._show_hint()

    def action_continue(self) -> None:
        """Go on with the last answer."""
        self.view.mark(None)
        if last := self._marked_or_last():
            self.queue.continue_answer(self.state.loaded.chat, last.id)
            self._watch_from_start()

    def action_remove(self) -> None:
        """Remove the marked or last turn, and what follows."""
        if (turn := self._marked_or_last()) is None:
            return
        turns = self.state.conversation.turns
        after = len(turns) - turns.index(turn) - 1

        async def remove() -> None:
            try:
                await asyncio.to_thread(self.state.remove, turn.id)
            except LocalrtError as error:
                self.say(one_line(error), "error")
            self._changed()

        more = f" and the {after} after it" if after else ""
        question = f"Remove this turn{more}, with all branches? This cannot be undone."
        ask(self, Confirm(question, "remove"), lambda yes: self.call_next(remove))

    def action_retry(self) -> None:
        if (turn := self._question("retry")) is None:
            return
        if not self._takes(turn.pictures):
            return
        self.queue.answer_again(self.state.loaded.chat, turn.id)
        self._watch_from_start()

    def _watch_from_start(self) -> None:
        self.view.mark(None)
        self.view.follow()
        self._begin_watching()
        self._show_hint()

    async def action_full(self) -> None:
        """Ask what to do about a full context, and do it."""
        session = self.state.loaded
        self.hint.flash("Looking for ways out of a full context")
        ways = await asyncio.to_thread(session.ways_out)
        if session is self.state.session and self.is_active and not self.queue.answering:
            dialog = Choose("When the context is full", [(way.name, way.label) for way in ways])
            ask(self, dialog, lambda name: self._take_way(next(w for w in ways if w.name == name)))

    def _take_way(self, way: Way) -> None:
        turns = self.state.conversation.turns
        if way.name == "oldest":
            self.state.loaded.set("overflow drop_oldest")
            self.say("From now on the oldest turns are left out: send the message, or Alt+G")
        elif way.name == "summary" and turns:
            question = self.state.conversation.begin_summary()
            self.queue.sync()
            self.queue.answer_again(self.state.loaded.chat, question.id)
            self._watch_from_start()
        elif way.name == "longer":
            self.call_later(self.run_action, f"app.load_longer({way.ctx})")
        else:
            self.action_new()

    def _question(self, what: str) -> Turn | None:
        if not self.idle(what):
            return None
        turn = self.state.conversation.question(self.view.marked_turn)
        if turn is None:
            self.hint.flash(f"There is no message to {what}")
        return turn

    async def action_branch(self, which: str = "") -> None:
        """Show the next (or ``prev``) branch at the marked turn, or the last turn with several."""
        if not self.idle("branch"):
            return
        block = self.view.marked
        if block is None or block.branches < 2:
            block = next((b for b in reversed(self.view.blocks) if b.branches > 1), None)
        if block is None or block.turn is None:
            self.hint.flash("There are no other branches: Alt+E or Ctrl+R begins one")
            return
        step = -1 if which == "prev" else 1
        show = self.state.conversation.show_sibling
        number = await asyncio.to_thread(show, block.turn, step)
        self.queue.sync()
        self.view.mark(self.view.turn(number))
        self._count_tokens()
        self._show_hint()

    def action_fold(self) -> None:
        if not self.view.toggle_fold():
            self.hint.flash("Nothing is folded here")
        self._show_hint()

    async def action_copy(self, what: str = "") -> None:
        """Copy a turn as written, an answer without its thinking. ``code``: copy the last code
        block of an answer; each further call copies the one before.
        """
        if what not in ("", "code"):
            raise OptionError("/copy copies the answer, /copy code its last code block")
        find = self.view.code_to_copy if what else self.view.text_to_copy
        copied = await asyncio.to_thread(find)
        if copied is not None:
            self._copy_text(*copied)
        else:
            self.hint.flash(
                f"There is {'no code block to copy' if what else 'nothing to copy yet'}"
            )

    async def on_composer_enter_on_empty(self) -> None:
        """Show the marked turn's menu; after a failure, leave."""
        if self.failed:
            await self.app.action_quit()
        elif self.view.marked is not None:
            dialog = Choose("This turn", turn_menu(self.view.marked))
            ask(self, dialog, lambda action: self.call_later(self.run_action, action))

    # -- commands --------------------------------------------------------------------------------

    async def _run(self, command: Command) -> None:
        """Run a slash command, or say why it cannot be run."""
        entry = command.entry()
        if entry is None:
            self.say(f"No command /{command.name}: /help lists them, // sends a slash", "error")
        elif entry.idle and self.footer.status.phase is Phase.LOADING:
            self._for_later.append(command)
            self.say(f"/{command.name} runs when the model is ready")
        elif entry.idle and not self.idle(command.name):
            self.composer.put(f"/{command.name} {command.argument}".rstrip())
        else:
            try:
                await self._do(entry, command.argument)
            except LocalrtError as error:
                self.say(one_line(error), "error")

    async def _do(self, entry: Entry, argument: str) -> None:
        """Show the result of a command's ``run``, or run the screen's action."""
        if entry.run is None:
            action = entry.action or entry.name
            await self.run_action(f"{action}({argument!r})" if entry.argument else action)
            return
        run = partial(entry.run, self.state, argument)
        self.say(await asyncio.to_thread(run) if entry.slow else run())
        if self.state.session is not None:  # the adapter may have changed
            self.footer.change(model=self.state.session.title)

    async def action_command(self, name: str) -> None:
        """Run the command of a key, without an argument."""
        command = Command(name, "")
        if not (entry := command.entry()) or not entry.idle or self.idle(name):
            await self._run(command)

    def action_delete(self) -> None:
        state, conversation = self.state, self.state.conversation
        question = f"Delete “{conversation.title or 'this conversation'}”? This cannot be undone."
        question += state.damaged_copies

        def delete(yes: bool) -> None:
            self.open_conversation(lambda: state.delete(conversation.id))

        ask(self, Confirm(question, "delete"), delete)

    def action_attach(self, path: str) -> None:
        self._read_for(f"/attach {path}" if path else "", partial(self._attach_file, path))

    async def _attach_file(self, path: str) -> None:
        sees = self.state.session is None or self.state.session.sees
        file = await self.reader.run(partial(read_attachment, path, sees=sees))
        self.composer.attach(self.composer.attachments.add_file(file))
        if file.note:
            self.say(file.note)
        more = "" if file.pictures else "; Tab after its label inserts its text"
        self.hint.flash(f"{file.name} is attached{more}")

    async def action_load(self, path: str) -> None:
        found = await asyncio.to_thread(self.state.read_file, path)
        self.open_conversation(lambda: self.state.open_loaded(path, found))

    def action_saved(self) -> None:
        """Ctrl+S: say that conversations are saved automatically."""
        place = "Conversations are saved automatically"
        if self.state.conversation.temporary:
            place = "This conversation is temporary: it is never on the disk"
        elif not self.state.conversation.saved:
            place = "This conversation is not on disk"
        self.hint.flash(f"{place}; /export saves one to a file")

    # -- composer, panel, mouse ------------------------------------------------------------------

    def action_editor(self) -> None:
        """Edit the message in another program; a running answer continues meanwhile."""
        try:
            with self.app.suspend():
                text = edited(self.composer.text)
        except SuspendNotSupported:
            self.say("This terminal cannot be handed to an editor", "error")
        except LocalrtError as error:
            self.say(one_line(error), "error")
        else:
            self.composer.put(text)
        self.refresh(layout=True)

    def action_panel(self) -> None:
        self.panel.show(not self.panel.is_open)

    def action_find(self, query: str = "") -> None:
        self.find.open(query)

    def action_scroll_conversation(self, where: str) -> None:
        """Scroll by ``page_up`` or ``page_down``, or to ``home`` or ``end``."""
        getattr(self.view, f"scroll_{where}")(animate=False)
        self.call_after_refresh(self._show_hint)

    def on_option_list_option_selected(self) -> None:
        self.composer.choose()

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        self.menu.show_for(self.composer.text)
        self._show_hint()

    def on_conversation_view_clicked(self, event: ConversationView.Clicked) -> None:
        if self.view.text_selection is None:
            self.view.mark(None if event.block is self.view.marked else event.block)
            self._show_hint()

    # -- small lines -----------------------------------------------------------------------------

    def say(self, text: str, kind: Kind = "info") -> None:
        """Show a line of the app at the end of the conversation."""
        self.view.add_notice(text, kind)
        self.view.follow()

    def _show_hint(self) -> None:
        hint = ""
        if self._reading is not None:
            hint = "Reading files: Esc stops that"
        elif self._editing is not None:
            does = "sends it" if self._editing.role == "user" else "keeps it"
            hint = f"Editing: Enter {does} as a new branch, Esc cancels"
        elif self.queue.waiting:
            elsewhere = self.state.conversation.written_elsewhere
            hint = waiting_hint(self.queue.waiting, elsewhere=elsewhere)
        elif self.view.marked is not None:
            hint = turn_hint(self.view.marked)
        elif self.queue.answering and not self.view.follows:
            hint = "More below: Ctrl+End"
        self.hint.show(hint)
