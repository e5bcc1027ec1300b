"""Parses an answer's text as it streams: takes out calls, and puts thinking in the usual tags.

Malformed calls stay text. It does not know how a syntax was found.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from localrt.chat_format.notations import (
    ID,
    NUMBERED,
    JsonArguments,
    JsonCalls,
    Notation,
    ParsedCall,
    Signatures,
    Spelling,
    call_of,
    pattern,
    signatures,
)
from localrt.chat_format.thinking import CLOSE, OPEN, overlap
from localrt.engine.types import ToolCall

MARK = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]")
"""Matches the tokens by which models mark the parts of an answer."""

_LONGEST_MARK = 80  # characters


def expression(literal: str, *, strip: bool = True) -> str:
    """A regular expression for ``literal``, whose ids and numbers may differ from call to call."""
    found = pattern(literal.strip() if strip else literal)
    found = found.replace(ID, r"(?P<id>[\w.:\-]+)", 1).replace(ID, r"[\w.:\-]+")
    return found.replace(NUMBERED, r"(?P<index>\d+)")


def marks_in(*texts: str) -> tuple[str, ...]:
    """The marks in ``texts``, without duplicates."""
    return tuple(dict.fromkeys(mark for text in texts for mark in MARK.findall(text)))


def common_start(one: str, other: str) -> str:
    """The longest common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


