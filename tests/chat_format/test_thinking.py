"""Where thinking ends, for whole answers and for those that grow; what templates show of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt import Thinking, split_thinking
from localrt.chat_format.chat_template import ChatTemplate, MessageTemplate, PlainTemplate
from localrt.chat_format.template_syntax import TemplateSyntax, ThinkingSyntax, find_syntax
from localrt.chat_format.thinking import ThoughtStream
from localrt.common.errors import OptionError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello", Thinking("", "Hello")),
        # One span at the beginning.
        ("<think>so</think>\n\nYes", Thinking("so", "Yes")),
        ("\n<think>\nso\n</think>Yes", Thinking("so", "Yes")),
        # Two spans: both are thinking; one further down is part of the answer.
        ("<think>so</think>\n<think>or so</think>Yes", Thinking("so\n\nor so", "Yes")),
        ("<think>so</think>Yes <think>no</think>", Thinking("so", "Yes <think>no</think>")),
        # Other spellings; each ends with its own tag.
        ("<thinking>so</think></thinking>Yes", Thinking("so</think>", "Yes")),
        ("<reasoning>so</reasoning> <think>or</think>Yes", Thinking("so\n\nor", "Yes")),
        # Not closed yet.
        ("<reasoning>so far</reas", Thinking("so far", "", open=True)),
        ("<think>so</think><think>or", Thinking("so\n\nor", "", open=True)),
        ("<thi", Thinking("", "", open=True)),
        ("<thing> is", Thinking("", "<thing> is")),
        # The opening tag was in the prompt.
        ("so</think>Yes", Thinking("so", "Yes")),
        # Somebody asks about the tags.
        ("The tag <think> opens, </think> closes", None),
        ("```\n</think>\n```", None),
    ],
)
def test_where_thinking_ends(text: str, parts: Thinking | None) -> None:
    assert split_thinking(text) == (parts or Thinking("", text))


_PIECES = ["<think>", "</think>", "<thinking>", "</thinking>", "<thi", "a ", "b", " ", "\n", "<"]


@given(st.sampled_from(["<think>", "<thinking>"]), st.lists(st.sampled_from(_PIECES), max_size=8))
def test_thinking_of_a_text_that_grows(opening: str, pieces: list[str]) -> None:
    text = opening + "".join(pieces)
    whole, stream, shown = split_thinking(text), ThoughtStream(), ["", ""]
    for end, character in enumerate(text, 1):
        parts = split_thinking(text[:end])
        assert not (parts.open and parts.answer)
        assert whole.thinking.startswith(parts.thinking)
        assert not parts.answer or whole.answer.startswith(parts.answer)
        shown = [one + more for one, more in zip(shown, stream.push(character), strict=True)]
    thinking, answer = (a + b for a, b in zip(shown, stream.push("", last=True), strict=True))
    assert thinking == whole.thinking
    assert answer == whole.answer or (not whole.answer and "<thinking>".startswith(answer))


def test_thoughts_and_text_as_they_come() -> None:
    stream = ThoughtStream()
    pieces = ["<thi", "nk>\nHm, ", "two", "\n</th", "ink>\n\n", "Four", ". <think>"]
    found = [*map(stream.push, pieces), stream.push("", last=True)]
    assert [piece.thinking for piece in found if piece.thinking] == ["Hm,", " two"]
    assert [piece.text for piece in found if piece.text] == ["Four", ". <think>"]


# -- what templates show ---------------------------------------------------------------------------

ASK = [{"role": "user", "content": "hi"}]
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def turns(opening: str = "", closing: str = "") -> str:
    """Every turn, with its thoughts between these marks."""
    thought = f"{opening}{{{{ m.reasoning_content }}}}{closing}" if opening else ""
    return (
        "{% for m in messages %}<|{{ m.role }}|>"
        f"{{% if m.reasoning_content %}}{thought}{{% endif %}}{{{{ m.content }}}}{{% endfor %}}"
    )


def syntax_of(template: MessageTemplate) -> ThinkingSyntax:
    return find_syntax(template, TemplateSyntax.of(template).frame)


def begins(on: str, off: str, condition: str) -> str:
    """The beginning of an answer, by a condition."""
    return (
        f"{{% if add_generation_prompt %}}<|assistant|>{{% if {condition} %}}{on}"
        f"{{% else %}}{off}{{% endif %}}{{% endif %}}"
    )


# One way a template: its source, and the ends of the prompt as it is, told to think, told not to.
WAYS = {
    # Off closes the thinking at once; on leaves it to the model.
    "qwen3": (
        turns("<think>\n", "\n</think>\n\n")
        + begins(
            "<think>\n\n</think>\n\n", "", "enable_thinking is defined and not enable_thinking"
        ),
        ("", "", "<think>\n\n</think>\n\n"),
    ),
    # On opens it.
    "qwen3.5, nemotron": (
        turns("<think>\n", "\n</think>\n\n")
        + begins("<think></think>", "<think>\n", "enable_thinking is false"),
        ("<think>\n", "<think>\n", "<think></think>"),
    ),
    # Off unless it is told to think.
    "deepseek": (
        TURNS + "{# </think> #}" + begins("<think>", "</think>", "thinking | default(false)"),
        ("</think>", "<think>", "</think>"),
    ),
    "granite": (
        "{% if thinking %}Think within <think></think>.{% endif %}"
        + TURNS
        + begins("", "", "false"),
        ("", "", ""),
    ),
    "gemma": (
        "{% if enable_thinking %}<|think|>{% endif %}"
        + TURNS
        + begins("", "<|channel>thought\n<channel|>", "enable_thinking | default(false)"),
        ("<|channel>thought\n<channel|>", "", "<|channel>thought\n<channel|>"),
    ),
    # By an effort alone.
    "hunyuan": (
        "{% set e = reasoning_effort | default('no_think') %}"
        "{% if e not in ['no_think', 'low', 'high'] %}{{ raise_exception('no such effort') }}"
        "{% endif %}{{ e }}"
        + turns("<think:open>", "</think:open>")
        + begins("<think:open></think:open>", "<think:open>", "e == 'no_think'"),
        ("<think:open></think:open>", "<think:open>", "<think:open></think:open>"),
    ),
    "cohere": (
        turns("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>")
        + begins(
            "<|START_THINKING|><|END_THINKING|>",
            "<|START_THINKING|>",
            "reasoning_effort is defined and reasoning_effort == 'none'",
        ),
        ("<|START_THINKING|>", "<|START_THINKING|>", "<|START_THINKING|><|END_THINKING|>"),
    ),
    # By a number of tokens.
    "seed": (
        turns("<seed:think>", "</seed:think>\n")
        + begins("<seed:think></seed:think>", "", "thinking_budget | default(-1) == 0"),
        ("", "", "<seed:think></seed:think>"),
    ),
    # Every part of an answer names its recipient.
    "muse": (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %} to=self<|message|>{{ m.reasoning_content }}<|eom|>"
        "<|start|>assistant{% endif %} to=user{% endif %}<|message|>{{ m.content }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("", "", ""),
    ),
    # It cannot be told.
    "always": (
        turns("<think>\n", "\n</think>\n") + begins("<think>\n", "", "true"),
        ("<think>\n", "<think>\n", "<think>\n"),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_template_is_told_by_the_variables_that_it_reads(way: str) -> None:
    source, ends = WAYS[way]
    template = ChatTemplate(source)
    syntax = syntax_of(template)
    for thinking, end in zip((None, True, False), ends, strict=True):
        prompt = template.render(ASK, **syntax.variables(thinking, None))
        assert prompt.replace("<|start|>assistant", "<|assistant|>").endswith(f"<|assistant|>{end}")
    assert bool(syntax.off) == (way not in ("always", "muse"))


@pytest.mark.parametrize(
    ("way", "empty"),
    [
        ("qwen3", "<think>\n\n</think>\n\n"),
        ("deepseek", "<think>\n\n</think>\n\n"),
        ("gemma", "<|channel>thought\n<channel|>"),
        ("cohere", "<|START_THINKING|><|END_THINKING|><|START_TEXT|>"),
        ("seed", "<seed:think></seed:think>\n"),
        ("muse", "to=self<|message|><|eom|><|start|>assistant to=user<|message|>"),
    ],
)
def test_marks_are_those_that_the_template_writes_around_a_thought(way: str, empty: str) -> None:
    tags = syntax_of(ChatTemplate(WAYS[way][0])).tags
    assert tags is not None
    assert tags.empty(tools=False) == empty


def test_channels_end_with_a_message_to_the_user_or_with_the_next_turn() -> None:
    source = (
        "Reasoning: {{ reasoning_effort | default('medium') }}"
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{# <|channel|> #}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    syntax = syntax_of(ChatTemplate(source))
    assert (syntax.on, syntax.off) == ({}, {})
    assert syntax.variables("high", None) == {"reasoning_effort": "high"}
    assert syntax.tags is not None
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert syntax.tags.closes(tools=False) == (final,)
    assert syntax.tags.closes(tools=True) == ("<|end|><|start|>assistant", final)


def test_efforts_and_limits_are_told_where_they_make_a_difference() -> None:
    syntax = syntax_of(ChatTemplate(WAYS["hunyuan"][0]))
    assert syntax.variables("low", None) == {"reasoning_effort": "low"}
    assert syntax.variables("medium", None) == {"reasoning_effort": "high"}
    # Elsewhere an effort is no more than "on", where there is such a thing.
    assert syntax_of(ChatTemplate(WAYS["deepseek"][0])).variables("low", None) == {"thinking": True}
    assert syntax_of(ChatTemplate(TURNS)).variables("low", None) == {}
    assert syntax_of(ChatTemplate(WAYS["seed"][0])).variables(None, 512) == {"thinking_budget": 512}
    assert syntax_of(ChatTemplate(WAYS["qwen3"][0])).variables(None, 512) == {}


@pytest.mark.parametrize("template", [ChatTemplate(TURNS), PlainTemplate()])
def test_a_model_that_never_thinks_says_so(template: MessageTemplate) -> None:
    syntax = syntax_of(template)
    assert syntax == ThinkingSyntax()
    assert syntax.variables(False, None) == {}
    with pytest.raises(OptionError, match="this model does not think"):
        syntax.variables(True, None)
