"""Histories as a chat template writes them, whatever it refuses or leaves out.

A history is first given as it is. If the template refuses it, or something that was said is not in
what it writes, the history is rewritten (``history_fit``) for what the template can show
(``history_probe``), and if that fails, too, for a template that can show next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from localrt.errors import TemplateError
from localrt.models.templates.chat_template import MessageTemplate
from localrt.models.templates.control_text import Segment
from localrt.text.history_fit import fitted
from localrt.text.history_probe import AS_GIVEN, HistoryProbe, left_out
from localrt.text.probing import TOOLS
from localrt.text.tools import for_template

__all__ = ["HistoryRenderer"]


class HistoryRenderer:
    """Of ``template``, which usually wants the arguments of calls ``as_text``, or as values."""

    def __init__(self, template: MessageTemplate, *, as_text: bool) -> None:
        self._template = template
        self._as_text = as_text
        self._probes = {
            given: HistoryProbe(partial(self._probe, given), template.tool_source)
            for given in (False, True)
        }

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        control_tokens: Iterable[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> list[Segment]:
        """See ``MessageTemplate.render_segments``: of a history that the template can show.

        Raises:
            TemplateError: it refuses even the plainest form of it; what it said of ``messages``.
        """
        given = AS_GIVEN.shaped(for_template(messages))
        options = {"control_tokens": control_tokens and list(control_tokens), "tools": tools}
        probe = self._probes[bool(tools)]
        refused: TemplateError | None = None
        found: list[tuple[int, list[Any], list[Segment]]] = []
        for history in self._forms(given, probe):
            if found and found[-1][1] == history:
                segments = found[-1][2]
            else:
                try:
                    segments = self._segments(history, **options, **extra)
                except TemplateError as error:
                    refused = refused or error
                    continue
            written = "".join([text for text, _ in segments])
            missing = left_out(history, written, calls=history is given)
            # A word that is left out everywhere (/no_think) is meant to be.
            if not any(map(probe.shows_alone, missing)):
                return segments
            found.append((len(missing), history, segments))
        if not found:
            assert refused is not None, "there is one form at least"
            raise refused
        return min(found, key=lambda each: each[0])[2]

    @staticmethod
    def _forms(given: list[Any], probe: HistoryProbe) -> Iterator[list[Any]]:
        """``given`` in ever plainer forms."""
        developers = any(message["role"] == "developer" for message in given)
        if not developers or probe.knows_developers():
            yield given
        yield probe.form.shaped(fitted(given, probe.can))
        yield fitted(given, lambda situation: False)

    def _segments(self, history: list[Any], **options: Any) -> list[Segment]:
        """Of one history; its arguments in the way that the template takes."""
        as_text = self._as_text and any(message.get("tool_calls") for message in history)
        shaped = for_template(history, arguments_as_text=as_text)
        try:
            return self._template.render_segments(shaped, **options)
        except TemplateError:
            # Some put arguments together as text, where most want them as values.
            other = for_template(history, arguments_as_text=not as_text)
            if other == shaped:
                raise
            return self._template.render_segments(other, **options)

    def _probe(self, tools: bool, history: Sequence[Mapping[str, Any]]) -> str:
        segments = self._segments(list(history), control_tokens=(), tools=TOOLS if tools else None)
        return "".join([text for text, _ in segments])
