"""What a model is told of a conversation in which calls and answers were stopped."""

from __future__ import annotations

from typing import Any

from localrt.chat_format.templates.chat_template import ChatTemplate
from localrt.tui.conversation.open_conversation import with_answers, with_results

ASKED = {"role": "user", "content": "Go"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]}
GAVE = {"role": "tool", "tool_call_id": "1", "content": "milk"}
NOTHING = {"role": "assistant", "content": "(No answer.)"}
# As Mistral's: turns that are not calls alternate, and an answer has words.
STRICT = """
{%- set ns = namespace(index=0) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) or not m.content -%}
            {{- raise_exception('roles must alternate') -}}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
    {{- m.role[0] -}}
{%- endfor -%}
"""


def test_a_question_behind_results_comes_behind_an_answer() -> None:
    messages: list[Any] = [ASKED, CALLED, GAVE, ASKED, CALLED, GAVE]
    found = with_answers(messages)
    assert found == [ASKED, CALLED, GAVE, NOTHING, ASKED, CALLED, GAVE]
    assert with_answers(found) == found


def test_an_answer_without_a_word_says_so() -> None:
    empty = {"role": "assistant", "content": ""}
    assert with_answers([ASKED, empty, ASKED]) == [ASKED, NOTHING, ASKED]


def test_a_template_that_wants_strict_turns_takes_them() -> None:
    messages: list[Any] = [ASKED, CALLED, GAVE, ASKED, {"role": "assistant", "content": ""}, ASKED]
    template = ChatTemplate(STRICT)
    assert template.render(with_answers(messages)) == "uatauau"
    assert template.render(with_answers(with_results([ASKED, CALLED, ASKED]))) == "uatau"
