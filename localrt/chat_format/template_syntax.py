"""Finds how a chat template writes calls and thinking in an assistant's answers.

This runs once per template, in some milliseconds. The variables that control thinking
(``enable_thinking``, ``thinking``, ``reasoning_effort``, ``thinking_budget``) are those that change
the prompt. The template's source is searched for known marks of thinking only if probing finds
none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localrt.chat_format.call_syntaxes import (
    FIRST,
    TEXT,
    Probes,
    UnreadableError,
    named_syntax,
    written_syntax,
)
from localrt.chat_format.chat_template import MessageTemplate
from localrt.chat_format.parser import (
    HARMONY_ANSWER,
    HARMONY_CALL,
    MARK,
    PLAIN_CALLS,
    USUAL_FRAME,
    AnswerFrame,
    CallSyntax,
    common_start,
    is_harmony,
)
from localrt.chat_format.thinking import CLOSE, OPEN, THOUGHT_FIELDS
from localrt.common.errors import OptionError, TemplateError
from localrt.common.option_names import option
from localrt.models.tokenizers.base import Tokenizer, end_ids

_ASK = [{"role": "user", "content": "zq ask"}]
_END = re.compile(r"(?i)end.?of|(?<![a-z])eo[ts]")  # of a turn, a text, a sequence
_THOUGHT, _SAID = "Zthought zq¶", "Zsaid zq"
_ANSWER = {"role": "assistant", "content": _SAID}
_THOUGHTS = dict.fromkeys(THOUGHT_FIELDS, _THOUGHT)
_SWITCHES = ("enable_thinking", "thinking", "reasoning")
_EFFORTS = ("low", "medium", "high")
_NO_EFFORTS = ("none", "no_think")


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """``opening`` begins a model's thinking, ``closing`` ends it.

    ``lead`` is the whitespace after the opening. ``close`` is the whole text between the thinking
    and the answer, empty if unknown. ``next_turn`` is used instead when tools may be called, if the
    template then writes another text.
    """

    opening: str
    closing: str
    lead: str = "\n"
    close: str = ""
    next_turn: str = ""

    def closes(self, *, tools: bool) -> tuple[str, ...]:
        """The texts that end thinking: the first time, and whenever thinking begins again."""
        close = self.close or f"\n{self.closing}\n\n"
        return (self.next_turn, close) if tools and self.next_turn else (close,)

    def empty(self, *, tools: bool) -> str:
        """The text of empty thinking."""
        return self.opening + self.lead + self.closes(tools=tools)[0]


_HARMONY = ThinkingTags(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    lead="",
    close="<|end|><|start|>assistant<|channel|>final<|message|>",
    next_turn="<|end|><|start|>assistant",
)
# The tags of templates that drop the thoughts of earlier answers.
_KNOWN = (
    ThinkingTags("<|channel>thought", "<channel|>", close="<channel|>"),
    ThinkingTags("[THINK]", "[/THINK]", lead="", close="[/THINK]"),
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>", lead="", close="<|END_THINKING|>"),
    ThinkingTags("<|inner_prefix|>", "<|inner_suffix|>", lead="", close="<|inner_suffix|>"),
)


@dataclass(frozen=True, slots=True)
class ThinkingSyntax:
    """How one chat template handles thinking. Without ``tags``, the model probably does not think.

    ``on`` and ``off`` are the template variables that switch thinking, empty if there are none.
    ``efforts`` maps our names of efforts to the template's; ``has_budget`` says that the template
    takes a number of tokens.
    """

    tags: ThinkingTags | None = None
    on: Mapping[str, object] = field(default_factory=dict)
    off: Mapping[str, object] = field(default_factory=dict)
    efforts: Mapping[str, str] = field(default_factory=dict)
    has_budget: bool = False

    def framed(self, frame: AnswerFrame) -> AnswerFrame:
        """Return ``frame`` with these tags added, if it lacks them."""
        tags = self.tags
        if tags is None or any(tags.opening == opening for opening, _ in frame.thinking):
            return frame
        return replace(frame, thinking=((tags.opening, tags.closing), *frame.thinking))

    @property
    def reads_thoughts(self) -> bool:
        """Whether the template understands ``<think>`` in an assistant's messages."""
        return self.tags is None or self.tags.closing == CLOSE

    def variables(self, thinking: bool | str | None, tokens: int | None) -> dict[str, Any]:
        """The template variables for ``thinking`` (on, off, an effort) of at most ``tokens``.

        Raises:
            OptionError: thinking is on, but the model cannot think.
        """
        if thinking is False:
            return dict(self.off)
        if thinking is True and self.tags is None and not self.on:
            raise OptionError(
                "this model does not think: its chat template knows no thinking (leave "
                f"{option('thinking')} out, or choose a model that thinks)"
            )
        told: dict[str, object] = {} if thinking is None else dict(self.on)
        if isinstance(thinking, str) and thinking in self.efforts:
            told["reasoning_effort"] = self.efforts[thinking]
        if self.has_budget and tokens is not None:
            told["thinking_budget"] = tokens
        return told


