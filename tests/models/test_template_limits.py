"""Chat templates that ask for hours or for all memory end at once; real ones notice no limit."""

import json
import subprocess
import sys
from datetime import datetime
from functools import cache
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localrt.errors import TemplateError
from localrt.models.templates.chat_template import ChatTemplate
from localrt.models.templates.sandbox import SandboxedTemplate

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
    # steps
    "nested loops": LOOP * 3 + END * 3,
    "loops that leave everything out": LOOP + LOOP[:-2] + "if false %}" + END + END,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}"
        "{{ f(0) }}"
    ),
    "a block that shows itself twice": (
        "{% block a %}{% if x.append %}{% endif %}{{ self.a() }}{{ self.a() }}{% endblock %}"
    ),
    "a recursive loop": (
        "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
        "{% endfor %}"
    ),
    "looking through a long text": BIG + LOOP + "{% if 'b' in ns.s %}{% endif %}" + END,
    "looking through a range": LOOP + "{% if 'b' in range(100000) %}{% endif %}" + END,
    "filters that keep nothing": LOOP + "{% set x = range(100000) | select('none') | list %}" + END,
    "looking from the right": "{{ ('a' * 2000000).rfind('a' * 500000 ~ 'b' ~ 'a' * 500000) }}",
    "stripping by many characters": "{{ ('a' * 5000000) | trim('b' * 5000000 ~ 'a') }}",
    "many empty slices": "{{ [1] | slice(1000000000) | list }}",
    "attributes of attributes": "{{ range(100000) | map(attribute='a.' * 100000) | list }}",
    "unpacked arguments": (
        "{% macro f() %}{% endmacro %}{% set x = range(100000) | list %}"
        + LOOP
        + "{% set y = f(*x) %}"
        + END
    ),
    # numbers
    "repeated squaring": (
        "{% set ns = namespace(x=3) %}" + TWICE + "{% set ns.x = ns.x * ns.x %}" + END
    ),
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a number of many digits": "{{ ('f' * 1000000) | int(base=16) }}",
    "rounding to many digits": "{{ 5 | round(-1000000000) }}",
    # one operation that makes a long text
    "repetition": "{{ 'a' * 10000000000 }}",
    "repetition of a list": "{{ [1] * 1000000000 }}",
    "printf's width": "{{ '%10000000000d' % 1 }}",
    "printf's width of a name": "{{ '%((x))1000000000s' % {'(x)': 1} }}",
    "printf's width as a value": "{{ '%*d' % (1000000000, 1) }}",
    "printf's precision": "{{ '%.1000000000f' % 1 }}",
    "printf by a filter": "{{ '%1000000000d' | format(1) }}",
    "printf by a test": "{{ '%1000000000d' is odd }}",
    "a format's width": "{{ '{:1000000000}'.format(1) }}",
    "a format's width as a value": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "rjust": "{{ 'a'.rjust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 9) }}",
    "indent by a text": BIG + "{{ ('a\\n' * 100000) | indent(ns.s) }}",
    "wordwrap": BIG + "{{ ('a ' * 1000) | wordwrap(1, wrapstring=ns.s) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "tojson's indent": "{{ [[1]] | tojson(indent=10 ** 9) }}",
    "tojson's separators": "{{ ([1] * 1000) | tojson(separators=('x' * 1000000, ':')) }}",
    "join": "{{ ('x' * 1000000).join([''] * 1000) }}",
    "join by a filter": "{{ ([1] * 1000) | join('x' * 1000000) }}",
    "replace": "{{ ('a' * 1000000).replace('', 'x' * 1000) }}",
    "replace by a filter": "{{ ('a' * 1000000) | replace('a', 'x' * 1000) }}",
    "a sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "strftime": "{{ strftime_now('%c' * 1000000) }}",
    "a method without use": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    # doubling
    "doubling by ~": NS + TWICE + "{% set ns.s = ns.s ~ ns.s %}" + END,
    "doubling by +": NS + TWICE + "{% set ns.s = ns.s + ns.s %}" + END,
    "doubling a list": NS + TWICE + "{% set ns.l = ns.l + ns.l %}" + END,
    "doubling by a block": (
        NS + TWICE + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}" + END
    ),
    "doubling by format": NS + TWICE + "{% set ns.s = '{0}{0}'.format(ns.s) %}" + END,
    "doubling by printf": NS + TWICE + "{% set ns.s = '%(a)s%(a)s' % {'a': ns.s} %}" + END,
    "output in a loop": BIG + LOOP + "{{ ns.s }}" + END,
    "long text in a loop": LOOP + "x" * 10_000 + END,
    "slices that are kept": BIG + LOOP + "{% set ns.l = [ns.l, ns.s[1:]] %}" + END,
    "lists that are kept": (
        NS + "{% set b = 'abcdefgh' * 1000 %}" + LOOP + "{% set ns.l = (ns.l, b | list) %}" + END
    ),
    # values that are larger than they look
    "comparing a tree": TREE + "{% set t = ns.l %}" + TREE + "{{ ns.l == t }}",
    "showing a tree": TREE + "{{ ns.l }}",
    "a tree as JSON": TREE + "{{ ns.l | tojson }}",
    "a tree by printf": TREE + "{{ '%s' % ns.l }}",
    "a tree as a reason": TREE + "{{ raise_exception(ns.l) }}",
    "hashing a tree": TUPLES + "{{ {ns.l: 1} }}",
    "looking up a tree": TUPLES + "{{ {}.get(ns.l) }}",
    "a tree as a filter's name": TUPLES + "{{ [1] | map(ns.l) | list }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_too_much_is_stopped(source: str) -> None:
    template = SandboxedTemplate(source, "chat template")
    began = thread_time()
    with pytest.raises(TemplateError, match="refused the messages") as caught:
        template.render({"messages": HELLO})
    assert thread_time() - began < 5  # a third of a second where nothing else runs
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


