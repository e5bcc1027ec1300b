"""Finds the syntax of a model's calls by rendering probe calls with its chat template.

The probes have names, keys and values that occur nowhere else: the text before, between and after
them gives the marks. A syntax is accepted only if it parses the probes. The result is None if a
template writes no calls, refuses them, or writes them in an unknown way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from localrt.chat_format.argument_notations import (
    Arguments,
    JsonArguments,
    KeywordArguments,
    Mid,
    QuotedArguments,
    TaggedArguments,
)
from localrt.chat_format.argument_types import DECODER
from localrt.chat_format.notations import ID, NUMBERED, Framed, JsonCalls, Spelling
from localrt.chat_format.parser import (
    MARK,
    CallSyntax,
    TextParser,
    common_end,
    common_start,
    expression,
    inside_mark,
    marks_in,
    snapped,
)
from localrt.chat_format.probing import FIRST, IDS, SECOND, TEXT, ProbeCall, Probes, UnreadableError
from localrt.common.errors import TemplateError

_KEY, _NEXT_KEY = "zqa", "zqb"
_VALUE, _NEXT_VALUE = "zvc", "zvd"
_NUMBER = 730_151
_VALUES: dict[str, object] = {
    **{"number": _NUMBER, "boolean": True, "null": None},
    **{"object": {"zqk": _NUMBER}, "array": [_NUMBER]},
}
# Characters that may be escaped: quotes, a new line, a backslash, tags, a letter beyond ASCII.
_SPECIAL = "zq\"1'2\n3\\4<5&6é"
_ONE = {_KEY: _VALUE}
_TWO = {_KEY: _VALUE, _NEXT_KEY: _NEXT_VALUE}
_EVERYTHING: dict[str, object] = {
    **{"zqa": _SPECIAL, "zqb": "", "zqc": _NUMBER, "zqd": -1.5, "zqe": True, "zqf": False},
    **{"zqg": None, "zqh": {"k": ["v", {"w": 1, "x": []}], "l": {}}, "zqi": ["a", 2, None]},
}
_KINDS = ("string", "string", "integer", "number", "boolean", "boolean", "null", "object", "array")
_SCHEMA = {key: {"type": kind} for key, kind in zip(_EVERYTHING, _KINDS, strict=True)}
_READ_BY = [
    {"name": name, "parameters": {"type": "object", "properties": _SCHEMA}}
    for name in (FIRST, SECOND)
]
# Some templates write an empty thought before a call: the answer begins after one of these.
_THOUGHT_ENDS = ("</think>", "<|END_THINKING|>", "</seed:think>", "[/THINK]", "<channel|>")


def probe_calls(probes: Probes) -> CallSyntax | None:
    """Find how the template of ``probes`` writes calls."""
    best: CallSyntax | None = None
    forms = product(("", None), (False, True), ("", "functions.{name}:{index}"))
    for empty, as_text, id_form in forms:
        try:
            form = replace(probes, empty=empty, as_text=as_text, id_form=id_form)
            probe = _Probe(form)
            syntax = replace(probe.syntax(), as_text=as_text)
        except (TemplateError, UnreadableError, ValueError, RecursionError):
            continue
        if probe.reads_everything(syntax):
            return syntax
        best = best or syntax
    return best


@dataclass(frozen=True, slots=True)
class _Unit:
    """A JSON value with calls in a text: its start, end and notation."""

    start: int
    end: int
    notation: JsonCalls


@dataclass(frozen=True, slots=True)
class _Parts:
    """The marks that begin and end all calls (``section``), and each call."""

    section: str
    section_end: str
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class _Shape:
    """The text after a name: ``lead`` is between middle and key, ``trail`` follows a value."""

    arguments: Arguments
    middle: str
    lead: str
    trail: str

    def place(self, text: str, name_end: int) -> tuple[str, int]:
        """Return the middle of another such call, and the end of its arguments."""
        key = text.index(_KEY, name_end)
        value = text.index(_VALUE, key) + len(_VALUE)
        middle = text[name_end : key - len(self.lead)]
        if not text.startswith(self.lead, key - len(self.lead)):
            raise UnreadableError("calls differ")
        if not text.startswith(self.trail, value):
            raise UnreadableError("calls differ")
        return middle, value + len(self.trail)


class _Probe:
    """Probes a template with one form of calls."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._special = ""
        self._alone = probes.calls((FIRST, _ONE))
        if FIRST not in self._alone:
            raise UnreadableError("no call is written")
        both = probes.optional((FIRST, _ONE), (SECOND, _ONE))
        self._both = both if SECOND in both and FIRST in both else ""

    def syntax(self) -> CallSyntax:
        """Find the syntax.

        Raises:
            UnreadableError: it does not parse the first probes.
            TemplateError: the template refuses them.
        """
        unit = _json_unit(self._alone)
        syntax = self._framed() if unit is None else self._json(unit)
        if self._read(syntax, (FIRST, _ONE)) and (
            not self._both or self._read(syntax, (FIRST, _ONE), (SECOND, _ONE))
        ):
            return self._with_more(syntax)
        raise UnreadableError("what was found does not read what was written")

    def _with_more(self, syntax: CallSyntax) -> CallSyntax:
        """Add the spelling of a second call to ``syntax``, if the template writes one."""
        spelling = syntax.spelling
        if spelling is None or not self._both:
            return syntax
        both = self._both
        try:
            shape = self._shape()
            _, end = shape.place(both, both.index(FIRST) + len(FIRST))
            second = both.index(SECOND, end)
            other, _ = shape.place(both, second + len(SECOND))
            joint, later = both[end:second], self._numbered(shape.middle, other)
        except (ValueError, UnreadableError):
            return syntax
        given = both[both.index(FIRST) + len(FIRST + shape.middle) : end]
        spelling = replace(spelling, joint=self._without_ids(joint), later=self._without_ids(later))
        more = replace(syntax, spelling=spelling)
        text = f"{spelling.before}{FIRST}{spelling.middle}{given}{spelling.joint}"
        text += f"{SECOND}{spelling.later.replace(NUMBERED, '1')}{given}{spelling.after}"
        shown, found = _calls_in(text, more)
        return more if not shown.strip() and found == [(FIRST, _ONE), (SECOND, _ONE)] else syntax

    def reads_everything(self, syntax: CallSyntax) -> bool:
        """Whether ``syntax`` parses every kind of value, and a call without arguments."""
        try:
            return self._read(syntax, (FIRST, _EVERYTHING)) and self._read(syntax, (FIRST, {}))
        except (TemplateError, UnreadableError):
            return False

    def _read(self, syntax: CallSyntax, *calls: ProbeCall) -> bool:
        text = self._probes.calls(*calls)
        begin = text.find(FIRST) - len(self._alone[self._begin : self._alone.index(FIRST)])
        text = text[: len(text) - len(self._turn_end(text))]
        shown, found = _calls_in(text[max(begin, 0) :], syntax)
        return found == [(name, dict(given)) for name, given in calls] and FIRST not in shown

    # -- where calls begin and end -----------------------------------------------------------------

    def _turn_end(self, text: str) -> str:
        """The part at the end of ``text`` that also ends an answer without calls."""
        plain = self._probes.plain.rpartition(TEXT)[2]
        shared = len(common_end(text.rstrip(), plain.rstrip()))
        return text[snapped(text, len(text.rstrip()) - shared) :]

    def _opening(self, at: int) -> str:
        """The part of ``_alone`` before the call at ``at`` that belongs to calls."""
        before = self._alone[:at]
        start = self._turn_start(before, self._alone.index(FIRST) - at)
        opening = before[start:]
        for mark in _THOUGHT_ENDS:
            opening = opening.rpartition(mark)[2]
        opening = opening.lstrip()
        self._begin = at - len(opening)
        return opening

    def _turn_start(self, before: str, lead: int) -> int:
        """The end of the turn's header, or of other text before an opening."""
        probes = self._probes
        spoken = probes.optional((FIRST, _ONE), text=TEXT)
        _, found, behind = spoken.partition(TEXT)
        starts = [0]
        if found and FIRST in behind:  # text may come first
            between = behind[: behind.index(FIRST) - lead]
            starts.append(snapped(before, len(before) - len(common_end(before, between))))
        header = probes.plain.partition(TEXT)[0]
        for each in (probes.prompt, header):
            shared = len(common_start(before, each))
            while inside_mark(before, shared):
                shared = before.rfind("<", 0, shared)
            starts.append(shared)
        return max(starts)

    def _marks_around(self, opening: str, between: str, tail: str) -> tuple[str, str, _Parts]:
        """The marks that open and close calls, and the texts that contain them."""
        call = opening
        if between:
            call = common_end(opening, between)
            call = opening[snapped(opening, len(opening) - len(call)) :]
        section = opening[: len(opening) - len(call)].strip()
        end = len(tail) - len(self._turn_end(tail))
        if between:
            shared = len(common_start(between, tail))
            while inside_mark(between, shared) or inside_mark(tail, shared):
                shared = max(tail.rfind("<", 0, shared), 0)
            closing = tail[:shared].strip()
        else:
            closing = tail[:end].strip()
        mark = self._first_mark(opening)
        if section:
            behind = tail[shared : max(end, shared)]
            found = MARK.search(behind)
            outer = found[0] if found else behind.strip()
            section_end = behind[: found.end()] if found else behind
        else:
            marks = MARK.findall(closing)
            outer = marks[-1] if marks and closing.endswith(marks[-1]) else closing
            section_end = outer
        return mark, outer, _Parts(section, section_end.strip(), call.strip(), closing)

    def _first_mark(self, opening: str) -> str:
        """The shortest beginning of ``opening``, up to a mark, that is only written with calls."""
        others = self._probes.prompt + self._probes.plain
        ends = [found.end() for found in MARK.finditer(opening)]
        beginnings = (opening[:end] for end in ends)
        return next((each for each in beginnings if each not in others), opening.strip())

    # -- JSON --------------------------------------------------------------------------------------

    def _json(self, unit: _Unit) -> CallSyntax:
        opening = self._opening(unit.start)
        between, tail = "", self._alone[unit.end :]
        first = _json_unit(self._both)
        if first is not None and self._both.find(SECOND, first.end) >= 0:  # two values, no list
            begin = self._both.index(SECOND) - (self._alone.index(FIRST) - unit.start)
            _, end = DECODER.raw_decode(self._both, begin)
            between, tail = self._both[first.end : begin], self._both[end:]
        mark, closing, parts = self._marks_around(opening, between, tail)
        call_start, lead = "", opening[len(mark) :].strip()
        if mark and not mark.endswith((">", "]")):
            call_start = self._alone[unit.start]  # a word is a mark only with the bracket after it
            mark = opening
        found = MARK.search(closing)
        closing = found[0] if found else closing
        notation = replace(unit.notation, lead=lead)
        end = unit.end + tail.find(closing) + len(closing) if closing in tail else unit.end
        return CallSyntax(
            mark + call_start,
            closing,
            (notation,),
            marks=marks_in(opening, between, parts.closing, closing),
            call_start=call_start,
            bare=mark in ("", "<tool_call>"),
            spelling=self._json_spelling(end),
        )

    def _json_spelling(self, end: int) -> Spelling | None:
        """The spelling of ``_alone`` up to ``end``; None if the name does not come first."""
        text, at = self._alone, self._alone.index(FIRST)
        try:
            shape = self._shape()
            _, arguments_end = shape.place(text, at + len(FIRST))
        except (ValueError, UnreadableError):
            return None
        if self._quotes(shape):
            return None
        before, after = text[self._begin : at], text[arguments_end:end]
        middle = self._without_ids(shape.middle)
        return Spelling(
            self._without_ids(before), middle, self._without_ids(after), shape.arguments
        )

    @staticmethod
    def _quotes(shape: _Shape) -> bool:
        """Whether arguments are written as JSON text within JSON."""
        return isinstance(shape.arguments, JsonArguments) and shape.lead.startswith('"')

    # -- a name in a frame -------------------------------------------------------------------------

    def _framed(self) -> CallSyntax:
        alone, both = self._alone, self._both
        shape = self._shape()
        at = alone.index(FIRST)
        _, end = shape.place(alone, at + len(FIRST))
        opening = self._opening(at)
        middle, between, tail = shape.middle, "", alone[end:]
        if both:
            _, end = shape.place(both, both.index(FIRST) + len(FIRST))
            second = both.index(SECOND, end)
            between = both[end:second]
            other, end = shape.place(both, second + len(SECOND))
            middle, tail = self._numbered(middle, other), both[end:]
        primed = ""
        if not opening:
            primed = opening = between.strip()
            if not primed or not self._probes.prompt.endswith(primed):
                raise UnreadableError("nothing marks a call")
        opening, between, tail = map(self._without_ids, (opening, between, tail))
        mark, outer, parts = self._marks_around(opening, between, tail)
        rest = between.strip().removeprefix(parts.closing).removesuffix(parts.opening).strip()
        arguments = shape.arguments
        if isinstance(arguments, TaggedArguments):
            arguments = replace(arguments, closing=parts.closing or outer)
        ends = "|".join(map(expression, filter(None, (rest, parts.section_end))))
        frame = Framed(
            opening=expression(parts.opening),
            middle=expression(middle, strip=False),
            closing=expression(parts.closing),
            arguments=arguments,
            section=expression(parts.section),
            between=ends,
            id_form=self._probes.id_form,
            mark=mark,
            end=outer,
        )
        stop = parts.section_end if parts.section else parts.closing
        after = tail[: tail.index(stop) + len(stop)] if stop else ""
        before = opening[len(primed) :]
        middle = self._without_ids(shape.middle)
        spelling = None if self._quotes(shape) else Spelling(before, middle, after, arguments)
        spelled = alone[at : shape.place(alone, at + len(FIRST))[1]] + self._special
        return CallSyntax(
            mark,
            outer,
            (frame,),
            marks=marks_in(opening, between, parts.closing, parts.section_end, spelled),
            primed=primed,
            spelling=spelling,
        )

    def _without_ids(self, text: str) -> str:
        for call_id in IDS:
            text = text.replace(call_id, ID)
        return text

    def _numbered(self, first: str, second: str) -> str:
        """The common text after two names, with a placeholder for a number that differs."""
        first, second = self._without_ids(first), self._without_ids(second)
        if first == second:
            return first
        start = common_start(first, second)
        end = common_end(first[len(start) :], second[len(start) :])
        changed = first[len(start) : len(first) - len(end)]
        if not changed.isdigit():
            raise UnreadableError("calls differ")
        return f"{start}{NUMBERED}{end}"

    def _shape(self) -> _Shape:
        """Find how arguments are written."""
        text = self._alone
        name_end = text.index(FIRST) + len(FIRST)
        for start in (found.start() + name_end for found in re.finditer(r'[{"]', text[name_end:])):
            try:
                value, end = DECODER.raw_decode(text, start)
                value = DECODER.decode(value) if isinstance(value, str) else value
            except ValueError:
                continue
            if value == _ONE:
                key, value_at = text.index(_KEY, start), text.index(_VALUE, start)
                return _Shape(
                    JsonArguments(),
                    text[name_end:start],
                    text[start:key],
                    text[value_at + len(_VALUE) : end],
                )
        key = text.index(_KEY, name_end)
        value_at = text.index(_VALUE, key)
        head, mid = text[name_end:key], text[key + len(_KEY) : value_at]
        behind = text[value_at + len(_VALUE) :]
        if head.endswith("{") and mid.startswith(":"):
            quote = mid[1:].strip()
            if not quote or not behind.startswith(quote):
                raise UnreadableError("strings without quotes")
            closing = behind[: behind.index("}") + 1]
            return _Shape(QuotedArguments(quote), head[:-1], "{", closing)
        if head.strip() == "(" and mid.strip() in ("='", '="'):
            special = self._probes.calls((FIRST, {_KEY: _SPECIAL}))
            escaped = mid.strip()[-1] == '"' or f"'{_SPECIAL}'" not in special
            return _Shape(KeywordArguments(escaped), head, "", behind[:1])
        return self._tagged(name_end, mid)

    def _tagged(self, name_end: int, mid: str) -> _Shape:
        probes, text = self._probes, self._alone
        two = probes.calls((FIRST, _TWO))
        key, next_key = (two.index(each, name_end) for each in (_KEY, _NEXT_KEY))
        value_end = two.index(_VALUE, key) + len(_VALUE)
        head, gap = two[name_end:key], two[value_end:next_key]
        if two.find(_NEXT_VALUE, next_key) < 0 or not text.startswith(two[:value_end]):
            raise UnreadableError("pairs are in no order")
        start = snapped(two, key - len(common_end(head, gap)))
        opening = two[start:key].lstrip()
        after = gap[: len(gap) - len(opening)].rstrip()
        if not opening.strip() or not after.strip():
            raise UnreadableError("nothing marks the arguments")
        mids = self._mids(Mid(mid, after))
        as_json = mid.endswith('"') and after.startswith('"') and _SPECIAL not in self._special
        if as_json:
            mids = (Mid(mid[:-1], after[1:]),)
        between = gap[len(after) : len(gap) - len(opening)]
        arguments = TaggedArguments(opening, mids, "", as_json, between)
        return _Shape(arguments, head[: len(head) - len(opening)], opening, after)

    def _mids(self, usual: Mid) -> tuple[Mid, ...]:
        """Find how values of other kinds are written, besides ``usual`` strings."""
        probes = self._probes
        self._special = probes.calls((FIRST, {_KEY: _SPECIAL}))
        mids = [usual]
        for kind, value in _VALUES.items():
            text = probes.calls((FIRST, {_KEY: value}))
            key = text.index(_KEY) + len(_KEY)
            shown = text[key : text.index(usual.after, key)]
            spelled = next(filter(shown.endswith, (json.dumps(value), str(value))), "")
            before = shown.removesuffix(spelled)
            if spelled and before not in (mid.before for mid in mids):  # marks tell the kind
                mids[0] = replace(usual, string=True)
                mids.append(Mid(before, usual.after, string=False, kind=kind))
        if _SPECIAL in self._special:
            at = self._special.rindex(_SPECIAL)
            key = self._special.rindex(_KEY, 0, at)
            before = self._special[key + len(_KEY) : at]
            after = self._special[at + len(_SPECIAL) :]
            if before != usual.before:  # such strings get other marks
                end = after.find(usual.after) + len(usual.after)
                mids.append(Mid(before, after[:end], string=True))
        return tuple(mids)


