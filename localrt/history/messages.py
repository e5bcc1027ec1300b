"""A conversation's turns as messages for a model, and its tool calls as turns.

Calls have results, and questions answers. A call is allowed or refused, run, and saved with its
result: the turn is saved before the call runs, so that a program that is killed loses only the
result. Nothing here waits for a call, or asks the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from localrt.common.files import parse_json
from localrt.common.formatting import as_line, format_bytes
from localrt.engine.types import Chunk, Message, Metrics, ToolCall
from localrt.history.answer_writer import AnswerWriter
from localrt.history.conversation import Turn
from localrt.history.pictures import joined_text
from localrt.mcp.config import ToolResult
from localrt.mcp.toolbox import REFUSED, STOPPED, Toolbox

if TYPE_CHECKING:
    from localrt.planning.forecast import PlannedContext

_CUT = "The app ended before this call did."
_NO_ANSWER = "(No answer.)"
_MOST_IDS = 1 << 16  # of an answer that can be continued by its tokens


def messages_for_model(
    turns: Sequence[Turn],
    system: str | None,
    *,
    before: int | None = None,
    sees: bool = True,
    continued: int | None = None,
    model: str | None = None,
) -> list[Message]:
    """The messages of ``turns`` before turn ``before``, system prompt first.

    Unanswered messages are left out. A model that does not see gets the names of pictures. With
    answer ``continued``, it comes last and ``model`` continues it: by its own tokens if it wrote
    them, else by its text.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    begun: list[Message] = []
    for turn, following in zip(turns, (*turns[1:], None), strict=False):
        if turn.id == continued:
            ids = _continued_ids(turn.info, model)
            begun = [{**turn.message, "prefix": True, "token_ids": ids}]
        if turn.id in (before, continued):
            break
        if turn.role == "tool" or not (_unanswered(turn, following) or is_nothing(turn)):
            messages.append(turn.message if sees else _without_pictures(turn))
    return [*_with_answers(_with_results(messages)), *begun]


def _continued_ids(info: Mapping[str, Any], model: str | None) -> list[int]:
    """The tokens of a stopped answer, from its turn's ``info``; none if another model wrote it."""
    match info:
        case {"ids": list(ids), "context": [_, name]} if name == model:
            return ids
    return []


_SUMMARY = (
    "Summarize our conversation so far, so that it can go on from the summary alone. Keep names, "
    "numbers, decisions, code that is still needed, and what is still open."
)


def summary_turns(
    turns: Sequence[Turn], system: str | None, *, sees: bool = True
) -> tuple[list[Message], str]:
    """The messages for a summary, and the request for it that ends them.

    The request and the answer to it begin a branch at the root, in which the conversation goes on.
    Answer with ``overflow="drop_oldest"``: the conversation is too long.
    """
    messages = messages_for_model(turns, system, sees=sees)
    return [*messages, {"role": "user", "content": _SUMMARY}], _SUMMARY


@dataclass(frozen=True, slots=True)
class Way:
    """A way out of a full context: ``"oldest"`` (``overflow="drop_oldest"``), ``"summary"``
    (``summary_turns``), ``"longer"`` (the model loaded again with ``ctx``) or ``"new"``.
    """

    name: str
    label: str
    ctx: int | None = None