def find_syntax(template: MessageTemplate, frame: AnswerFrame = USUAL_FRAME) -> ThinkingSyntax:
    """Find how ``template`` handles thinking; ``frame`` is that of its answers."""
    source = template.tool_source
    if not source:
        return ThinkingSyntax()
    usual = _prompt(template)
    on: dict[str, object] = {}
    off: dict[str, object] = {}
    for name in _SWITCHES:
        if name in source:
            written = _prompt(template, **{name: True}), _prompt(template, **{name: False})
            if None not in written and written[0] != written[1]:
                on[name], off[name] = True, False
    tags = _HARMONY if is_harmony(source) else _written_tags(template, on, frame)
    tags = tags or _known_tags(source, frame)
    efforts: dict[str, str] = {}
    if "reasoning_effort" in source:
        efforts = _efforts(template, on)
        nothing = _no_effort(template, tags)
        if nothing is not None and not off:
            off["reasoning_effort"] = nothing
            if usual == _prompt(template, reasoning_effort=nothing):
                on["reasoning_effort"] = efforts.get("high", "high")
    budget = "thinking_budget" in source and _prompt(template, thinking_budget=0) != usual
    if budget and not off:
        off["thinking_budget"] = 0
    return ThinkingSyntax(tags, on, off, efforts, budget)


def turn_ends(template: MessageTemplate, tokenizer: Tokenizer) -> set[int]:
    """The special tokens named as ends that ``template`` writes after an assistant's answer."""
    try:
        text = template.render([*_ASK, _ANSWER], add_generation_prompt=False)
    except TemplateError:
        return set()
    special, (_, found, behind) = tokenizer.special_ids, text.rpartition(_SAID)
    known = end_ids(tokenizer.token_id, special.__contains__)
    names = {token: tokenizer.token_text(token) for token in special if found}
    return {
        token
        for token, name in names.items()
        if name and behind.lstrip().startswith(name) and (token in known or _END.search(name))
    }


def _prompt(template: MessageTemplate, **variables: Any) -> str | None:
    """Render a short prompt; None if the template refuses the variables."""
    try:
        return template.render(_ASK, **variables)
    except TemplateError:
        return None


def _written_tags(
    template: MessageTemplate, on: Mapping[str, Any], frame: AnswerFrame
) -> ThinkingTags | None:
    """The marks around a thought; None if the template does not write thoughts in known marks."""
    try:
        text = template.render([*_ASK, _ANSWER | _THOUGHTS], add_generation_prompt=False, **on)
    except TemplateError:
        return None
    before, thought, rest = text.partition(_THOUGHT)
    close, said, _ = rest.partition(_SAID)
    opened = before.rstrip()
    for opening, closing in frame.thinking if thought and said else ():
        if opened.endswith(opening) and close.lstrip().startswith(closing):
            return ThinkingTags(opening, closing, lead=before[len(opened) :], close=close)
    return None


def _known_tags(source: str, frame: AnswerFrame) -> ThinkingTags | None:
    """The marks of a template that drops thoughts or writes them in its own way."""
    of_frame = (ThinkingTags(*marks) for marks in frame.thinking if marks != (OPEN, CLOSE))
    named = (tags for tags in _KNOWN if tags.opening in source or tags.closing in source)
    usual = ThinkingTags(OPEN, CLOSE) if OPEN in source or CLOSE in source else None
    return next(named, None) or next(of_frame, usual)


def _efforts(template: MessageTemplate, on: Mapping[str, object]) -> dict[str, str]:
    """Map each effort to itself, a refused one to the next higher; empty if all are alike."""
    found = {
        effort: text
        for effort in _EFFORTS
        if (text := _prompt(template, **{**on, "reasoning_effort": effort})) is not None
    }
    if len(set(found.values())) < 2:
        return {}
    names = [effort for effort in _EFFORTS if effort in found]
    return {
        effort: next((n for n in names if _EFFORTS.index(n) >= at), names[-1])
        for at, effort in enumerate(_EFFORTS)
    }


