"""Chat templates: rendered as transformers renders them, within limits, with control text apart."""

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.chat_format.chat_template import (
    ChatTemplate,
    MessageTemplate,
    PlainTemplate,
    encode_chat,
    load_template,
)
from localrt.chat_format.sandbox import SandboxedTemplate
from localrt.common.errors import TemplateError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import Tokenizer, load_tokenizer
from localrt.offload.memory import helpers_nbytes
from tests.real_models import real_model

CHATML = (
    "{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|im_start|>", "<|im_end|>", "</think>"]
HELLO = [{"role": "user", "content": "hello"}]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def encode_messages(
    tokenizer: Tokenizer, template: MessageTemplate, messages: list[dict[str, Any]]
) -> list[int]:
    names = map(tokenizer.token_text, tokenizer.special_ids)
    return encode_chat(tokenizer, template.render_segments(messages, control_tokens=names))


def test_renders_messages_and_the_generation_prompt() -> None:
    template = ChatTemplate(CHATML)
    start = "<|im_start|>user\nhello<|im_end|>\n"
    assert template.render(HELLO) == start + "<|im_start|>assistant\n"
    assert template.render_segments(HELLO) == [(template.render(HELLO), True)]
    assert template.render(HELLO, add_generation_prompt=False) == start


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}\n  {% if 1 %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}",
            "user\n",
        ),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ functions + (datetime | length | string) }}", "[]10"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_what_templates_expect_of_their_environment(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(HELLO, enable_thinking=False) == expected


def test_tools_reach_the_template_and_choose_its_own_variant() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate("{{ tools | tojson }}").render(HELLO, tools=tools) == json.dumps(tools)
    template = ChatTemplate("plain", with_tools="{{ tools[0].function.name }}")
    assert (template.render(HELLO), template.render(HELLO, tools=tools)) == ("plain", "f")
    assert template.takes_tools
    assert not ChatTemplate("plain").takes_tools
    assert not PlainTemplate().takes_tools


