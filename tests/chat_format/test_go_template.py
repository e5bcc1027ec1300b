"""Ollama's chat templates: what Go would write of them, from their Jinja2 translation."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.chat_format.templates.chat_template import ChatTemplate
from localrt.chat_format.templates.go_template import to_jinja
from localrt.common.errors import TemplateError
from tests.mutations import is_line

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
AGAIN = {"role": "user", "content": "Again"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
}

CHATML = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n"
    "{{ end }}<|im_start|>assistant\n"
)
LAST = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if or (eq .Role "user") (eq .Role "system") }}<user>
{{ .Content }}<end>
{{ if $last }}<model>
{{ end }}
{{- else if eq .Role "assistant" }}<model>
{{ .Content }}{{ if not $last }}<end>
{{ end }}
{{- end }}
{{- end }}"""
KEPT = """{{- $system := "" }}
{{- range .Messages }}
{{- if eq .Role "system" }}
{{- if not $system }}{{ $system = .Content }}
{{- else }}{{ $system = printf "%s\\n\\n%s" $system .Content }}
{{- end }}
{{- continue }}
{{- else if eq .Role "user" }}<user>
{{- if $system }}[{{ $system }}]
{{- $system = "" }}
{{- end }}
{{- else }}<model>
{{- end }}{{ .Content }}
{{- end }}<model>"""
OLD = (
    "{{ if .System }}<s>{{ .System }}</s>{{ end }}{{ if .Prompt }}<u>{{ .Prompt }}</u>{{ end }}"
    "<a>{{ .Response }}</a>"
)
TOOLS = (
    "{{ if .Tools }}{{ range .Tools }}{{ . }}{{ end }}{{ end }}"
    '{{ range .Messages }}{{ if .ToolCalls }}{{ range .ToolCalls }}{"name": "{{ .Function.Name }}"'
    ', "args": {{ json .Function.Arguments }}}{{ end }}{{ else }}{{ .Content }}{{ end }}{{ end }}'
)


def render(source: str, *messages: dict[str, Any], **extra: Any) -> str:
    return ChatTemplate(to_jinja(source)).render(messages, **extra)


@pytest.mark.parametrize(
    ("source", "messages", "written"),
    [
        (
            CHATML,
            (SYSTEM, HI),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            LAST,
            (HI, HELLO, AGAIN),
            "<user>\nHi<end>\n<model>\nHello<end>\n<user>\nAgain<end>\n<model>\n",
        ),
        (KEPT, (SYSTEM, HI, HELLO), "<user>[Be brief.]Hi<model>Hello<model>"),
        (OLD, (SYSTEM, HI), "<s>Be brief.</s><u>Hi</u><a>"),
        (OLD, (SYSTEM, HI, HELLO, AGAIN), "<s>Be brief.</s><u>Hi</u><a>Hello</a><u>Again</u><a>"),
        ("{{ .System }}|{{ .Prompt }}|", (HI,), "|Hi|"),
        ("{{ .Prompt }}{{/* a note */}}{% if x %}{{ `}}` }}", (HI,), "Hi{% if x %}}}"),
    ],
)
def test_messages_are_written_as_go_writes_them(
    source: str, messages: tuple[dict[str, Any], ...], written: str
) -> None:
    assert render(source, *messages) == written


def test_tools_and_calls_are_json() -> None:
    assert render(TOOLS, HI, CALL, tools=[TOOL]).replace(" ", "") == (
        '{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}'
        'Hi{"name":"add","args":{"a":1}}'
    )


@pytest.mark.parametrize(("given", "written"), [({}, "-"), ({"enable_thinking": True}, "think")])
def test_thinking_is_known_by_our_name(given: dict[str, bool], written: str) -> None:
    source = (
        "{{ range .Messages }}{{ if and $.IsThinkSet $.Think }}think{{ else }}-{{ end }}{{ end }}"
    )
    assert render(source, HI, **given) == written


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('{{ template "x" . }}', "template is not known"),
        ("{{ toTypeScriptType .Messages }}", "function toTypeScriptType"),
        ("{{ .Nothing }}", ".Nothing is not known"),
        ("{{ if .System }}", "has no end"),
        ("{{ end }}", "without a block"),
        ('{{ "open }}', "does not end"),
        ("{{ if (eq .Role 1 }}{{ end }}", "bracket"),
        ("{{ ? }}", "not understood"),
        ('{{ printf "%5.2f" .System }}', "printf"),
        ("{{ if .System }}" * 80, "too deeply"),
        pytest.param(f"{{{{ {'9' * 5000} }}}}", "too much", id="digits"),
        pytest.param(f"{{{{ .{'N' * 1000} }}}}", "NNN is not known", id="long name"),
        pytest.param(f"{{{{ {'f' * 1000} }}}}", "fff is not known", id="long function"),
    ],
)
def test_what_is_not_known_is_said(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as caught:
        to_jinja(source)
    assert is_line(str(caught.value))
