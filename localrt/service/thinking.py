"""Thinking in one request: the template's variables, the end of the prompt, the end of thinking.

It combines the template's thinking syntax (``localrt.chat_format.template_syntax``) with the
options, in tokens. It knows no sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localrt.chat_format.chat_template import MessageTemplate
from localrt.chat_format.histories import with_thoughts_joined
from localrt.chat_format.messages import Offer
from localrt.chat_format.parser import USUAL_FRAME, HarmonyParser, TextParser, is_harmony
from localrt.chat_format.template_syntax import TemplateSyntax, find_syntax
from localrt.chat_format.thinking import split_thinking, thoughts_apart
from localrt.engine.options import Options
from localrt.engine.request import MakeParser
from localrt.engine.stopping import ThinkingLimit
from localrt.models.tokenizers.base import Tokenizer

_TAIL = 32  # tokens at the end of a prompt that may open the thinking


class ThinkingControl:
    """Controls thinking for the model with ``template``. ``tools``: the request has tools."""

    def __init__(
        self, template: MessageTemplate, answers: TemplateSyntax, tokenizer: Tokenizer
    ) -> None:
        self._source = template.tool_source
        self._tokenizer = tokenizer
        self._answers = answers
        self._syntax = find_syntax(template, answers.frame)
        self._frame = self._syntax.framed(answers.frame)

    def shaped(self, messages: Sequence[object]) -> Sequence[Any]:
        """Return ``messages`` with thoughts in the fields that the template reads."""
        if not self._syntax.reads_thoughts:
            messages = thoughts_apart(messages)
        return with_thoughts_joined(messages) if is_harmony(self._source) else messages

    def variables(self, options: Options) -> dict[str, Any]:
        """Return the template's variables for thinking.

        Raises:
            OptionError: the options ask for thinking, and the model cannot think.
        """
        return self._syntax.variables(options.thinks, options.thinking_tokens)

    def begun(self, ids: Sequence[int], options: Options, *, tools: bool) -> list[int]:
        """Return tokens to append to the prompt ``ids`` if the template has no variable for
        thinking: its opening or closing tag.
        """
        tags = self._syntax.tags
        tools = tools and options.may_call
        answer = self._frame.answer if options.is_bound and not tools else ""
        if tags is None:
            return self._ids(answer)
        opened = self._opened(ids)
        # Tags that a template removes do not show that the model writes them by itself.
        always = not self._syntax.off and (tags.close or not options.is_bound)
        text = ""
        if options.thinks is False and opened:
            text = tags.closes(tools=tools)[0]
        elif options.thinks is False and always:
            text = tags.empty(tools=tools)
        elif options.thinks and options.is_bound and not opened:
            text = tags.opening + tags.lead
        if tools:  # a call has no answer mark, with which the text may end
            text = text.removesuffix(self._frame.answer)
        return self._ids(text if options.thinks else text + answer)

    def rewritten(self, text: str, ids: Sequence[int], *, tools: bool) -> list[int]:
        """Return the tokens of an answer's shown ``text``, as the model writes it after ``ids``."""
        tags, found = self._syntax.tags, split_thinking(text)

        def plain(part: str) -> list[int]:
            return self._tokenizer.encode(part, add_special=False) if part else []

        if tags is None or not found.thinking:
            return plain(text)
        opening = "" if self._opened(ids) else tags.opening + tags.lead
        closing = "" if found.open else tags.closes(tools=tools and not found.answer)[0]
        written = self._ids(opening) + plain(found.thinking)
        return written + self._ids(closing) + plain(found.answer)

    def limit(self, options: Options, *, tools: bool) -> ThinkingLimit | None:
        """Return the thinking limit and the tokens that end it or begin a constrained answer."""
        tags = self._syntax.tags
        if tags is None or (options.thinking_tokens is None and not options.is_bound):
            return None
        tools = tools and options.may_call
        mark = self._frame.answer if tools else ""
        closes = [text.removesuffix(mark) for text in tags.closes(tools=tools)]
        then = closes[0].partition(tags.closing)[2] if options.is_bound else ""
        written = tuple(tuple(self._ids(text)) for text in closes)
        return ThinkingLimit(options.thinking_tokens, written, tuple(self._ids(then)))

    def parser(self, ids: Sequence[int], offer: Offer, options: Options) -> MakeParser | None:
        """Return the parser of thinking, and of calls of offered tools, in an answer to ``ids``."""
        frame, opened = self._frame, self._opened(ids)
        tools, names = offer.functions, offer.caller_names
        if is_harmony(self._source):
            return lambda: HarmonyParser(thinking=bool(opened), names=names)
        if self._syntax.tags is None and not tools and frame == USUAL_FRAME:
            return None
        bound = options.is_bound and options.may_call
        known = self._answers.forced if bound else self._answers.calls
        calls = known if tools else None
        forced = options.forces_a_call
        return lambda: TextParser(
            calls, tools, names=names, thinking=opened, frame=frame, forced=forced
        )

    def _opened(self, ids: Sequence[int]) -> str:
        """Return the mark with which the prompt of these ``ids`` has opened thinking, or ""."""
        if not self._source:
            return ""
        end = self._tokenizer.decode(ids[-_TAIL:], skip_special=False).rstrip()
        return next((mark for mark, _ in self._frame.thinking if end.endswith(mark)), "")

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a text that a template could have written."""
        return self._tokenizer.encode(text, add_special=False, parse_special=True) if text else []