def _no_effort(template: MessageTemplate, tags: ThinkingTags | None) -> str | None:
    """The effort for which the template closes the thinking at once, if there is one."""
    if tags is None or tags is _HARMONY:
        return None
    for effort in _NO_EFFORTS:
        written = _prompt(template, reasoning_effort=effort)
        before, closed, rest = (written or "").rpartition(tags.closing)
        if closed and not rest.strip() and before.rstrip().endswith(tags.opening):
            return effort
    return None


_LONGEST = 64  # most characters of a mark


def probe_frame(probes: Probes) -> AnswerFrame:
    """Find the answer frame of the template that ``probes`` renders."""
    thinking = _thinking(probes)
    pairs = (thinking, *USUAL_FRAME.thinking) if thinking else USUAL_FRAME.thinking
    answer, end = "", ""
    header, found, tail = probes.plain.partition(TEXT)
    if found and header.startswith(probes.prompt):
        answer = header[len(probes.prompt) :]
        for _, closing in pairs:
            answer = answer.rpartition(closing)[2]
        answer = answer.lstrip()
        mark = MARK.match(tail.lstrip())
        end = mark[0] if answer and mark else ""
    return AnswerFrame(pairs, answer, end)


def _thinking(probes: Probes) -> tuple[str, str] | None:
    """The marks around a thought; None if they are the usual ones or unknown."""
    fields = dict.fromkeys((*THOUGHT_FIELDS, "thought"), _THOUGHT)
    for say in (probes.message, probes.call):
        try:
            silent, text = say(text=TEXT), say(text=TEXT, **fields)
        except TemplateError:
            continue
        before, found, behind = text.partition(_THOUGHT)
        if not found or TEXT in before or FIRST in before:
            continue
        opening = _opening(before, silent)
        closing = _closing(behind)
        if closing:  # the answer may be a separate turn
            closing += _begun_by(probes.prompt, behind.partition(closing)[2]).rstrip()
        if opening and opening in probes.prompt:  # it begins turns: the mark may come after it
            rest = probes.prompt.rpartition(opening)[2].strip()
            opening = rest if rest and closing not in rest else opening
        if opening and closing and (opening, closing) != (OPEN, CLOSE):
            return opening, closing
        return None
    return None


def _opening(before: str, silent: str) -> str:
    """The opening mark at the end of ``before``; ``silent`` is the text without a thought."""
    shared = common_start(before, silent)
    cut = shared.rfind("<") if "<" in shared and ">" not in shared[shared.rfind("<") :] else None
    opening = before[len(shared[:cut]) :].strip()
    if opening and not MARK.match(opening):  # it begins within a word, such as a recipient
        opening = re.split(r"\s", shared[:cut])[-1] + opening
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
    """The syntax of ``calls`` in answers, and the ``frame`` of their other parts.

    ``unknown``: the template writes calls in a way that is not in the table, so they stay text.
    """

    calls: CallSyntax
    frame: AnswerFrame = USUAL_FRAME
    unknown: bool = False

    @classmethod
    def of(cls, template: MessageTemplate, tokenizer: Tokenizer | None = None) -> TemplateSyntax:
        """Find the syntax of ``template``; ``tokenizer`` is its model's.

        ``HarmonyParser`` parses the channels of gpt-oss.
        """
        source = template.tool_source
        if is_harmony(source):
            return cls(CallSyntax("", "", (), spelling=HARMONY_CALL))

        def has_token(mark: str) -> bool:
            return tokenizer is not None and tokenizer.token_id(mark) is not None

        def render(
            messages: Sequence[Mapping[str, object]],
            tools: Sequence[Mapping[str, object]],
            prompt: bool,
        ) -> str:
            return template.render(messages, tools=tools, add_generation_prompt=prompt)

        named = named_syntax(source, has_token)
        if not source:
            return cls(named)
        try:
            probes = Probes.of(render)
        except (TemplateError, UnreadableError):
            return cls(named)
        written, as_text = probes.written_call()
        found = written_syntax(written) if written else named
        calls = replace(found or named, as_text=as_text)
        try:
            frame = probe_frame(probes)
        except (TemplateError, UnreadableError):
            frame = USUAL_FRAME
        return cls(calls, frame, unknown=found is None)

    @property
    def forced(self) -> CallSyntax:
        """The syntax of a call that must be made."""
        return PLAIN_CALLS if self.calls.spelling is None else self.calls

    @property
    def answer(self) -> str:
        """The mark that begins an answer, to tell it from a call."""
        return HARMONY_ANSWER if self.calls.spelling is HARMONY_CALL else self.frame.answer
