"""The format of gpt-oss, whose messages each have a channel: for thinking, calls, or the answer.

It is OpenAI's (cookbook.openai.com/articles/openai-harmony):

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{...}<|call|>

The parser shows thinking as ``<think>...</think>`` and takes calls out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from localrt.chat_format.histories import text_of
from localrt.chat_format.notations import JsonArguments, Spelling, call_of
from localrt.chat_format.parser import make_call
from localrt.chat_format.thinking import CLOSE, OPEN, THOUGHT_FIELDS, overlap
from localrt.engine.types import ToolCall

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_TO = "to="  # a header may begin with the recipient: the prompt ends with the role
_MARKERS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_CALL = Spelling(
    f"{_CHANNEL}commentary to=functions.", f" <|constrain|>json{_MESSAGE}", "", JsonArguments()
)
"""A call, after the role."""
HARMONY_ANSWER = f"{_CHANNEL}final{_MESSAGE}"
"""The beginning of an answer, after the role."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_MARK = re.compile("|".join(map(re.escape, _MARKERS)))


def is_harmony(template: str) -> bool:
    """Whether the source of a chat template has the channels of gpt-oss."""
    return _CHANNEL in template and _MESSAGE in template


def with_thoughts_joined(messages: Sequence[object]) -> list[object]:
    """Shape ``messages`` for a template of gpt-oss, which takes thoughts or text with calls, but
    not both: text before calls is appended to the thoughts.
    """
    shaped: list[object] = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content"):
            thought = next(filter(None, map(message.get, THOUGHT_FIELDS)), "")
            said = "\n\n".join(filter(None, (thought, text_of(message))))
            message = {**message, "content": "", **dict.fromkeys(THOUGHT_FIELDS, said)}
        shaped.append(message)
    return shaped


class HarmonyParser:
    """See ``localrt.chat_format.parser.TextParser``. An answer begins with a message's header, or,
    with ``thinking``, within a message of thinking that the prompt has opened.
    """

    markers = _MARKERS

    def __init__(self, *, thinking: bool = False, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}
        self._first = f"{OPEN}\n" if thinking else ""
        self._header: str | None = None if thinking else ""  # None within a message's text
        self._text = ""  # the arguments of the call to _recipient
        self._recipient: str | None = None
        self.thinking = thinking
        self._buffer = ""
        self._has_text = False  # whether any text but thoughts has come
        self._unmarked = True  # no mark has come yet
        self.calls: tuple[ToolCall, ...] = ()

    def push(self, piece: str) -> str:
        self._buffer += piece
        shown, self._first = self._first, ""
        while match := _MARK.search(self._buffer):
            shown += self._take(self._buffer[: match.start()]) + self._mark(match[0])
            self._buffer = self._buffer[match.end() :]
        cut = len(self._buffer) - max(overlap(self._buffer, mark) for mark in _MARKERS)
        shown += self._take(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return shown

    def flush(self, *, cut: bool = False) -> str:
        """Return the buffered text at the end of the answer; drop a call that was ``cut``."""
        buffer, self._buffer = self._buffer, ""
        if cut and (self._recipient is not None or self._header):
            self._recipient = self._header = None
            return ""
        shown = self._take(buffer)
        if self._unmarked and self._header:  # the text only looked like a header
            shown, self._header = self._header, None
        return shown + self._end()

    def _take(self, text: str) -> str:
        """Handle text between two marks; return the part to show."""
        if self._header is not None:
            self._header += text
            # An answer without any header is shown unchanged.
            start = self._header.lstrip()[: len(_TO)]
            if self._header and self._unmarked and not _TO.startswith(start):
                shown, self._header = self._header, None
                return shown
            return ""
        if self._recipient is not None:
            self._text += text
            return ""
        if self.thinking:  # thoughts after the first shown text are dropped
            return "" if self._has_text else text
        self._has_text = self._has_text or bool(text.strip())
        return text

    def _mark(self, mark: str) -> str:
        self._unmarked = False
        if mark == "<|constrain|>":
            return ""
        if mark != _MESSAGE:
            shown = self._end() if self._header is None else ""
            # A header may have a role, followed by a channel.
            begins = mark != _CHANNEL or self._header is None
            self._header = "" if begins else self._header
            if mark == _CHANNEL:
                self._header = f"{self._header} "
            return shown
        header, self._header = self._header or "", None
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] not in ("user", "assistant"):
            self._recipient, self._text = recipient[1], ""
            return ""
        self.thinking = "analysis" in header
        return f"{OPEN}\n" if self.thinking and not self._has_text else ""

    def _end(self) -> str:
        """End a message: close thinking or add a call; return text to show."""
        if self.thinking:
            self.thinking = False
            return "" if self._has_text else f"\n{CLOSE}\n\n"
        if self._recipient is None:
            return ""
        name, self._recipient = self._recipient, None
        text, self._text = self._text, ""
        call = call_of(name, text)
        if call is None:
            return text
        self.calls += (make_call(call, self._names),)
        return ""
