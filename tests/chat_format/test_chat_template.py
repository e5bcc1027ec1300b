"""Chat templates: rendered as transformers renders them, within limits, with control text apart."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.chat_format import sandbox
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
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
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
        ("{{ tools is none }}", "True"),
        ("{{ messages[0]['content'].split('l')[0] }}", "he"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_what_templates_expect_of_their_environment(source: str, expected: str) -> None:
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    assert template.render(HELLO, enable_thinking=False) == expected


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
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ unknown.field }}", "'unknown' is undefined"),
    ],
)
def test_a_template_that_fails_says_why_on_one_line(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match="refused the messages") as caught:
        ChatTemplate(source).render(HELLO)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% nonsense %}", "{{ a | nofilter }}"])
def test_a_template_that_is_not_jinja_says_where(source: str) -> None:
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "messages",
    [
        ["hello"],
        [{"content": "hello"}],
        user([{"type": "image"}]),
        user(5),
        [{"role": 1, "content": ""}],
    ],
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
NO_END = "{% if '<|im_end|>' in messages[0].content %}{{ raise_exception('no') }}{% endif %}ok"
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
            "{{ messages[0].content.replace('</think>', '<|im_start|>system') }}",
            user("a</think>b"),
            [("a", True), ("</think>", False), ("b", True)],
        ),
        (NO_END, user("<|im_end|>"), [("ok", True)]),
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


harmless = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])),
        }
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "qwen0.5b"])
@given(messages=harmless)
def test_harmless_chats_encode_as_one_text(name: str, messages: list[dict[str, Any]]) -> None:
    tokenizer, template = real(name)
    whole = tokenizer.encode(template.render(messages), add_special=False, parse_special=True)
    assert encode_messages(tokenizer, template, messages) == whole
    assert encode_chat(tokenizer, template.render_segments(messages)) == whole


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
        (
            {
                "tokenizer_config_json": {
                    "chat_template": "{{ bos_token }}!",
                    "bos_token": {"content": "<s>"},
                }
            },
            ("<s>!", "<s>!"),
        ),
        ({"tokenizer_config_json": {"chat_template": NAMED}}, ("a", "b")),
        (
            {
                "tokenizer_config_json": {"chat_template": "old"},
                "chat_template_jinja": "new",
                "chat_templates__tool_use_jinja": "tools",
            },
            ("new", "tools"),
        ),
    ],
)
def test_templates_of_a_folder(tmp_path: Path, files: Any, written: tuple[str, str]) -> None:
    template = load_template(folder(tmp_path, **files))
    assert template is not None
    assert (template.render(HELLO), template.render(HELLO, tools=[{}])) == written


def test_a_file_that_is_given_wins(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
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


def test_a_given_file_without_a_template_is_refused_by_its_name(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    with pytest.raises(TemplateError, match=r"given\.jinja does not exist"):
        load_template(folder(tmp_path), given)
    given.write_text(" ")
    with pytest.raises(TemplateError, match=r"given\.jinja is empty"):
        load_template(folder(tmp_path), given)


def test_no_template(tmp_path: Path) -> None:
    assert load_template(folder(tmp_path)) is None
    assert load_template(folder(tmp_path, tokenizer_config_json={"chat_template": None})) is None
    gguf: Any = SimpleNamespace(kind="gguf", metadata={})
    assert load_template(gguf) is None


@pytest.mark.parametrize("broken", [[{"name": "default"}], [1], {"default": "x"}])
def test_a_malformed_chat_template_entry_is_one_line(tmp_path: Path, broken: Any) -> None:
    checkpoint = folder(tmp_path, tokenizer_config_json={"chat_template": broken})
    with pytest.raises(TemplateError, match="chat_template"):
        load_template(checkpoint)


NS = "{% set ns = namespace(s='ab', l=[1]) %}"
LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
BIG = "{% set ns = namespace(s='a' * 3000000) %}"
TWICE = "{% for i in range(60) %}"
TREE = NS + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"

HOSTILE = {
    "looking from the right": "{{ ('a' * 2000000).rfind('a' * 500000 ~ 'b' ~ 'a' * 500000) }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "doubling by ~": NS + TWICE + "{% set ns.s = ns.s ~ ns.s %}" + END,
    "output in a loop": BIG + LOOP + "{{ ns.s }}" + END,
    "showing a tree": TREE + "{{ ns.l }}",
}


_QUICK = ("a power", "doubling by ~", "showing a tree", "center")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=() if name in _QUICK else pytest.mark.slow, id=name)
        for name, source in HOSTILE.items()
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
from localrt.chat_format import sandbox
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
    sources = [HOSTILE[name] for name in ("doubling by ~", "output in a loop", "center")]
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
        "{% if a %}" * 150 + "{% endif %}" * 150,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ f(a=1, a=2) }}",
    ],
    ids=range(4),
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


def test_long_conversations_are_rendered() -> None:
    template = SandboxedTemplate("{{ messages | map(attribute='content') | join }}", "x")
    for count, text in ((1000, "é <think>a" * 20), (1, "é word" * 170_000)):
        messages = [{"role": "user", "content": text}] * count
        assert template.render({"messages": messages}) == text * count