_BARE = ("{", "[")  # the possible beginnings of an answer that is only JSON
_FENCE = "```json"
_KEYS = tuple(f'{{"{key}"' for key in ("name", "arguments", "parameters", "function", "id", "type"))
_UNMARKED = {_FENCE: "```", "<function=": "</function>"}
"""Beginnings of calls that models write without the mark around them, and their ends."""
_STARTS = ("{", "[", "<", "```", "call:")  # the beginnings of calls, besides a tool's name


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How an answer contains calls: ``opening`` begins them, ``closing`` (or the end) ends them.

    ``notations`` are tried in order on the text between. ``marks`` are further marks within
    calls. ``call_start`` is the part of the opening that belongs to the call. With ``bare``, calls
    of the tools may also come without the opening: as an answer that is only JSON, in a fence, or
    as ``<function=...>``. ``primed`` is the part of the opening that the prompt already has.
    ``as_text``: the template wants arguments as JSON text. ``spelling`` says how to write a call,
    if known.
    """

    opening: str
    closing: str
    notations: tuple[Notation, ...]
    marks: tuple[str, ...] = ()
    call_start: str = ""
    bare: bool = False
    primed: str = ""
    as_text: bool = False
    spelling: Spelling | None = None
    recipients: tuple[str, ...] = ()  # texts before calls, with {} for a tool's name

    def parse(self, text: str, tools: Signatures) -> list[ParsedCall] | None:
        """Parse the text between opening and closing; None if it is not calls."""
        found = (notation.parse(text, tools) for notation in self.notations)
        return next(filter(None, found), None)

    def is_open(self, text: str) -> bool:
        """Whether a closing mark after ``text`` would be part of a string."""
        return any(notation.is_open(text) for notation in self.notations)


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """The marks around the parts of an answer that are not calls.

    ``thinking`` has pairs of marks that begin and end a thought. ``answer`` begins the answer
    itself and ``end`` ends it: neither is shown.
    """

    thinking: tuple[tuple[str, str], ...] = ((OPEN, CLOSE),)
    answer: str = ""
    end: str = ""


USUAL_FRAME = AnswerFrame()
_NO_NAMES: Mapping[str, str] = {}

PLAIN_CALLS = CallSyntax(
    "",
    "",
    (JsonCalls(),),
    bare=True,
    spelling=Spelling(
        '{"name": "',
        '", "arguments": ',
        "}",
        JsonArguments(),
        joint='}\n{"name": "',
        later='", "arguments": ',
    ),
)
"""A JSON object and nothing else, for models of unknown call syntax."""


def make_call(call: ParsedCall, names: Mapping[str, str]) -> ToolCall:
    """Return ``call`` with its id, or else a new one of nine characters, as Mistral's models want.

    ``names`` maps the model's names of tools to the caller's.
    """
    name = names.get(call.name, call.name)
    return ToolCall(call.id or uuid.uuid4().hex[:9], name, call.arguments)


class TextParser:
    """Turns streamed text into the text to show, and collects the ``calls`` in it. ``names`` maps
    the model's names of tools to the caller's.

    ``syntax`` is None if no tools were given. ``thinking`` is the mark by which the prompt itself
    has opened the model's thinking, if it has: the shown text then begins with ``<think>``.
    Thinking contains no calls, except at the end of an answer whose thinking is never closed. A
    ``forced`` answer is nothing but calls.
    """

    def __init__(
        self,
        syntax: CallSyntax | None,
        tools: Sequence[Mapping[str, object]] = (),
        *,
        names: Mapping[str, str] = _NO_NAMES,
        thinking: str = "",
        frame: AnswerFrame = USUAL_FRAME,
        forced: bool = False,
    ) -> None:
        self._syntax = syntax
        self._forced = forced
        self._names = names
        self._tool_list = tools
        self._tools = signatures(tools)
        self._closings = dict(frame.thinking)
        self._closing = self._closings.get(thinking, "")  # while the model thinks
        self._first = f"{OPEN}\n" if thinking else ""
        self._buffer = self._primed = syntax.primed if syntax is not None else ""
        answer = self._primed + frame.answer if frame.answer else ""
        always = answer if self._primed or MARK.search(answer) else ""
        heads = syntax.recipients if syntax is not None else ()
        self._heads = tuple(head.format(name) for head in heads for name in self._tools)
        self._dropped = tuple(filter(None, (always, frame.end, *self._heads)))
        # What begins with a word, and space before it, is left out at the answer's beginning.
        self._lead = "" if self._primed or MARK.match(answer) else answer
        self._unmarked = tuple(_UNMARKED) if syntax is not None and syntax.bare else ()
        self._may_be = ""  # the buffered text begins with this one of them
        self._open = False
        self._at_last = False  # the buffered text may be calls at the end of a thought
        self._sought = 0  # the buffered text was searched for a closing mark up to here
        self._in_string = 0  # up to here it ends in a string, if not 0, by ``_notations``
        self._notations: tuple[Notation, ...] = ()
        self._space = ""  # the space before the open calls
        self._has_text = False  # whether anything but space and thinking has come
        self._bare = False  # the answer began like JSON, and is held back until its end
        self.calls: tuple[ToolCall, ...] = ()
        self.markers = _markers(syntax, frame)

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within the thinking at the answer's beginning."""
        return bool(self._closing) and not self._has_text

    def push(self, piece: str) -> str:
        """Add ``piece``, and return the text that is certainly not part of a call."""
        shown, self._first = self._first, ""
        self._buffer += piece
        while not self._bare and (found := self._step()) is not None:
            shown += found
        return shown

    def flush(self, *, cut: bool = False) -> str:
        """Return the buffered text at the end of the answer. Half a call is shown as text, or is
        dropped if the answer was ``cut``.
        """
        shown, self._first = self._first, ""
        syntax = self._syntax
        while self._open and syntax is not None:
            buffer, self._buffer, self._open = self._buffer, "", False
            if cut and (syntax.closing or syntax.parse(buffer, self._tools) is None):
                return shown
            body, closed, rest = buffer, "", ""
            if syntax.closing and syntax.parse(buffer, self._tools) is None:
                body, closed, rest = buffer.partition(syntax.closing)  # a string is not closed
            shown += self._ended(syntax, body, closed)
            shown += self.push(rest)
        buffer, self._buffer = self._buffer, ""
        if syntax is not None and self._at_last:
            return shown if cut else shown + self._calls_at_last(syntax, buffer)
        if (self._bare or self._may_be) and syntax is not None:
            if self._take_unmarked(syntax, buffer) or (cut and self._may_be):
                return shown
            buffer = self._space + buffer
        if cut and syntax is not None:
            buffer = self._without_half_call(syntax, buffer)
        if self._primed and self._primed.startswith(buffer):
            return shown
        return shown + buffer

    def _step(self) -> str | None:
        """The next piece of text to show; None if more text has to come first."""
        syntax = self._syntax
        if self._open and syntax is not None:
            return self._within(syntax)
        if self._at_last and syntax is not None:
            return self._within_thought(syntax)
        if self._may_be and syntax is not None:
            return self._within_unmarked(syntax)
        if not self._has_text and not self._closing and not self._begins(syntax):
            return None
        buffer = self._buffer
        if not buffer:
            return None
        marks = self._marks(syntax)
        at, mark = _first(buffer, marks)
        if at < 0:
            return self._certain(buffer, marks)
        if self._closing and mark != self._closing:
            self._buffer, self._at_last = buffer[at:], True
            return buffer[:at]
        self._buffer = buffer[at + len(mark) :]
        if self._closing:
            self._closing = ""
            return buffer[:at] + CLOSE
        self._has_text = self._has_text or bool(buffer[:at].strip())
        if mark in self._closings:
            self._closing = self._closings[mark]
            return buffer[:at] + OPEN
        if mark in self._dropped:
            self._primed = ""
            return buffer[:at]
        assert syntax is not None, "no other mark is looked for"
        shown = buffer[:at].rstrip()
        if mark in self._unmarked:
            self._may_be, self._sought, self._in_string = mark, len(mark), 0
            self._space, self._buffer = buffer[len(shown) : at], buffer[at:]
            return shown
        self._open, self._has_text, self._sought, self._in_string = True, False, 0, 0
        self._space = buffer[len(shown) : at]
        self._buffer = syntax.call_start + self._buffer
        return shown

    def _begins(self, syntax: CallSyntax | None) -> bool:
        """Whether it is clear how the answer begins: as text, or as JSON that may be calls."""
        start = self._buffer.lstrip()
        if self.calls:  # drop the space after a call
            self._buffer = start
            return True
        if self._lead:
            if len(start) < len(self._lead) and self._lead.startswith(start):
                return False
            if start.startswith(self._lead):
                self._buffer = start = start.removeprefix(self._lead)
            self._lead = ""
        if syntax is not None and syntax.bare:
            self._bare = any(start.startswith(mark) for mark in _BARE)
            return not any(mark.startswith(start[: len(mark)]) for mark in _BARE)
        return True

    def _marks(self, syntax: CallSyntax | None) -> tuple[str, ...]:
        """The marks to look for now."""
        calls = (syntax.opening,) if syntax is not None and syntax.opening else ()
        if self._closing:
            return (self._closing, *calls)
        return (*calls, *self._unmarked, *self._closings, *self._dropped)

    def _certain(self, buffer: str, marks: Sequence[str]) -> str | None:
        """The part of ``buffer``, which has no mark, that cannot begin one."""
        cut = len(buffer) - max((overlap(buffer, mark) for mark in marks), default=0)
        if self._syntax is not None and not self._closing:
            cut = len(buffer[:cut].rstrip())  # space before calls belongs to them
        shown, self._buffer = buffer[:cut], buffer[cut:]
        self._has_text = self._has_text or bool(shown.strip() and not self._closing)
        return shown or None

    def _within_thought(self, syntax: CallSyntax) -> str | None:
        """The text that looked like calls, once it is clear that the thought continues after it."""
        buffer = self._buffer
        body = buffer[len(syntax.opening) :]
        start, closed = body.lstrip(), self._closing in buffer
        at = body.find(syntax.closing) if syntax.closing else -1
        behind = body[at + len(syntax.closing) :].lstrip() if at >= 0 else ""
        goes_on = behind and not behind.startswith(syntax.opening[: len(behind)])
        begins = any(each[: len(start)] == start[: len(each)] for each in (*_STARTS, *self._tools))
        if not (closed or (goes_on and not syntax.is_open(body[:at])) or not begins):
            return None
        self._at_last = False
        shown = buffer.partition(self._closing)[0] if closed else buffer[: len(syntax.opening)]
        self._buffer = buffer[len(shown) :]
        return shown

    def _calls_at_last(self, syntax: CallSyntax, buffer: str) -> str:
        """Take calls of known tools from the end of an unclosed thought; return ``buffer`` if it is
        not calls.
        """
        inner = TextParser(syntax, self._tool_list)  # with the model's names of tools
        rest = inner.push(buffer) + inner.flush()
        if rest.strip() or not all(call.name in self._tools for call in inner.calls):
            return buffer
        self.calls += tuple(
            replace(call, name=self._names.get(call.name, call.name)) for call in inner.calls
        )
        return ""

    def _without_half_call(self, syntax: CallSyntax, buffer: str) -> str:
        """Return ``buffer`` without the beginning of a call at its end."""
        if not self._bare:
            half = max(overlap(buffer, mark) for mark in (syntax.opening, *self._heads))
            least = 1 if self._forced and not self._closing else 2  # one character may be text
            return buffer[: len(buffer) - half].rstrip() if half >= least else buffer
        before, middle = '{"name":"', '"'
        if syntax.spelling is not None:
            before = syntax.spelling.before.removeprefix(syntax.opening)
            middle = syntax.spelling.middle
        start = "".join(_unfenced(buffer).split()).lstrip("[")
        calls = ("".join(f"{before}{name}{middle}".split()) for name in self._tools)
        return "" if any(each[: len(start)] == start[: len(each)] for each in calls) else buffer

    def _within(self, syntax: CallSyntax) -> str | None:
        """End the open calls if their closing mark has come; None if not."""
        buffer, closing = self._buffer, syntax.closing
        if not closing or (at := self._find_end(syntax, closing)) < 0:
            return None
        self._buffer, self._open = buffer[at + len(closing) :], False
        return self._ended(syntax, buffer[:at], closing)

    def _find_end(self, syntax: CallSyntax, closing: str) -> int:
        """Where the buffered calls are closed, outside of strings; -1 if they are not yet."""
        while (at := self._buffer.find(closing, self._sought)) >= 0:
            # Only what is new, for the time to be linear in the text, however many ends it has.
            text, inside = self._buffer[self._in_string : at], self._in_string > 0
            if not inside:
                text, self._notations = _unfenced(text), syntax.notations
            self._notations = tuple(n for n in self._notations if n.is_open(text, inside=inside))
            if not self._notations:
                return at
            self._in_string, self._sought = at, at + 1
        self._sought = max(self._sought, len(self._buffer) - len(closing) + 1)
        return -1

    def _within_unmarked(self, syntax: CallSyntax) -> str | None:
        """The text that looked like calls without their mark, once it is complete and none."""
        buffer, end = self._buffer, _UNMARKED[self._may_be]
        text, calls = self._may_be, False
        if self._begins_call(buffer.removeprefix(text)):
            if (at := self._find_end(syntax, end)) < 0:
                return None
            text = buffer[: at + len(end)]
            calls = self._take_unmarked(syntax, text)
        self._buffer, self._may_be = buffer[len(text) :], ""
        space, self._space = self._space, ""
        self._has_text = not calls
        if calls and syntax.closing:
            self._dropped += (syntax.closing,)  # some models leave out the opening alone
        return "" if calls else space + text

    def _begins_call(self, text: str) -> bool:
        """Whether the text after a beginning of ``_UNMARKED`` may become calls of the tools."""
        if self._may_be == _FENCE:
            start = "".join(text[:_LONGEST_MARK].split()).removeprefix("[")
            return any(key.startswith(start[: len(key)]) for key in _KEYS)
        name, closed, _ = text.partition(">")
        return name.strip() in self._tools or (
            not closed and any(tool.startswith(name) for tool in self._tools)
        )

    def _take_unmarked(self, syntax: CallSyntax, text: str) -> bool:
        """Take calls from ``text``, JSON or not; False if it is anything but calls of the tools."""
        calls = syntax.parse(_unfenced(text), self._tools) or []
        found = bool(calls) and all(call.name in self._tools for call in calls)
        if found:
            self.calls += tuple(make_call(call, self._names) for call in calls)
        return found

    def _ended(self, syntax: CallSyntax, body: str, closing: str) -> str:
        """Parse the complete text of calls; return it for showing if it is not calls."""
        calls = syntax.parse(body, self._tools)
        space, self._space = self._space, ""
        primed, self._primed = self._primed, ""
        if calls is None:
            self._has_text = True
            opening = syntax.opening.removesuffix(syntax.call_start)
            return space + opening.removeprefix(primed) + body + closing
        self.calls += tuple(make_call(call, self._names) for call in calls)
        return ""


