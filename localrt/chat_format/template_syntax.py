"""All that a chat template shows of an assistant's answers: how calls stand in them, and thinking.

Found once for a template, in some milliseconds: its own probes first, then the published syntaxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.chat_format.call_probe import probe_calls
from localrt.chat_format.harmony import HARMONY_ANSWER, HARMONY_CALL, is_harmony
from localrt.chat_format.known_syntaxes import known_syntax, known_with
from localrt.chat_format.parser import (
    MARK,
    PLAIN_CALLS,
    USUAL_FRAME,
    AnswerFrame,
    CallSyntax,
    common_start,
)
from localrt.chat_format.probing import (
    FIRST,
    TEXT,
    UnreadableError,
    Written,
)
from localrt.chat_format.templates.chat_template import MessageTemplate
from localrt.chat_format.thinking import CLOSE, OPEN
from localrt.common.errors import TemplateError
from localrt.models.tokenizers.base import Tokenizer

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


@dataclass(frozen=True, slots=True)
class TemplateSyntax:
    """``calls`` in answers, and the ``frame`` of what else is in them."""

    calls: CallSyntax
    frame: AnswerFrame = USUAL_FRAME

    @classmethod
    def of(cls, template: MessageTemplate, tokenizer: Tokenizer | None = None) -> TemplateSyntax:
        """That of ``template``, whose model has this tokenizer.

        gpt-oss' channels are ``localrt.chat_format.harmony``'s.
        """
        source = template.tool_source
        if is_harmony(source):
            return cls(CallSyntax("", "", (), spelling=HARMONY_CALL))
        known = cls(
            known_syntax(source)
            if tokenizer is None
            else known_syntax(source, lambda mark: tokenizer.token_id(mark) is not None)
        )
        if not source:
            return known

        def render(
            messages: Sequence[Mapping[str, Any]],
            tools: Sequence[Mapping[str, Any]],
            prompt: bool,
        ) -> str:
            return template.render(messages, tools=tools, add_generation_prompt=prompt)

        try:
            written = Written.by(render)
        except (TemplateError, UnreadableError):
            return known
        calls = probe_calls(written)
        found = known.calls if calls is None else known_with(calls, source)
        try:
            return cls(found, probe_frame(written))
        except (TemplateError, UnreadableError):
            return cls(found)

    @property
    def forced(self) -> CallSyntax:
        """The syntax of a call that must be made."""
        return PLAIN_CALLS if self.calls.spelling is None else self.calls

    @property
    def answer(self) -> str:
        """What begins an answer where a call could begin as well."""
        return HARMONY_ANSWER if self.calls.spelling is HARMONY_CALL else self.frame.answer

    def opened(self, prompt: str) -> str:
        """The mark with which the end of a prompt has opened thinking, or nothing."""
        end = prompt.rstrip()
        return next((mark for mark, _ in self.frame.thinking if end.endswith(mark)), "")
