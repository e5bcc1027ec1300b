"""Chat templates of ours that write calls as published models do, one for each syntax."""

from __future__ import annotations

import json
from typing import Any

import pytest


def calling(
    *calls: tuple[str, Any], text: str | None = "", ids: str = "abcdefgh{1}", **fields: Any
) -> dict[str, Any]:
    """An assistant's message with ``calls``: names, and arguments as values or as text."""
    made = [
        {
            "id": ids.format(name, at),
            "type": "function",
            "function": {"name": name, "arguments": _as_text(given)},
        }
        for at, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, "tool_calls": made, **fields}


def _as_text(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def ids_of(name: str) -> str:
    """What the calls' ids look like in the template of this name."""
    return "functions.{}:{}" if "Kimi" in name else "abcdefgh{1}"


def tool(name: str, **more: Any) -> dict[str, Any]:
    """A tool as callers give it."""
    return {"type": "function", "function": {"name": name, **more}}


_THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


def chat(
    calls: str,
    *,
    think: str = _THINK,
    text: str = "{{ m.content }}",
    begin: str = "<|im_start|>{}\n",
    end: str = "<|im_end|>\n",
    prompt: str = "",
) -> str:
    """A template whose assistant thinks, says ``text`` and makes ``calls``."""
    turn = begin.format("{{ m.role }}")
    return (
        "{% for m in messages %}"
        + turn
        + "{% if m.role == 'assistant' %}"
        + prompt
        + f"{think}{text}{calls}"
        + "{% else %}{{ m.content }}{% endif %}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + begin.format("assistant")
        + prompt
        + "{% endif %}"
    )


def each(call: str, *, before: str = "", between: str = "", after: str = "") -> str:
    """``call`` for every call ``f`` with the id ``c.id``."""
    return (
        "{% if m.tool_calls %}"
        + before
        + "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
        + after
        + "{% endif %}"
    )


_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_PYTHON_TEXT = "{{ v if v is string else (v | tojson if v is mapping else v) }}"
_JSON_TEXT = "{{ v if v is string else v | tojson }}"


def _pairs(pair: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + pair + "{% endfor %}"


def _dsml(section: str) -> str:
    kind = "{{ 'true' if v is string else 'false' }}"
    return each(
        '<｜DSML｜invoke name="{{ f.name }}">\n'
        + _pairs(
            f'<｜DSML｜parameter name="{{{{ k }}}}" string="{kind}">'
            f"{_JSON_TEXT}</｜DSML｜parameter>\n"
        )
        + "</｜DSML｜invoke>\n",
        before=f"\n\n<｜DSML｜{section}>\n",
        after=f"</｜DSML｜{section}>",
    )


_GEMMA_VALUE = (
    '{% macro show(v) %}{% if v is string %}<|"|>{{ v }}<|"|>'
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, x in v | dictsort %}{{ k }}:{{ show(x) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for x in v %}{{ show(x) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)

TEMPLATES: dict[str, str] = {
    "Hermes, Qwen": chat(each(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n")),
    "Qwen Coder, Qwen 3.5, Nemotron 3": chat(
        each(
            "\n<tool_call>\n<function={{ f.name }}>\n"
            + _pairs("<parameter={{ k }}>\n" + _PYTHON_TEXT + "\n</parameter>\n")
            + "</function>\n</tool_call>"
        )
    ),
    "GLM": chat(
        each(
            "\n<tool_call>{{ f.name }}\n"
            + _pairs(f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_JSON_TEXT}</arg_value>\n")
            + "</tool_call>"
        ),
        begin="<|{}|>",
        end="",
    ),
    "Spark": chat(
        each(
            "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
            "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
        )
    ),
    "Seed-OSS": chat(
        each(
            "\n<seed:tool_call>\n<function={{ f.name }}>\n"
            + _pairs("<parameter={{ k }}>{{ v }}</parameter>\n")
            + "</function>\n</seed:tool_call>"
        ),
        think=(
            "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}"
            "</seed:think>{% endif %}"
        ),
    ),
    "MiniMax": chat(
        each(
            '<invoke name="{{ f.name }}">\n'
            + _pairs(f'<parameter name="{{{{ k }}}}">{_JSON_TEXT}</parameter>\n')
            + "</invoke>\n",
            before="\n<minimax:tool_call>\n",
            after="</minimax:tool_call>",
        ),
        begin="]~b]{}\n",
        end="[e~[\n",
    ),
    "MiniCPM": chat(
        each(
            '<function name="{{ f.name }}">'
            + _pairs(
                '<param name="{{ k }}">'
                "{% if v is string and ('<' in v or '&' in v or '\n' in v) %}"
                "<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}</param>"
            )
            + "</function>",
            between="\n",
        )
    ),
    "Hunyuan": chat(
        each(
            "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n"
            + _pairs(
                "<arg_key:opensource>{{ k }}</arg_key:opensource>\n"
                f"<arg_value:opensource>{_JSON_TEXT}</arg_value:opensource>\n"
            )
            + "</tool_call:opensource>\n",
            before="<tool_calls:opensource>\n",
            after="</tool_calls:opensource>",
        )
    ),
    "Muse-Glimmer": chat(
        each(
            ' to={{ f.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n'
            + _pairs(f'<atem:parameter name="{{{{ k }}}}">{_JSON_TEXT}</atem:parameter>\n')
            + "</atem:invoke>\n</atem:function_calls>",
            between="<|eom|><|start|>assistant",
        ),
        think=(
            "{% if m.reasoning_content %} to=self<|message|>{{ m.reasoning_content }}"
            "<|eom|><|start|>assistant{% endif %}"
        ),
        text=(
            "{% if m.content %} to=user<|message|>{{ m.content }}"
            "{% if m.tool_calls %}<|eom|><|start|>assistant{% endif %}{% endif %}"
        ),
        begin="<|start|>{}",
        end="<|eot|>",
    ),
    "DeepSeek V3.2": chat(_dsml("function_calls")),
    "DeepSeek V4": chat(_dsml("tool_calls")),
    "DeepSeek V3, R1": chat(
        each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
            "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            between="\n",
            after="<｜tool▁calls▁end｜>",
        )
    ),
    "DeepSeek V3.1": chat(
        each(
            "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments }}"
            "<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        )
    ),
    "Kimi K2": chat(
        each(
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
            "{{ f.arguments | tojson }}<|tool_call_end|>",
            before="<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
        )
    ),
    "Mistral, a list": chat(
        each(
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}',
            before="[TOOL_CALLS][",
            between=", ",
            after="]",
        ),
        think="{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}",
    ),
    "Mistral, named": chat(each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")),
    "Mistral, named and numbered": chat(
        each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}")
    ),
    "Cohere's actions": chat(
        each(
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
            '"parameters": {{ f.arguments | tojson }}}',
            before="<|START_ACTION|>[\n",
            between=",\n",
            after="\n\n]<|END_ACTION|>",
        ),
        think=(
            "{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}"
            "<|END_THINKING|>{% endif %}"
        ),
        text=("{% if m.content %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"),
    ),
    "Command R+": chat(
        each(
            '    {\n        "tool_name": "{{ f.name }}",\n'
            '        "parameters": {{ f.arguments | tojson(indent=4) }}\n    }',
            before="\nAction:\n```json\n[\n",
            between=",\n",
            after="\n\n]```",
        )
    ),
    "Apertus": chat(
        each(
            '{"{{ f.name }}": {{ f.arguments | tojson }}}',
            before="<|tools_prefix|>[",
            between=", ",
            after="]<|tools_suffix|>",
        ),
        think=(
            "{% if m.reasoning_content %}<|inner_prefix|>{{ m.reasoning_content }}"
            "<|inner_suffix|>{% endif %}"
        ),
    ),
    "Apriel": chat(
        each(_JSON, before="\n<tool_calls>[", between=", ", after="]</tool_calls>"),
        think=(
            "{% if m.reasoning_content %}Here are my reasoning steps:\n{{ m.reasoning_content }}"
            "\n[BEGIN FINAL RESPONSE]\n{% endif %}"
        ),
    ),
    "Nemotron Nano": chat(each(_JSON, before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>")),
    "FireFunction, Phi": chat(each(_JSON, before=" functools[", between=", ", after="]")),
    "Granite, Phi": chat(
        each(_JSON, before="<|tool_call|>[", between=", ", after="]<|/tool_call|>")
    ),
    "GigaChat": chat(
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        "<|message_sep|>\n\nfunction call<|role_sep|>\n" + _JSON + "{% endif %}",
        begin="{}<|role_sep|>\n",
        end="<|message_sep|>\n\n",
    ),
    "Llama": chat(
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endif %}',
        text="{{ m.content if not m.tool_calls }}",
    ),
    "functionary 3.1": chat(
        each("{{ '<function=' + f.name + '>' + f.arguments + '</function>' }}")
    ),
    "functionary 3.2": chat(
        each("{{ f.name + '\n' + f.arguments }}", between=">>>"),
        think="",
        text="{% if m.content %}all\n{{ m.content }}{% if m.tool_calls %}>>>{% endif %}{% endif %}",
        prompt=">>>",
    ),
    "Solar": chat(
        each(
            "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
            "{{ f.arguments | tojson }}<|tool_call:end|>",
            before="<|tool_calls|>",
            after="<|calls|>",
        ),
        think=(
            "{% if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|end|>"
            "<|begin|>assistant{% endif %}"
        ),
        text="{% if m.content %}<|content|>{{ m.content }}{% endif %}",
        begin="<|begin|>{}",
        end="<|end|>",
    ),
    "LFM 2.5": chat(
        each(
            "{{ f.name }}("
            "{% for k, v in f.arguments.items() %}{{ k }}="
            "{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}"
            "{% else %}{{ v }}{% endif %}{% if not loop.last %}, {% endif %}{% endfor %})",
            before="<|tool_call_start|>[",
            between=", ",
            after="]<|tool_call_end|>",
        )
    ),
    "Gemma 4": _GEMMA_VALUE
    + chat(
        each("<|tool_call>call:{{ f.name }}{{ show(f.arguments) }}<tool_call|>"),
        think=(
            "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}"
            "\n<channel|>{% endif %}"
        ),
        begin="<|turn>{}\n",
        end="<turn|>\n",
    ),
    "gpt-oss": chat(
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        " to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}<|call|>"
        "{% else %}<|channel|>final<|message|>{{ m.content }}{% endif %}",
        think=(
            "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
            "<|start|>assistant{% endif %}"
        ),
        text="",
        begin="<|start|>{}",
        end="<|return|>",
    ),
}

ALONE = frozenset(["GigaChat", "Llama", "gpt-oss"])
"""Those that write one call only."""

WORDLESS = frozenset(["Llama", "gpt-oss"])
"""Those that write no text beside calls."""

LEADS = {"Muse-Glimmer": " "}
"""Space before calls that belongs to them."""

UNWRITABLE = {"Gemma 4": r'<\|"\|>', "LFM 2.5": r"'\s*[,)]", "MiniCPM": r"\]\]>"}
"""What no string may have: its end could not be told."""

_KINDS = (
    *("Hermes, Qwen", "GLM", "DeepSeek V3.1", "Mistral, a list", "Llama", "functionary 3.2"),
    *("LFM 2.5", "Gemma 4", "gpt-oss"),
)
KINDS = [
    pytest.param(name, marks=() if name in _KINDS else pytest.mark.slow, id=name)
    for name in TEMPLATES
]
"""The templates: quick are one of each kind of notation."""