def _first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Position and text of the first of ``marks``; -1 if there is none or a longer one may come."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return -1, ""
    at, _, mark = min(found)
    longer = any(len(m) > len(mark) and m.startswith(text[at:]) for m in marks)
    return (-1, "") if longer else (at, mark)


def _markers(syntax: CallSyntax | None, frame: AnswerFrame) -> tuple[str, ...]:
    """The marks that must reach the parser."""
    known = [OPEN, CLOSE, *(mark for pair in frame.thinking for mark in pair)]
    known += [frame.answer, frame.end]
    if syntax is not None:
        known += [syntax.opening, syntax.closing, *syntax.marks]
    within = [mark for text in known for mark in MARK.findall(text)]
    return tuple(dict.fromkeys(filter(None, known + within)))


def _unfenced(text: str) -> str:
    """Remove the fence ```json ... ``` around ``text``, if there is one."""
    return text.strip().removeprefix(_FENCE).removesuffix(_UNMARKED[_FENCE])


# -- the channels of gpt-oss -----------------------------------------------------------------------

# It is OpenAI's format (cookbook.openai.com/articles/openai-harmony), in which each message has a
# channel: for thinking, calls, or the answer.
#
#   <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
#   <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{...}<|call|>

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_TO = "to="  # a header may begin with the recipient: the prompt ends with the role
_HARMONY_MARKERS = (
    _START,
    _CHANNEL,
    _MESSAGE,
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
HARMONY_CALL = Spelling(
    f"{_CHANNEL}commentary to=functions.", f" <|constrain|>json{_MESSAGE}", "", JsonArguments()
)
"""A call, after the role."""
HARMONY_ANSWER = f"{_CHANNEL}final{_MESSAGE}"
"""The beginning of an answer, after the role."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_HARMONY_MARK = re.compile("|".join(map(re.escape, _HARMONY_MARKERS)))


def is_harmony(template: str) -> bool:
    """Whether the source of a chat template has the channels of gpt-oss."""
    return _CHANNEL in template and _MESSAGE in template


class HarmonyParser:
    """See ``TextParser``. An answer begins with a message's header, or,
    with ``thinking``, within a message of thinking that the prompt has opened.
    """

    markers = _HARMONY_MARKERS

    def __init__(self, *, thinking: bool = False, names: Mapping[str, str] = _NO_NAMES) -> None:
        self._names = names
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
        while match := _HARMONY_MARK.search(self._buffer):
            shown += self._take(self._buffer[: match.start()]) + self._mark(match[0])
            self._buffer = self._buffer[match.end() :]
        cut = len(self._buffer) - max(overlap(self._buffer, mark) for mark in _HARMONY_MARKERS)
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
