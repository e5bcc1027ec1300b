"""All that a chat template shows of an assistant's answers: how calls stand in them, and thinking.

Found once for a template, in some milliseconds: its own probes first, then the published syntaxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.errors import TemplateError
from localrt.models.templates.chat_template import MessageTemplate
from localrt.models.tokenizers.base import Tokenizer
from localrt.text.call_probe import probe_calls
from localrt.text.frame_probe import probe_frame
from localrt.text.harmony import HARMONY_ANSWER, HARMONY_CALL, is_harmony
from localrt.text.known_syntaxes import known_syntax, known_with
from localrt.text.parser import PLAIN_CALLS, USUAL_FRAME, AnswerFrame, CallSyntax
from localrt.text.probing import UnreadableError, Written

__all__ = ["TemplateSyntax"]


@dataclass(frozen=True, slots=True)
class TemplateSyntax:
    """``calls`` in answers, and the ``frame`` of what else is in them."""

    calls: CallSyntax
    frame: AnswerFrame = USUAL_FRAME

    @classmethod
    def of(cls, template: MessageTemplate, tokenizer: Tokenizer | None = None) -> TemplateSyntax:
        """That of ``template``, whose model has this tokenizer.

        gpt-oss' channels are ``localrt.text.harmony``'s.
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
