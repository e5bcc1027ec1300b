"""What the target goes on from while it writes the text that a head learns from.

Four kinds of sequences: functions that the target invents from a name, functions of Python's
standard library whose bodies it writes, the same as requests in a chat, and conversations that it
invents as a whole (Xu et al. 2024, Magpie). What a sequence begins with follows from its number.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from localrt.chat_format.templates.chat_template import encode_chat
from localrt.loading.load import LoadedModel

_VERBS = """add apply average balance build cap change check clean combine common compare compress
compute convert count decode detect digits encode evaluate expand extract fill filter find first
fix flatten format generate get group has interleave invert is join largest last longest make map
match max maximum mean median merge min minimum mirror move next normalize nth numbers order
pairs parse partition prefix product range rank remove replace reverse rotate round scale search
select shift shortest sort split strip sum swap total transform trim unique update valid words"""
_NOUNS = """anagrams area array average balance bits brackets by_key by_length by_sum characters
chunks closest column consonants cycle date dictionary difference digits distance divisors
duplicates elements even_numbers factors fibonacci frequency grid groups index indices integers
intersection interval intervals items letters level list longest lowercase matrix max median
minimum mode multiples neighbors nested_list number numbers odd_positions overlap pairs
palindromes parentheses path pattern permutations points polynomial position prefixes primes
product range ratio roman_numerals rows score sentence sequence sorted_list spaces squares
string strings subarray subsequence substring sum suffix symbols temperatures text time triangle
triples tuple values vowels word words zeros"""
_ARGUMENTS = """s|text: str|text: str, width: int|string: str|n|n: int|a, b|x: int, y: int|lst|arr|
numbers: List[int]|numbers: List[float]|nums|strings: List[str]|words|l: list|d|data: dict|
matrix: List[List[int]]|grid|lst, k|arr, target|start: int, end: int|values: List[float], k: int|
s1: str, s2: str|""".replace("\n", "").split("|")
_RETURNS = ["", "", " -> int", " -> bool", " -> str", " -> List[int]", " -> float", " -> List[str]"]
_IMPORTS = ["", "", "\n\n", "from typing import List\n\n\n", "from typing import List, Dict\n\n\n"]
_IMPORTS += ["import math\n\n\n", "from collections import Counter\n\n\n", "import re\n\n\n"]
_REQUESTS = ["Complete this function:", "Implement the following function.", "Finish this code:"]
_REQUESTS += ["Write the body of this Python function.", "Fill in the function below.", ""]
_STARTS = """|||Write|Explain|What is|What are|How do|How can I|Why|Describe|Can you|Compare|
Give me|Summarize|Suppose|Imagine|Create|List|Please|I want|I have|Is it|Tell me|Solve|Calculate|
Translate|Write a story|Write an email|Write a Python|Write a function|Help me|Discuss|Given|Which|
Who|When|In the|Consider|Draft|Design|Act as|You are|Rewrite|Pretend|Identify|Extract|Analyze|
Explain why|What would|Provide|Suggest|Should|Does|A|The|My|If|Find|Evaluate|Classify|Edit|
Edit the following"""
_STARTERS = _STARTS.replace("\n", "").split("|")
KINDS = ("name", "name", "name", "function", "function", "request", "chat", "chat")
"""Of sequences, by turns."""

_MOST = {"name": 256, "function": 224, "question": 96, "answer": 256}
_SOURCE_CHARACTERS = (80, 900)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Tokens that are given, then at most ``most`` that the target writes at ``temperature``."""

    tokens: Sequence[int]
    temperature: float
    most: int


Beginnings = Callable[[int], Iterator[Beginning]]
"""Of a sequence, by its number: what it begins with, and goes on with whenever the target ends."""


def frame(loaded: LoadedModel) -> tuple[list[int], list[int]]:
    """Tokens around a user's message: up to it, and from its end to the answer's beginning."""
    assert loaded.tokenizer is not None, "a GGUF file has one"
    ids = chat(loaded, "\0")
    mark = loaded.tokenizer.encode("\0", add_special=False)
    at = next(i for i in range(len(ids)) if ids[i : i + len(mark)] == mark)
    return ids[:at], ids[at + len(mark) :]


