"""How much of a conversation's ids other prompts share: up to its first question, and up to what
opens its answer. Recurrent states are kept there, since they cannot go back to every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from localrt.chat_format.templates.chat_template import MessageTemplate
from localrt.common.errors import TemplateError
from localrt.engine.types import Message
from localrt.models.tokenizers.base import Tokenizer

# So many ids tell where an answer's opening begins, among so many last ones of a prompt.
_OPENING_IDS, _LONGEST_OPENING = 3, 256

_MARKS = "AAaa", "BBbb"  # stand for messages of which a chat template's text is found


class Openings:
    """What ``template`` writes before a user's message and before an answer."""

    def __init__(self, template: MessageTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer

    def shared(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return how many of a conversation's ids come before its first question and before its
        answer's opening, as far as that is known: other prompts begin with as many.
        """
        question, answer = self._of_question, self._of_answer
        last = len(ids) - len(answer)
        asked = _find(question, ids, range(last - len(question)))
        answered = _find(answer, ids, range(last, max(last - _LONGEST_OPENING, 0), -1))
        ends = asked and asked + len(question), answered
        return tuple(end for end in ends if end)

    @cached_property
    def _of_answer(self) -> list[int]:
        """The first ids of what the chat template writes before an answer."""
        turn: list[Message] = [{"role": "user", "content": "."}]
        try:
            asked = self._template.render(turn, add_generation_prompt=False)
            opened = self._template.render(turn)
        except TemplateError:
            return []
        return self._encode(opened.removeprefix(asked))[:_OPENING_IDS]

    @cached_property
    def _of_question(self) -> list[int]:
        """The ids that the chat template writes between a system message and a user's."""
        turns: list[Message] = [
            {"role": "system", "content": _MARKS[0]},
            {"role": "user", "content": _MARKS[1]},
        ]
        try:
            text = self._template.render(turns, add_generation_prompt=False)
        except TemplateError:
            return []
        return self._encode(text.partition(_MARKS[0])[2].partition(_MARKS[1])[0])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=True)


def _find(part: Sequence[int], ids: Sequence[int], places: Iterable[int]) -> int:
    """Return the first of ``places`` where ``part`` is in ``ids``; 0 if it is empty or nowhere."""
    if not part:
        return 0
    begins = (place for place in places if ids[place] == part[0])  # few are, of many
    return next((i for i in begins if ids[i : i + len(part)] == part), 0)
