"""Answers that follow a schema, an expression or a grammar, of a random model that never would."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.chat_format.gbnf import gbnf_to_lark
from localrt.chat_format.parser import PLAIN_CALLS
from localrt.chat_format.structured import Grammars
from localrt.cli import main
from localrt.common.errors import OptionError
from localrt.engine.options import read_options
from localrt.models.tokenizers.hf import hf_tokenizer
from tests.conftest import write_byte_tokenizer
from tests.inside import core_of

llguidance = pytest.importorskip("llguidance")

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


SEEDS = {
    "grammar": 'root ::= ("a" | [b-c]{1,3} x)* "\\n"\nx ::= . <[5]>?',
    "regex": "(a|b)+[0-9]{2}",
    "json_schema": json.dumps(PERSON),
}


def byte_grammars(folder: Path) -> Grammars:
    write_byte_tokenizer(folder)
    return Grammars(hf_tokenizer(folder))


def follow(grammars: Grammars, name: str, data: bytes) -> None:
    """Write eight tokens that follow the text of an option."""
    made = grammars.constraint(read_options({name: data.decode("utf-8", "replace")}))
    if made is None or (constraint := made()) is None:
        return
    for _ in range(8):
        allowed = np.flatnonzero(constraint.allowed())
        if constraint.done or not len(allowed):
            break
        constraint.accept(int(allowed[-1]))


def follows(text: str) -> dict[str, Any]:
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 4
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"a", "b"}
    return value  # type: ignore[no-any-return]


def test_an_answer_follows_its_schema_and_ends_with_it(tiny: localrt.Model) -> None:
    options: dict[str, Any] = {"seed": 1, "temperature": 1.5, "top_k": 0}
    answer = tiny.generate("hi", json_schema=PERSON, **options)
    follows(answer.text)
    assert tiny.generate("hi", json_schema=json.dumps(PERSON), **options).text == answer.text
    assert answer.finish_reason == "stop"
    assert answer.text == tiny.detokenize(answer.token_ids)


@pytest.mark.parametrize("schema", [True, '{"type": "array"}'])
def test_any_json_can_be_asked_for(tiny: localrt.Model, schema: Any) -> None:
    bias = {tiny.tokenize(text)[0]: 9.0 for text in ("]", "}", '"', "1")}
    given: dict[str, Any] = {"json_schema": schema, "max_tokens": 120, "logit_bias": bias}
    answers = [tiny.generate("hi", seed=seed, top_k=0, **given) for seed in range(3)]
    values = [json.loads(each.text) for each in answers if each.finish_reason == "stop"]
    assert values
    assert schema is True or all(isinstance(value, list) for value in values)


@pytest.mark.parametrize(
    ("regex", "options", "matches"),
    [
        (r"\d{3}-\d{4}", {}, r"\d{3}-\d{4}"),
        ("^a+b$", {"bias": {"b": 4.0}}, "a+b"),
        ("[日本🎈]{3}", {}, "[日本🎈]{3}"),  # characters of several tokens
        ("a{50}", {"max_tokens": 7}, "aaaaaaa"),
        ("a{3}b{30}", {"stop": "bb"}, "aaa"),
        # It is complete at once: what ends it is the model's own end, or nothing else.
        ("a*", {"temperature": 0, "max_tokens": 6, "ignore_eos": True}, "aaaaaa"),
        ("a*", {"temperature": 0, "bias": {"end": 1000.0}}, ""),
    ],
)
def test_regex(tiny: localrt.Model, regex: str, options: dict[str, Any], matches: str) -> None:
    ids = {"b": tiny.tokenize("b")[0], "end": next(iter(tiny.tokenizer.eos_ids))}
    bias = {ids[name]: value for name, value in options.get("bias", {}).items()}
    given = {"seed": 1, "max_tokens": 400, "top_k": 0, **options, "logit_bias": bias}
    given.pop("bias", None)
    answer = tiny.generate("hi", regex=regex, **given)
    assert re.fullmatch(matches, answer.text)
    assert answer.finish_reason == ("length" if given["max_tokens"] < 10 else "stop")


def test_speculation_keeps_within_the_constraint(tiny: localrt.Model) -> None:
    for draft in ("off", "ngram"):
        answer = tiny.generate("aa aa aa", json_schema=PERSON, temperature=0, draft=draft)
        found = follows(answer.text)
        if draft == "off":
            plain = found
    assert found == plain


def test_batches_and_chats(tiny: localrt.Model) -> None:
    answers = tiny.generate_batch(["one", "two", "three"], json_schema=PERSON, seed=1, top_k=0)
    for answer in answers:
        follows(answer.text)
    alone = tiny.generate("one", json_schema=PERSON, seed=1, top_k=0)
    assert answers[0].text == alone.text
    chat = tiny.chat(regex="(red|green)", seed=2, draft="off")
    assert chat.send("which?").text in ("red", "green")
    assert chat.send("again?", regex=None, max_tokens=3).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": "strng"}}, "json_schema cannot be used: Invalid type"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema cannot be used"),
        *[
            ({"json_schema": schema}, "json_schema allows no answer that ends")
            for schema in [
                {"$ref": "#"},
                {"anyOf": [{"$ref": "#"}, {"allOf": [{"type": "integer"}, {"$ref": "#"}]}]},
                {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
                {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2},
            ]
        ],
        ({"json_schema": '{"type":'}, "json_schema is not JSON"),
        ({"json_schema": {"type": object}}, "json_schema is not JSON"),
        ({"json_schema": [1]}, "json_schema must be a JSON object"),
        ({"json_schema": {"title": "\ud800"}}, "json_schema"),
        ({"regex": "(a"}, "regex cannot be used: unclosed group"),
        ({"regex": "(?=a)b"}, "regex cannot be used: look-around"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"regex": "[^\\s\\S]"}, "regex"),
        ({"regex": "a", "json_schema": {}}, "cannot be combined"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "regex and grammar cannot be combined"),
        ({"grammar": 'root ::= "a" b'}, "grammar cannot be used: line 1, rule 'root'"),
        ({"regex": "a" * 200_000}, "regex is too large: 200000 characters"),
        ({"json_schema": {"enum": ["a" * 200_000]}}, "json_schema is too large"),
    ],
)
def test_what_cannot_be_followed_is_said_before_any_work(
    tiny: localrt.Model, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(localrt.OptionError, match=re.escape(message)) as caught:
        tiny.stream("hi", **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(localrt.OptionError):
        tiny.chat(**options).send("hi")


def field(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


LOOSE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (field(type="string", pattern="^(?=a)b"), ("pattern",)),
    (field(type="string", pattern="^a+$"), ()),
    (field(type="string", format="colour"), ("format",)),
    (field(type="integer", minimum=10**30), ("minimum",)),
    (field(**{"not": {"type": "string"}}), ("not",)),
    (field(type="array", uniqueItems=True, contains={}), ("contains", "uniqueItems")),
    (field(type="string", pattern="^a{60000}$"), ("pattern",)),
    (field(type="array", items=field(pattern="^a{60000}$", minLength=2)), ("pattern",)),
    (field(type="string", pattern="^(ab|c)*$", minLength=3000, maxLength=9000), ("pattern",)),
    ({"type": "object", "patternProperties": {"^(?!a)": {}, "^b": {}}}, ("patternProperties",)),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
    ({"oneOf": [field(type="string"), field(minLength=1)]}, ("oneOf",)),
    ({"$ref": "https://example.org/schema.json"}, ("$ref",)),
    ({**field(**{"$ref": "#/$defs/x"}), "$defs": {"x": field(**{"not": {}})}}, ("not",)),
    (field(default=1, examples=[2], title="T", deprecated=True, **{"x-own": 3}), ()),
]


@pytest.mark.parametrize(("schema", "left_out"), LOOSE, ids=json.dumps)
def test_what_cannot_be_followed_is_left_out_and_told(
    tiny: localrt.Model, schema: dict[str, Any], left_out: tuple[str, ...]
) -> None:
    made = core_of(tiny).requests.make("hi", json_schema=schema)
    assert made.left_out == left_out
    assert made.constraint is not None
    made.constraint().allowed()


@pytest.mark.parametrize(
    ("parameters", "left_out"),
    [
        *LOOSE[:4],
        ({"type": "strng"}, ()),
        ({"$ref": "#/nowhere"}, ()),
        ({"type": "object", "properties": []}, ()),
        ({"type": "object", "required": None, "properties": {"a": {"type": "any"}}}, ()),
        (
            {"type": "object", "required": ["b"], "properties": {}, "additionalProperties": False},
            (),
        ),
        ({"properties": {"a": {"enum": []}}}, ()),
        (field(**{"$ref": "#"}), ()),
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("choice", ["auto", "none", "look"])
def test_no_schema_of_a_tool_is_an_error(
    tiny: localrt.Model, parameters: dict[str, Any], left_out: tuple[str, ...], choice: str
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    for schema in (None, {"type": "object"}):
        options = {"tool_choice": choice, "json_schema": schema}
        made = core_of(tiny).requests.make("hi", tools=tools, **options)
        bound = choice == "look" or (choice == "auto" and schema is not None)
        assert made.left_out == (left_out if bound else ())
        if made.constraint is not None:
            made.constraint().allowed()


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


INT = {"type": "integer"}
A, B = object_of("a", a=INT), object_of("b", b=INT)
DEFS = {"$defs": {"A": A, "B": B}}
TO_A, TO_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
LINKED = object_of("v", "next", v=INT, next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]})
TREE = object_of("kids", kids={"type": "array", "items": {"$ref": "#"}})
CAT, DOG = (object_of("kind", kind={"const": name}, **{name: INT}) for name in ("cat", "dog"))
TUPLE = {"type": "array", "prefixItems": [INT, INT]}
A1, AB, AX = {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "x": 1}


# Schemas, values that fit them, and values that do not.
MEMBERS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (A, [A1], [AX, {}]),
    ({"properties": {"a": INT}}, [A1, {}, 7], [AX]),
    (object_of(p=object_of(q=A)), [{"p": {"q": A1}}], [{"p": {"q": AX}}, {"p": {"x": 1}}]),
    ({"type": "array", "items": A}, [[A1, A1]], [[A1, AX]]),
    # What allows others, or names none.
    (object_of(p={"type": "object"}), [{"p": {}}, {"p": AX}], [AX]),
    ({**A, "additionalProperties": True}, [A1, AX], []),
    ({**A, "additionalProperties": INT}, [AX], [{"a": 1, "x": "s"}]),
    ({**A, "patternProperties": {"^x": INT}}, [AX], []),
    ({**A, "unevaluatedProperties": {}}, [AX], []),
    ({**A, "minProperties": 2}, [AX], []),
    # Several schemas of one object.
    ({"allOf": [TO_A, TO_B], **DEFS}, [AB], [{**AB, "c": 1}, A1]),
    ({"allOf": [TO_A, {"description": "d"}], **DEFS}, [A1], [AX]),
    ({**TO_A, "properties": {"b": INT}, **DEFS}, [A1, AB], [AX]),
    ({"allOf": [A, {**B, "additionalProperties": True}]}, [{"a": 1, "b": 2, "c": 3}], []),
    ({"allOf": [TO_A, {"anyOf": [B, CAT]}], **DEFS}, [AB, {"a": 1, "kind": "cat"}], [AX]),
    ({"allOf": [object_of(p=TO_A), object_of(p=TO_B)], **DEFS}, [{"p": AB}], [{"x": 1}]),
    ({**object_of(p=A), "anyOf": [object_of(p=B), A]}, [{"p": AB}, {"p": A1, "a": 1}], [{"x": 1}]),
    ({"anyOf": [object_of(p=A), object_of(p=B)]}, [{"p": A1}], [{"p": AX}, {"p": AB}]),
    ({"anyOf": [A, B]}, [A1, {"b": 2}], [AX, AB]),
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": INT, "b": INT}},
     [A1, {"b": 2}, AB], [{"a": 1, "c": 1}]),
    ({**object_of(n=INT), "oneOf": [CAT, DOG]},
     [{"n": 1, "kind": "dog", "dog": 1}, {"kind": "cat"}], [{"kind": "cat", "x": 1}]),
    ({**B, "anyOf": [TO_A, {"$ref": "#/$defs/C"}], "$defs": {"A": A, "C": CAT}},
     [{"b": 2, "a": 1}, {"b": 2, "kind": "cat"}], [{"b": 2, "x": 1}]),
    ({**A, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, [AB], [AX]),
    # Schemas that contain themselves, and names of definitions.
    ({"$ref": "#/$defs/N", "$defs": {"N": LINKED}},
     [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1, "next": None, "x": 1}]),
    (TREE, [{"kids": [{"kids": []}]}], [{"kids": [{"kids": [], "x": 1}]}]),
    (object_of(p=A, q={"$ref": "#/properties/p"}), [{"p": A1, "q": A1}], [{"q": AX}]),
    (object_of(p={"$ref": "#a"}) | {"$defs": {"A": {**A, "$anchor": "a"}}}, [{"p": A1}], []),
    # Names that are keywords elsewhere, and values that look like schemas.
    (object_of(properties=INT, type=A), [{"properties": 1, "type": A1}], [{"x": 1}]),
    (object_of(p={"const": {"properties": {"a": 1}}}), [{"p": {"properties": {"a": 1}}}], []),
    # Tuples.
    (TUPLE, [[], [1], [1, 2]], [[1, 2, 3]]),
    ({**TUPLE, "items": INT}, [[1, 2, 3]], [[1, 2, "s"]]),
    ({**TUPLE, "minItems": 3}, [[1, 2, 3]], []),
]  # fmt: skip


def fits(bound: Any, tokens: Sequence[int]) -> bool:
    for token in tokens:
        if bound.done or not bound.allowed()[token]:
            return False
        bound.accept(token)
    return bool(bound.may_end)


@pytest.mark.parametrize(("schema", "right", "wrong"), MEMBERS, ids=json.dumps)
@pytest.mark.parametrize("face", ["answer", "call"])
def test_members_that_nobody_asked_for(
    tiny: localrt.Model, face: str, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    before, after = "", ""
    if face == "call":
        if not all(isinstance(value, dict) for value in (*right, *wrong)):
            pytest.skip("no parameters of a tool")
        before, after = '{"name": "look", "arguments": ', "}"
        functions = [{"name": "look", "parameters": schema}]
        make, _ = Grammars(tiny.tokenizer).call(PLAIN_CALLS, functions)
    else:
        make = core_of(tiny).requests.make("hi", json_schema=schema).constraint  # type: ignore[assignment]
    for values, fit in ((right, True), (wrong, False)):
        for value in values:
            text = before + json.dumps(value) + after
            tokens = tiny.tokenizer.encode(text, add_special=False)
            assert fits(make(), tokens) == fit, value


def test_a_text_that_is_too_complex_is_written_without_its_pattern(tiny: localrt.Model) -> None:
    """It is known before the first token, and not where the text begins."""
    functions = [{"name": "look", "parameters": field(type="string", pattern="^a{60000}$")}]
    made, left_out = Grammars(tiny.tokenizer).call(PLAIN_CALLS, functions)
    assert left_out == ("pattern",)
    bound, call = made(), '{"name": "look", "arguments": {"a": "xyz"}}'
    for token in tiny.tokenizer.encode(call, add_special=False):
        bound.accept(token)
    assert bound.may_end


def test_a_bias_that_leaves_nothing_is_an_error(tiny: localrt.Model) -> None:
    bias = {tiny.tokenize("a")[0]: float("-inf")}
    with pytest.raises(localrt.LocalrtError, match="no token of the model fits"):
        tiny.generate("hi", regex="a", logit_bias=bias)


def test_without_llguidance_the_package_is_named(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with (
        localrt.load(tiny_folder) as model,
        pytest.raises(localrt.MissingExtraError, match="pip install llguidance"),
    ):
        model.generate("hi", regex="a")


@pytest.mark.usefixtures("nothing_on_stdin")
def test_command_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "answer.gbnf"
    schema.write_text(json.dumps(PERSON))
    grammar.write_text('root ::= "yes" | "no"')
    run = ["run", str(tiny_folder), "hi", "--seed", "1"]
    for text in (str(schema), json.dumps(PERSON)):
        assert main([*run, "--json-schema", text]) == 0
        follows(capsys.readouterr().out)
    for flags in (
        ["--regex", "(yes|no)"],
        ["--grammar-file", str(grammar)],
        ["--grammar", grammar.read_text("utf-8")],
    ):
        assert main([*run, *flags]) == 0
        assert capsys.readouterr().out.strip() in ("yes", "no")
    for flag, bad in (("json-schema", "nowhere.json"), ("json-schema", "{"), ("regex", "(a")):
        assert main([*run, f"--{flag}", bad]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert (bad if "nowhere" in bad else flag.partition("-")[2]) in error


# -- grammars in llama.cpp's notation -------------------------------------------------------------

SUM = r"""
# sums of numbers, one a line
root ::= (sum "=" ws num "\n")+
sum  ::= num ([-+] ws num)*
num  ::= [0-9]+ ws | "(" ws sum ")" ws   # a line's end is white space, too
ws   ::= [ \t\n]*
"""
JSON = r"""
root   ::= value
value  ::= (object | list | string | "true" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}"
list   ::= "[" ws (
    value ("," ws value)*
  )? "]"
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\nt] | "u" [0-9a-fA-F]{4}))* "\"" ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
TOKENS = {"<think>": ord("T"), "</think>": ord("E")}