def chat(loaded: LoadedModel, message: str) -> list[int]:
    """The tokens of a conversation that asks for an answer to ``message``."""
    assert loaded.tokenizer is not None, "a GGUF file has one"
    names = map(loaded.tokenizer.token_text, loaded.tokenizer.special_ids)
    messages = [{"role": "user", "content": message}]
    return encode_chat(
        loaded.tokenizer, loaded.template.render_segments(messages, control_tokens=names)
    )


def held_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of JSONL files with prompts."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def held_out(loaded: LoadedModel, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Their tokens: a ``prompt`` as it is, the first of ``turns`` as a chat."""
    assert loaded.tokenizer is not None, "a GGUF file has one"
    return [
        loaded.tokenizer.encode(row["prompt"], add_special=False)
        if "prompt" in row
        else chat(loaded, row["turns"][0])
        for row in rows
    ]


def held_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a text must not hold: the definitions of functions that are held out."""
    return [f"def {row['entry_point']}(" for row in rows if "entry_point" in row]


def prompts_in_turn(prompts: Sequence[Sequence[int]]) -> Beginnings:
    """Each sequence begins with a prompt of its own, which is continued greedily."""
    size = len(prompts)
    return lambda number: (
        Beginning(prompts[n % size], 0.0, 1 << 20) for n in range(number, 1 << 30)
    )


def beginnings(loaded: LoadedModel, seed: int, kinds: Sequence[str] = KINDS) -> Beginnings:
    """What sequences of ``kinds`` begin with, by turns."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None, "a GGUF file has one"
    functions, (before, after) = standard_functions(), frame(loaded)
    end = tokenizer.encode("<|endoftext|>", add_special=False)

    def code(text: str, temperature: float, kind: str, *, first: bool) -> Beginning:
        ids = tokenizer.encode(text, add_special=False)
        return Beginning(ids if first else [*end, *ids], temperature, _MOST[kind])

    def of(number: int) -> Iterator[Beginning]:
        random = np.random.default_rng((seed, number))
        kind = kinds[number % len(kinds)]
        for part in cycle((0, 1)):
            temperature = float(random.choice((0.0, 0.0, 0.4, 0.8)))
            if kind == "name":
                yield code(_named(random), temperature, kind, first=part == 0)
            elif kind == "function":
                text = functions[int(random.integers(len(functions)))]
                yield code(text, temperature, kind, first=part == 0)
            elif kind == "request":
                text = functions[int(random.integers(len(functions)))]
                request = str(random.choice(_REQUESTS))
                ids = tokenizer.encode(f"{request}\n```python\n{text}```", add_special=False)
                yield Beginning([*before, *ids, *after], temperature, _MOST["answer"])
            else:
                start = tokenizer.encode(str(random.choice(_STARTERS)), add_special=False)
                yield Beginning([*before, *start], 0.9, _MOST["question"])
                yield Beginning(after, temperature, _MOST["answer"])

    return of


def _named(random: np.random.Generator) -> str:
    """A function's first words: its name, and perhaps its arguments and a docstring's beginning."""
    verbs, nouns = _VERBS.split(), _NOUNS.split()
    text = f"{random.choice(_IMPORTS)}def {random.choice(verbs)}_{random.choice(nouns)}("
    if random.random() < 0.7:
        text += f"{random.choice(_ARGUMENTS)}){random.choice(_RETURNS)}:\n"
        if random.random() < 0.8:
            text += str(random.choice(['    """', '    """\n    ', "    '''", '    """ ']))
    return text


def standard_functions() -> list[str]:
    """Signatures with docstrings from the standard library, without bodies."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    return functions_in(f for f in files if not {"site-packages", "test", "tests"} & set(f.parts))


def functions_in(files: Iterable[Path]) -> list[str]:
    """Signatures with docstrings from modules, without bodies."""
    found: dict[str, None] = {}
    for file in files:
        try:
            source = file.read_text()
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.body[1:]:
                text = textwrap.dedent("".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
                if _SOURCE_CHARACTERS[0] <= len(text) <= _SOURCE_CHARACTERS[1]:
                    found[text] = None
    return list(found)
