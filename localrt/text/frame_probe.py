"""What a chat template writes around the thinking and the answer of an assistant's turn."""

from __future__ import annotations

from localrt.errors import TemplateError
from localrt.text.marked_text import MARK, common_start
from localrt.text.parser import USUAL_FRAME, AnswerFrame
from localrt.text.probing import FIRST, TEXT, Written
from localrt.text.thinking import CLOSE, OPEN

__all__ = ["probe_frame"]

_THOUGHT = "Zthought zq¶"
_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
_LONGEST = 64  # characters of a mark


def probe_frame(written: Written) -> AnswerFrame:
    """The frame of the template behind ``written``."""
    thinking = _thinking(written)
    pairs = (thinking, *USUAL_FRAME.thinking) if thinking else USUAL_FRAME.thinking
    answer, end = "", ""
    header, found, tail = written.plain.partition(TEXT)
    if found and header.startswith(written.prompt):
        answer = header[len(written.prompt) :]
        for _, closing in pairs:
            answer = answer.rpartition(closing)[2]
        answer = answer.lstrip()
        mark = MARK.match(tail.lstrip())
        end = mark[0] if answer and mark else ""
    return AnswerFrame(pairs, answer, end)


def _thinking(written: Written) -> tuple[str, str] | None:
    """The marks around a thought, where they are not the usual ones."""
    fields = dict.fromkeys(_FIELDS, _THOUGHT)
    for calls in ((), ((FIRST, {"zqa": "zvc"}),)):
        try:
            silent = written.calls(*calls, text=TEXT) if calls else written.plain
            text = (
                written.calls(*calls, text=TEXT, **fields)
                if calls
                else written.message(TEXT, **fields)
            )
        except TemplateError:
            continue
        before, found, behind = text.partition(_THOUGHT)
        if not found or TEXT in before or FIRST in before:
            continue
        opening = _opening(before, silent)
        closing = _closing(behind)
        if closing:  # the answer may be a turn of its own
            closing += _begun_by(written.prompt, behind.partition(closing)[2]).rstrip()
        if opening and opening in written.prompt:  # it begins turns; the prompt may go on
            rest = written.prompt.rpartition(opening)[2].strip()
            opening = rest if rest and closing not in rest else opening
        if opening and closing and (opening, closing) != (OPEN, CLOSE):
            return opening, closing
        return None
    return None


def _opening(before: str, silent: str) -> str:
    """What opens a thought at the end of ``before``; without one, it would be ``silent``."""
    shared = common_start(before, silent)
    cut = shared.rfind("<") if "<" in shared and ">" not in shared[shared.rfind("<") :] else None
    opening = before[len(shared[:cut]) :].strip()
    if not opening:
        marks = list(MARK.finditer(before.rstrip()))
        opening = marks[-1][0] if marks and marks[-1].end() == len(before.rstrip()) else ""
    return opening if len(opening) <= _LONGEST else ""


def _closing(behind: str) -> str:
    start = behind.lstrip()
    mark = MARK.match(start)
    if mark:
        return mark[0]
    line = start.partition("\n")[0].strip()
    known = line and TEXT not in line and FIRST not in line and len(line) <= _LONGEST
    return line if known else ""


def _begun_by(prompt: str, text: str) -> str:
    """The beginning of ``text`` that ``prompt`` ends with."""
    sizes = range(min(len(prompt), len(text)), 0, -1)
    return next((text[:size] for size in sizes if prompt.endswith(text[:size])), "")