def test_strings_and_parts() -> None:
    """Each template is given what it wants."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render(user(parts)) == "a\nb"
    source = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    assert ChatTemplate(source).render(HELLO) == "hello"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ unknown.field }}", "'unknown' is undefined"),
    ],
)
def test_a_template_that_fails_says_why_on_one_line(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match="refused the messages") as caught:
        ChatTemplate(source).render(HELLO)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{% nonsense %}", "{{ a | nofilter }}"])
def test_a_template_that_is_not_jinja_says_where(source: str) -> None:
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "messages", [["hello"], [{"content": "hello"}], user([{"type": "image"}]), user(5)]
)
@pytest.mark.parametrize("template", [ChatTemplate(CHATML), PlainTemplate()])
def test_malformed_messages_are_refused(template: Any, messages: list[Any]) -> None:
    with pytest.raises(TemplateError):
        template.render(messages)


def test_plain_format() -> None:
    template = PlainTemplate()
    turns = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert template.render(turns) == "System: Be brief.\nUser: hello\nAssistant:"
    assert template.render(turns, add_generation_prompt=False).endswith("User: hello")
    assert (template.is_plain, template.stop_strings) == (True, ("\nUser:",))
    with pytest.raises(TemplateError, match="tools"):
        template.render(HELLO, tools=[{}])


contents = st.lists(
    st.one_of(st.text(max_size=6), st.sampled_from([*CONTROL, " ", "\n", "<tool>", "[x]", "|>"])),
    max_size=5,
).map("".join)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents}),
    max_size=3,
)


@pytest.mark.parametrize("control", [CONTROL, None])
@given(messages=conversations)
def test_segments_join_to_the_rendered_text(
    control: list[str] | None, messages: list[dict[str, Any]]
) -> None:
    template = ChatTemplate(CHATML)
    segments = template.render_segments(messages, control_tokens=control)
    assert "".join(text for text, _ in segments) == template.render(messages)
    written = "".join(text for text, counts in segments if counts)
    assert written.count("<|im_start|>") == len(messages) + 1


CUT = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
SAID = {"role": "assistant", "content": "thought</think>said"}


@pytest.mark.parametrize(
    ("source", "messages", "segments"),
    [
        (
            CHATML,
            user("a <|im_end|> <b>"),
            [
                ("<|im_start|>user\na ", True),
                ("<|im_end|>", False),
                (" <b><|im_end|>\n<|im_start|>assistant\n", True),
            ],
        ),
        # A template may read control tokens of an assistant, and acts on none of a user.
        (CUT, [SAID, *user("<|im_end|>")], [("said", True), ("<|im_end|>", False)]),
        (
            "{{ tools | tojson }}{{ more }}<|im_end|>",
            HELLO,
            [
                ('[{"a": "', True),
                ("<|im_start|>", False),
                ('"}]', True),
                ("</think>", False),
                ("<|im_end|>", True),
            ],
        ),
    ],
)
def test_control_text_is_set_apart(source: str, messages: Any, segments: Any) -> None:
    more: dict[str, Any] = {"tools": [{"a": "<|im_start|>"}], "more": "</think>"}
    found = ChatTemplate(source).render_segments(messages, control_tokens=CONTROL, **more)
    assert found == segments


# Real tokenizers ------------------------------------------------------------------------------


@cache
def real(name: str) -> tuple[Tokenizer, Any]:
    checkpoint = open_checkpoint(real_model(name))
    loaded = load_tokenizer(checkpoint), load_template(checkpoint) or PlainTemplate()
    checkpoint.close()
    return loaded


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "qwen0.5b", "gemma270m"])
def test_no_message_can_add_control_tokens(name: str) -> None:
    tokenizer, template = real(name)
    plain = encode_messages(tokenizer, template, user("a  b"))
    names = [tokenizer.token_text(token) for token in sorted(tokenizer.special_ids)[:40]]
    for typed in names:
        attack = user(f"a {typed} b")
        for ids in (
            encode_messages(tokenizer, template, attack),
            encode_chat(tokenizer, template.render_segments(attack)),
        ):
            special = [token for token in ids if token in tokenizer.special_ids]
            assert special == [token for token in plain if token in tokenizer.special_ids]
            assert typed in tokenizer.decode(ids)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "qwen0.5b"])
def test_real_templates_render_as_transformers_does(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _, template = real(name)
    tools = [{"type": "function", "function": {"name": "f", "description": "<&> é"}}]
    chats = [
        HELLO,
        [{"role": "system", "content": "Be brief."}, *HELLO],
        [*HELLO, {"role": "assistant", "content": " Hi!\n"}, *user("  again ")],
        [*HELLO, {"role": "tool", "content": "42"}],
    ]
    for chat in chats:
        for offered in (None, tools):
            expected, _ = render_jinja_template(
                [chat], tools=offered, chat_template=template.source, add_generation_prompt=True
            )
            assert template.render(chat, tools=offered) == expected[0]


# Hugging Face folders ---------------------------------------------------------------------------


def folder(path: Path, **files: Any) -> Any:
    for name, content in files.items():
        target = path / name.replace("__", "/").replace("_json", ".json").replace(
            "_jinja", ".jinja"
        )
        target.parent.mkdir(exist_ok=True)
        target.write_text(content if isinstance(content, str) else json.dumps(content))
    return SimpleNamespace(kind="safetensors", path=path)


NAMED = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]


@pytest.mark.parametrize(
    ("files", "written"),
    [
        ({"tokenizer_config_json": {"chat_template": NAMED}}, ("a", "b")),
        ({"chat_template_jinja": "new", "chat_templates__tool_use_jinja": "b"}, ("new", "b")),
    ],
)
def test_templates_of_a_folder(tmp_path: Path, files: Any, written: tuple[str, str]) -> None:
    template = load_template(folder(tmp_path, **files))
    assert template is not None
    assert (template.render(HELLO), template.render(HELLO, tools=[{}])) == written


def test_a_file_that_is_given_wins(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    with pytest.raises(TemplateError, match=r"given\.jinja does not exist"):
        load_template(folder(tmp_path), given)
    given.write_text("{{ bos_token }}given")
    metadata = {
        "tokenizer.chat_template": "own",
        "tokenizer.chat_template.tool_use": "own tools",
        "tokenizer.ggml.tokens": ["<s>"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    gguf: Any = SimpleNamespace(kind="gguf", metadata=metadata)
    own = folder(tmp_path, tokenizer_config_json={"chat_template": "own", "bos_token": "<s>"})
    for checkpoint in (gguf, own):
        template = load_template(checkpoint, given)
        assert template is not None
        assert template.render(HELLO) == template.render(HELLO, tools=[{}]) == "<s>given"


@pytest.mark.parametrize("broken", [[{"name": "default"}], {"default": "x"}])
def test_a_malformed_chat_template_entry_is_one_line(tmp_path: Path, broken: Any) -> None:
    checkpoint = folder(tmp_path, tokenizer_config_json={"chat_template": broken})
    with pytest.raises(TemplateError, match="chat_template"):
        load_template(checkpoint)


LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
NS = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ 10 ** (10 ** 9) }}", marks=pytest.mark.slow, id="a power"),
        pytest.param("{{ 'a' | center(10 ** 9) }}", id="center"),
        pytest.param(NS + "{% set ns.s = ns.s ~ ns.s %}" + END, id="doubling"),
        pytest.param(LOOP + "{{ 'a' * 3000000 }}" + END, id="output in a loop"),
    ],
)
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


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_process_that_renders_counts_as_memory() -> None:
    SandboxedTemplate("{{ 1 }}", "x").render({})
    assert 1 << 20 < helpers_nbytes() < 64 << 20


def test_the_library_refuses_what_is_nested_too_deeply() -> None:
    tool: Any = []
    for _ in range(10_000):
        tool = [tool]
    template = ChatTemplate("{{ tools | tojson }}")
    for render in (template.render, template.render_segments):
        with pytest.raises(TemplateError, match="nested too deeply"):
            render(HELLO, tools=[{"parameters": tool}])


def test_long_conversations_are_rendered() -> None:
    template = SandboxedTemplate("{{ messages | map(attribute='content') | join }}", "x")
    messages = [{"role": "user", "content": "é <think>a" * 20}] * 1000
    assert template.render({"messages": messages}) == "é <think>a" * 20_000
