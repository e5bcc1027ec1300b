"""Chat templates that take hours or all memory are stopped; real ones notice no limit."""

import json
import subprocess
import sys
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localrt.chat_format import sandbox
from localrt.chat_format.chat_template import ChatTemplate
from localrt.chat_format.sandbox import SandboxedTemplate
from localrt.common.errors import TemplateError
from localrt.offload.memory import helpers_nbytes

HELLO = [{"role": "user", "content": "hello"}]
NS = "{% set ns = namespace(s='ab', l=[1]) %}"
LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
BIG = "{% set ns = namespace(s='a' * 3000000) %}"
TWICE = "{% for i in range(60) %}"
TREE = NS + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
TUPLES = (
    "{% set ns = namespace(l=1) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}"
)

HOSTILE = {
    "colliding keys": (
        "{% set keys = namespace(d=[]) %}{% for i in range(2000) %}"
        "{% set keys.d = keys.d + [(i * 2305843009213693951, i)] %}{% endfor %}"
        "{% for i in range(2000) %}{% set x = range(100000) - dict(keys.d).keys() %}"
        "{% set y = dict(keys.d) %}{% endfor %}{{ 1 / 0 }}"
    ),
    "links in many brackets": "{{ ('(' * 99999 ~ 'http://a' ~ ')' * 99999) | urlize }}{{ 1 / 0 }}",
    "nested loops": LOOP * 3 + END * 3,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}"
        "{{ f(0) }}"
    ),
    "looking from the right": "{{ ('a' * 2000000).rfind('a' * 500000 ~ 'b' ~ 'a' * 500000) }}",
    "attributes of attributes": "{{ range(100000) | map(attribute='a.' * 100000) | list }}",
    "repeated squaring": (
        "{% set ns = namespace(x=3) %}" + TWICE + "{% set ns.x = ns.x * ns.x %}" + END
    ),
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a number of many digits": "{{ ('f' * 1000000) | int(base=16) }}",
    "repetition of a list": "{{ [1] * 1000000000 }}",
    "printf's width": "{{ '%10000000000d' % 1 }}",
    "a format's width": "{{ '{:1000000000}'.format(1) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "wordwrap": BIG + "{{ ('a ' * 1000) | wordwrap(1, wrapstring=ns.s) }}",
    "tojson's separators": "{{ ([1] * 1000) | tojson(separators=('x' * 1000000, ':')) }}",
    "strftime": "{{ strftime_now('%c' * 1000000) }}",
    "doubling by ~": NS + TWICE + "{% set ns.s = ns.s ~ ns.s %}" + END,
    "doubling a list": NS + TWICE + "{% set ns.l = ns.l + ns.l %}" + END,
    "output in a loop": BIG + LOOP + "{{ ns.s }}" + END,
    "slices that are kept": BIG + LOOP + "{% set ns.l = [ns.l, ns.s[1:]] %}" + END,
    "comparing a tree": TREE + "{% set t = ns.l %}" + TREE + "{{ ns.l == t }}",
    "showing a tree": TREE + "{{ ns.l }}",
    "a tree as JSON": TREE + "{{ ns.l | tojson }}",
    "a tree as a reason": TREE + "{{ raise_exception(ns.l) }}",
    "hashing a tree": TUPLES + "{{ {ns.l: 1} }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_too_much_is_stopped(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template") as caught:
        SandboxedTemplate(source, "chat template").render({"messages": HELLO})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_a_template_renders_after_another_was_stopped() -> None:
    template = SandboxedTemplate("{{ messages[0].content }}", "chat template")
    with pytest.raises(TemplateError, match="takes too long or too much memory"):
        SandboxedTemplate(LOOP * 3 + END * 3, "chat template").render({})
    assert template.render({"messages": HELLO}) == "hello"


def test_templates_render_in_a_packaged_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    renderer = sandbox._Renderer()
    assert renderer.ask("{{ a }}", {"a": "b"}) == {"text": "b"}
    assert "refused" in renderer.ask("{{ 1 / 0 }}", {})
    assert "invalid" in renderer.ask("{% if %}", None)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_process_that_renders_counts_as_memory() -> None:
    SandboxedTemplate("{{ 1 }}", "x").render({})
    assert 1 << 20 < helpers_nbytes() < 64 << 20