class Bytes:
    """A vocabulary of single bytes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def byte_tokenizer() -> Any:
    wrapper = llguidance.TokenizerWrapper(Bytes())
    return llguidance.LLTokenizer(wrapper, n_vocab=257, slices=[])


@cache
def matcher(grammar: str) -> Any:
    lark = gbnf_to_lark(grammar, TOKENS.get)
    made = llguidance.LLMatcher(
        byte_tokenizer(), llguidance.LLMatcher.grammar_from_lark(lark), log_level=0
    )
    assert not made.is_error(), made.get_error()
    return made


def allows(grammar: str, text: str) -> bool:
    own, data = matcher(grammar).deep_copy(), list(text.encode())
    return own.try_consume_tokens(data) == len(data) and own.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (SUM, ["1=1\n", "1 + (2 -3)\n=0 \n\n4=4\n"], ["1=1", "=1\n", "1=\n"]),
        (JSON, ['{"a": [true,\n  null]}', '"\\u00e9"', "[]"], ["[1]", '{"a"}', '"\n"']),
        ('root ::= "a"{2} "b"{1,} "c"{0,1}', ["aab", "aabbbc"], ["ab", "aaabcc"]),
        ('root ::= "a"\n  | "b" |\n  # a comment\n  "c"', ["a", "b", "c"], ["d"]),
        (r'root ::= "é" [\u00e8-\u00ea\U0001D11E] "\x85"', ["éê\x85", "é𝄞\x85"], ["ée\x85"]),
        (r"root ::= [^a-c\n] [a-] [+/\]#]", ["x-]", "-a/"], ["a-]", "\n-]"]),
        ('root ::= fooBar foo-bar start\nfooBar ::= "a"\nfoo-bar ::= "b"\nstart ::= "c"',
         ["abc"], ["ab"]),
        ('root ::= root "+" "1" | "1"', ["1", "1+1+1"], ["+1"]),  # llama.cpp refuses it
        ("root ::= <think> !</think>* <[69]>", ["TabcE", "TE"], ["TEE", "aE"]),
    ],
)  # fmt: skip
def test_a_grammar_allows_what_it_says(grammar: str, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not allows(grammar, text)] == []
    assert [text for text in no if allows(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "expression"),
    [
        ('root ::= ("a"{1,3}){1,3}', "a{1,9}"),
        ('root ::= ("a"{3,4}){1,3} "b"', "(aaaa?){1,3}b"),  # five are none
        ('root ::= ("" | "a" | "a"){2,3} ("" ""){4}', "a{0,3}"),
        ('root ::= w{2} w\nw ::= v\nv ::= ("a" | "bb")?', "(a|bb){0,3}"),
        ('root ::= "a" root root? | ""', "a*"),
    ],
)
def test_repetitions_of_repetitions_allow_what_they_say(grammar: str, expression: str) -> None:
    texts = [
        "".join(text)
        for n in range(10)
        for text in itertools.product("abc"[: 3 - n // 6], repeat=n)
    ]
    wrong = [
        text for text in texts if allows(grammar, text) != bool(re.fullmatch(expression, text))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= (("a"{1,1000}){1,1000}){1,1000} "x"',
        "root ::= " + '"a"? ' * 3000 + '"x"',
        'root ::= d0 "x"\n'
        + "".join(f"d{n} ::= d{n + 1}? d{n + 1}?\n" for n in range(20))
        + 'd20 ::= "a"',
    ],
)
def test_what_could_be_read_in_many_ways_is_read_in_one(grammar: str) -> None:
    limits = llguidance.LLParserLimits(max_items_in_row=150, step_max_items=10_000)
    lark = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(grammar, TOKENS.get))
    made = llguidance.LLMatcher(byte_tokenizer(), lark, log_level=0, limits=limits)
    for byte in b"a" * 900:
        made.compute_bitmask()
        assert made.consume_token(byte), made.get_error()
    assert made.consume_token(ord("x")), made.get_error()
    assert made.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a" b', "line 1, rule 'root': there is no rule 'b'"),
        ('root ::= "a"\nb := "c"', "line 2, rule 'b': '::=' must follow"),
        ('root ::= "a"\n\nb ::= (\n"c"', "line 3, rule 'b': the parenthesis is not closed"),
        (r'root ::= "\q"', "line 1, rule 'root': a backslash must not be followed by 'q'"),
        ("root ::= [b-a]", "the range 'b' to 'a' is empty"),
        ('root ::= "a"{3,1}', "from 3 to 1 repetitions are impossible"),
        ("root ::= " + "(" * 300, "more than 200 parentheses"),
        ("root ::= <nothing>", "the model has no token <nothing>"),
        ('{"type": "object"}', "line 1: a rule must begin with its name"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gbnf_to_lark(grammar, TOKENS.get)


@given(st.text('ro:=t "[]()|*{},1\\\n#<>!.-', max_size=30))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    said = ""
    try:
        gbnf_to_lark("root ::= " + text, TOKENS.get)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said


def test_a_grammar_that_is_read_in_many_ways_is_refused(tiny: localrt.Model) -> None:
    options = read_options({"grammar": 'root ::= ("x" | "xx"){0,3000} "y"'})
    make = Grammars(tiny.tokenizer).constraint(options)
    assert make is not None
    bound = make()

    def follow() -> None:
        for token in tiny.tokenizer.encode("x" * 400, add_special=False):
            bound.allowed()
            bound.accept(token)

    with pytest.raises(OptionError, match="can be read in too many ways"):
        follow()


def test_thousands_of_rules_that_lead_to_one_another_are_followed(tiny: localrt.Model) -> None:
    """llguidance does that by recursion, which took the process with it."""
    rules = ["root ::= r0", *(f"r{n} ::= r{n + 1}" for n in range(5000)), 'r5000 ::= "z"']
    assert tiny.generate("hi", grammar="\n".join(rules), temperature=0.0).text == "z"
    parts: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**parts, "d3000": {"const": "z"}}}
    assert tiny.generate("hi", json_schema=schema, temperature=0.0).text == '"z"'