def _calls_in(text: str, syntax: CallSyntax) -> tuple[str, list[ProbeCall]]:
    """Parse ``text`` by ``syntax``: the text to show, and the calls."""
    parser = TextParser(syntax, _READ_BY)
    shown = parser.push(text) + parser.flush()
    return shown, [(call.name, json.loads(call.arguments)) for call in parser.calls]


# -- JSON ------------------------------------------------------------------------------------------


def _json_unit(text: str) -> _Unit | None:
    """The first JSON value in ``text`` with the first call's name and arguments."""
    name_at = text.find(FIRST)
    for start in (found.start() for found in re.finditer(r"[\[{]", text[: max(name_at, 0)])):
        try:
            value, end = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        notation = _keys(value[0] if isinstance(value, list) and value else value, ())
        if notation is not None:
            return _Unit(start, end, notation)
    return None


def _keys(value: object, path: tuple[str, ...]) -> JsonCalls | None:
    """Find the keys of the name and the arguments in ``value``."""
    if not isinstance(value, Mapping):
        return None
    if _is_one(value.get(FIRST)):
        return JsonCalls(path, None)
    keys = {FIRST: "", "id": ""}
    for key, item in value.items():
        if item == FIRST:
            keys["name"] = key
        elif _is_one(item):
            keys["arguments"] = key
        elif item == IDS[0]:
            keys["id"] = key
    if "name" in keys and "arguments" in keys:
        return JsonCalls(path, keys["name"], (keys["arguments"],), keys["id"])
    inner = (_keys(item, (*path, key)) for key, item in value.items())
    return next((found for found in inner if found is not None), None)


def _is_one(value: object) -> bool:
    try:
        return bool((DECODER.decode(value) if isinstance(value, str) else value) == _ONE)
    except ValueError:
        return False