MEMORY = """
import json, resource, sys
from pathlib import Path
from localrt.common.errors import TemplateError
from localrt.chat_format.sandbox import SandboxedTemplate

for source in json.load(sys.stdin):
    try:
        SandboxedTemplate(source, "x").render({})
    except TemplateError:
        pass
# getrusage's begins with the parent's
lines = Path("/proc/self/status").read_text("utf-8").splitlines()
(own,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(own, children)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of a process's memory")
def test_a_hostile_template_takes_little_memory() -> None:
    names = [name for name in HOSTILE if name.startswith(("doubling", "output", "showing"))]
    sources = [HOSTILE[name] for name in [*names, "slices that are kept", "center"]]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        check=True,
    )
    own, children = (int(kilobytes) << 10 for kilobytes in done.stdout.split())
    assert own < 128 << 20
    assert children < 256 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 150 + "{% endif %}" * 150,
        "{% if a %}" * 2000 + "{% endif %}" * 2000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 500 + "]" * 500 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ a" + " | upper" * 3000 + " }}",
        "{{ a }}" * 30_000,
        "{##}" * 100_000,
        "{% macro f(x, x) %}{% endmacro %}",
        "{{ f(a=1, a=2) }}",
    ],
    ids=range(11),
)
def test_a_template_that_cannot_be_compiled_is_refused_on_one_line(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template") as caught:
        SandboxedTemplate(source, "chat template")
    assert "\n" not in str(caught.value)


def test_the_library_refuses_what_is_nested_too_deeply() -> None:
    tool: Any = []
    for _ in range(10_000):
        tool = [tool]
    template = ChatTemplate("{{ tools | tojson }}")
    for render in (template.render, template.render_segments):
        with pytest.raises(TemplateError, match="nested too deeply"):
            render(HELLO, tools=[{"parameters": tool}])


@pytest.mark.parametrize("tools", [5, "tools"])
def test_tools_that_are_no_list_are_refused(tools: Any) -> None:
    with pytest.raises(TemplateError, match="tools must be a list"):
        ChatTemplate("{{ tools }}").render(HELLO, tools=tools)


# Real templates -------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = """
{%- macro shown(name, parameters) %}{{ name }}({% for key, value in parameters | items %}
{{- key }}: {{ value.type | default('any') }}{% if not loop.last %}, {% endif %}
{%- endfor %}){% endmacro %}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ tool | tojson(indent=4) }}
{{- shown(tool.function.name, tool.function.parameters.properties) | indent(2) }}
{%- endfor %}
{%- set system = messages | selectattr('role', 'equalto', 'system') | list %}
{%- if system %}{{ system | map(attribute='content') | join('\\n') }}{% endif %}
{%- for m in messages if m.role != 'system' %}{{ ('%s: %s' % (m.role, m.content)) | e }}
{{- '{}|{:>4}'.format(m.role, loop.index) }}{{ m }}{{ m.content | title | replace('A', '&') }}
{%- endfor %}
{{- strftime_now('%Y') | length }}"""
REAL = {"chatml": CHATML, "tools": TOOLS}


@cache
def unbounded(source: str) -> Any:
    """The template in Jinja2's own sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, indent=indent, ensure_ascii=False
    )
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


@cache
def bounded(source: str) -> SandboxedTemplate:
    return SandboxedTemplate(source, "chat template")


words = st.sampled_from(["<think>", "</think>", "\n", " ", "a", "\U0001f600", "{{ 1 }}", "%s", "&"])
texts = st.one_of(st.text(max_size=20), st.lists(words, max_size=8).map("".join))
conversations = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}
    ),
    min_size=1,
    max_size=6,
)
OFFERED = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "é"}, "y": {}}}},
    }
]


@pytest.mark.parametrize("name", REAL)
@given(messages=conversations, tools=st.sampled_from([None, OFFERED]))
def test_real_templates_render_as_without_limits(name: str, messages: Any, tools: Any) -> None:
    known = {"messages": messages, "tools": tools, "bos_token": "<s>", "add_generation_prompt": 1}
    assert bounded(REAL[name]).render(known) == unbounded(REAL[name]).render(known)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": ("user", "assistant")[i % 2], "content": f"{i} é <think>a" * 20}
            for i in range(1000)
        ],
        [{"role": "user", "content": "<think>a\n</think> " + "é word" * 170_000}],
    ],
    ids=["many messages", "a long message"],
)
def test_long_conversations_are_rendered(name: str, messages: Any) -> None:
    known = {"messages": messages, "tools": OFFERED}
    assert bounded(REAL[name]).render(known) == unbounded(REAL[name]).render(known)


def test_a_text_that_grows_with_every_message_is_rendered() -> None:
    source = (
        "{% set ns = namespace(all='') %}{% for m in messages %}"
        "{% set ns.all = ns.all + m.content %}{% endfor %}{{ ns.all | length }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 1000
    assert bounded(source).render({"messages": messages}) == "1000000"