def ways_out(tokens: int, ctx: int, contexts: Sequence[PlannedContext] = ()) -> tuple[Way, ...]:
    """What the user may do about a conversation of ``tokens`` that is too long for ``ctx``.

    ``contexts`` are those of the model's plan. A longer one is offered if it leaves room to go on.
    """
    ways = [Way("oldest", "Leave out the oldest turns")]
    ways.append(Way("summary", "Summarize what was said so far"))
    largest = max(contexts, key=lambda each: each.tokens, default=None)
    if largest is not None and largest.tokens >= 2 * max(ctx, tokens):
        longer = min(largest.tokens, 4 * max(ctx, tokens))
        more = format_bytes(largest.nbytes * (longer - ctx) // largest.tokens)
        ways.append(Way("longer", f"A context of {longer:,} tokens: {more} more", longer))
    return (*ways, Way("new", "Begin a new conversation"))


class AnswerRecord:
    """What a turn keeps of an answer besides its text, from its chunks."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self._ids += *chunk.info.get("begun", ()), *chunk.token_ids
        self._last = chunk

    def info(self, model: str) -> dict[str, Any]:
        """The turn's ``info``: ``tokens``, ``tok_s``, ``context``, ``finish_reason``, and the
        ``ids`` with which ``model`` can continue it if it did not end by itself. Empty without a
        chunk.
        """
        if self._last is None:
            return {}
        reason = self._last.finish_reason
        info = {**answer_counts(self._last.metrics, model), "finish_reason": reason}
        info["tokens"] = max(info["tokens"], len(self._ids))
        if reason not in ("stop", "tool_calls") and 0 < len(self._ids) <= _MOST_IDS:
            info["ids"] = self._ids
        return info


def answer_counts(metrics: Metrics, model: str) -> dict[str, Any]:
    """The counts of an answer by ``model`` for its turn's ``info``."""
    tokens, tok_s = metrics.completion_tokens, metrics.decode_tok_s
    return {"tokens": tokens, "tok_s": tok_s, "context": [metrics.prompt_tokens + tokens, model]}


def is_nothing(turn: Turn) -> bool:
    """Whether a turn failed without any text."""
    return turn.state == "failed" and not turn.content


def _unanswered(turn: Turn, following: Turn | None) -> bool:
    """Whether a user's turn got no answer: no turn follows, or one that failed without any text."""
    no_answer = following is None or following.role == "user" or is_nothing(following)
    return turn.role == "user" and no_answer


def _with_results(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with a result for every call; for an interrupted call, a note."""
    whole: list[Message] = []
    missing: list[str] = []  # ids of calls whose results have not come yet
    for message in messages:
        if message["role"] == "tool":
            message = {**message, "content": message["content"] or _CUT}
            if message.get("tool_call_id") in missing:
                missing.remove(message["tool_call_id"])
        else:
            whole += map(_cut, missing)
            missing = [call.get("id", "") for call in message.get("tool_calls") or ()]
        whole.append(message)
    return [*whole, *map(_cut, missing)]


def _with_answers(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with a non-empty answer before every user message but the first.

    Some templates (Mistral's) refuse an empty answer, or a user message right after a call's
    result.
    """
    whole: list[Message] = []
    for message in messages:
        if message["role"] == "user" and whole and whole[-1]["role"] == "tool":
            whole.append({"role": "assistant", "content": _NO_ANSWER})
        if message["role"] == "assistant" and not (message["content"] or message.get("tool_calls")):
            message = {**message, "content": _NO_ANSWER}
        whole.append(message)
    return whole


def _without_pictures(turn: Turn) -> Message:
    if not turn.pictures:
        return turn.message
    text = joined_text(turn.content, turn.pictures, lambda picture: f"[{picture.name}]")
    return {"role": turn.role, "content": text}


def _cut(id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": _CUT}


Decision = Literal["once", "always", "refuse"]


class CallTurn:
    """A call to be confirmed (``asks``) and run. ``result`` is set when it has ended.

    ``conversation`` is the id of its conversation, ``begin`` begins a turn there, with an ``info``
    and ``after`` another, and ``finish`` ends it. ``decide``, ``has_ended`` and ``stop`` raise what
    ``finish`` does.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        conversation: str,
        call: ToolCall,
        begin: Callable[..., AnswerWriter],
        finish: Callable[..., None],
        after: int,
    ) -> None:
        self._toolbox, self._conversation, self._tool_call = toolbox, conversation, call
        self._running: Future[ToolResult] | None = None
        self.call = toolbox.read(call, conversation)
        self._info = {"tool_call_id": call.id, "arguments": call.arguments}
        self._info["title"] = self.call.title
        self.line = call_line(self._info)
        self._finish = finish
        self._writer = begin(after=after, role="tool", info=self._info)
        self.result: ToolResult | None = None

    @property
    def turn(self) -> int:
        return self._writer.turn

    @property
    def started(self) -> bool:
        return self._running is not None or self.result is not None

    def asks(self) -> bool:
        """Whether the user has to decide; an earlier decision may have allowed the tool since."""
        self.call = self._toolbox.read(self._tool_call, self._conversation)
        return self.call.asks

    def decide(self, decision: Decision, ctx: int) -> None:
        """Run it or refuse it; ``ctx`` is the model's context length in tokens."""
        if decision == "refuse":
            self._end(REFUSED)
            return
        if decision == "always" and self.call.tool is not None:
            self._toolbox.allow(self.call.tool, self._conversation)
        self._running = self._toolbox.run(self.call, ctx=ctx)

    def has_ended(self) -> bool:
        """Whether there is a result; a new one is saved."""
        running = self._running
        if self.result is None and running is not None and running.done():
            self._end(STOPPED if running.cancelled() else running.result())
        return self.result is not None

    def stop(self) -> None:
        if not self.has_ended():
            if self._running is not None:
                self._running.cancel()
            self._end(STOPPED)

    def _end(self, result: ToolResult) -> None:
        if not self._writer.text:
            self._writer.write(result.text)
        self._finish(self._writer, "done", info={**self._info, "ending": result.ending})
        self.result = result


def call_line(info: Mapping[str, object]) -> str:
    """A line such as ``files.read_file {"path": "a"}``, from a call turn's ``info``. If another
    program wrote that, items may be missing, and arguments may not be JSON.
    """
    arguments = str(info.get("arguments", ""))
    try:
        arguments = json.dumps(parse_json(arguments), ensure_ascii=False)
    except ValueError:
        arguments = " ".join(arguments.split())
    return as_line(f"{info.get('title') or info.get('name') or 'tool'} {arguments}".rstrip())
