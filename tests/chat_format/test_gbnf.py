"""Grammars in llama.cpp's notation: what they allow, and what is said of those that are wrong."""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.chat_format.gbnf import gbnf_to_lark
from localrt.chat_format.structured import Grammars
from localrt.common.errors import OptionError
from localrt.engine.options import read_options

llguidance = pytest.importorskip("llguidance")

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


def follows(grammar: str, text: str) -> bool:
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
    assert [text for text in yes if not follows(grammar, text)] == []
    assert [text for text in no if follows(grammar, text)] == []


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
        text for text in texts if follows(grammar, text) != bool(re.fullmatch(expression, text))
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