MEMORY = """
import json, resource, sys
from localrt.errors import TemplateError
from localrt.models.templates.sandbox import SandboxedTemplate

SandboxedTemplate("{{ 1 }}", "x").render({})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source in json.load(sys.stdin):
    try:
        SandboxedTemplate(source, "x").render({})
    except TemplateError:
        pass
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * (1 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs the peak of a process's memory")
def test_a_hostile_template_takes_little_memory() -> None:
    names = [name for name in HOSTILE if name.startswith(("doubling", "output", "showing"))]
    names += ["slices that are kept", "lists that are kept", "long text in a loop", "replace"]
    sources = [HOSTILE[name] for name in names]
    sources += [
        "{{ 'a' * 30000000 ~ '\U0001f600' }}",  # four bytes a character from here on
        "{{ ('a ' * 2000000).split() | length }}{{ ('\u4e00' * 3000000) | list | length }}",
        "{{ 'a' | center(1000000000) }}",
        LOOP + LOOP + "{{ i }}{{ i }}" + END + END,
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 64e6


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
    began = thread_time()
    with pytest.raises(TemplateError, match="chat template") as caught:
        SandboxedTemplate(source, "chat template")
    assert thread_time() - began < 10  # a second where nothing else runs
    assert "\n" not in str(caught.value)


def test_nothing_is_computed_while_compiling() -> None:
    source = "{{ 'a' | center(1000000000) }}{% set x = 'a' * 1000000000 %}{{ 'a' ~ ('b' | upper) }}"
    template = SandboxedTemplate(source, "chat template")
    with pytest.raises(TemplateError, match="too large"):
        template.render({})


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
ALTERNATING = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{- raise_exception('unknown role ' ~ message['role']) }}{%- endif %}"
    "{{- '[' + message['role'] + ']' + message['content'] | trim + '[' ~ loop.index0 % 2 ~ ']' }}"
    "{%- endfor %}"
)
THINKING = """
{%- set ns = namespace(last=messages | length - 1, seen='', searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}{{ '<think>' + thought.strip() + '</think>' }}{%- endif %}
    {%- endif %}
    {%- set ns.seen = ns.seen + content[:5] %}
    {{- '<' ~ message.role ~ '>' + content.replace('a', 'bc') | upper + '\\n' }}
{%- endfor %}
{{- ns.seen | length }}"""
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
REAL = {"chatml": CHATML, "alternating": ALTERNATING, "thinking": THINKING, "tools": TOOLS}


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
@settings(max_examples=60)
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
