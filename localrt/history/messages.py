"""A conversation's turns as messages for a model: calls have results, and questions answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localrt.engine.types import Message, Metrics
from localrt.history.conversation import Turn
from localrt.history.pictures import joined_text

_CUT = "The app ended before this call did."
_NO_ANSWER = "(No answer.)"


def messages_for_model(
    turns: Sequence[Turn], system: str | None, *, before: int | None = None, sees: bool = True
) -> list[Message]:
    """The messages of ``turns`` before turn ``before``, system prompt first.

    Unanswered messages are left out. A model that does not see gets the names of pictures.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn, following in zip(turns, (*turns[1:], None), strict=False):
        if before is not None and turn.id == before:
            break
        if turn.role == "tool" or not (_unanswered(turn, following) or is_nothing(turn)):
            messages.append(turn.message if sees else _without_pictures(turn))
    return _with_answers(_with_results(messages))


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
