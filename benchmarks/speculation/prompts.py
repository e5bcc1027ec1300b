"""Prompts of the speculation benchmark: from files, and made from text that is on every machine.

HumanEval's prompts are taken as they are, evenly spread over the file. Prompts that repeat their
input are edits of functions of Python's own library and tasks on MT-bench's longer turns. It knows
files and text, no model.
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["humaneval", "repeated_share", "repeating", "spread"]

_MODULES = ("textwrap", "shlex", "bisect", "heapq", "statistics", "fnmatch", "colorsys", "glob")
_EDITS = (
    "Rename the function {name} to {name}_2 and write out the whole function again, otherwise "
    "unchanged",
    "Add type annotations to the signature of {name} and write out the whole function again, "
    "otherwise unchanged",
    "Remove the docstring of {name}, if it has one, and write out the rest of the function again, "
    "unchanged",
)
_SUMMARIES = (
    "Correct every spelling mistake in this text and write it out again, otherwise unchanged",
    "Summarize this text by quoting its most important sentences word for word, in their order",
)
_SHORTEST, _LONGEST = 250, 1200  # characters of a text that is worked on
_NGRAM = 4


def humaneval(path: Path, count: int) -> list[str]:
    """``count`` prompts of a file of JSON lines with a ``prompt`` each."""
    return spread([str(line["prompt"]) for line in _lines(path)], count)


def repeating(turns: Path, count: int) -> list[str]:
    """``count`` prompts whose answers largely repeat them: edits and summaries, in turns.

    ``turns`` has JSON lines with ``turns`` each, as MT-bench does.
    """
    edits, texts = list(_edits()), list(_texts(turns))
    summaries = [f"{_SUMMARIES[i % len(_SUMMARIES)]}:\n\n{text}" for i, text in enumerate(texts)]
    few = min(len(summaries), count // 2)
    chosen = [spread(edits, count - few), spread(summaries, few)]
    mixed = [prompt for pair in zip(*chosen, strict=False) for prompt in pair]
    return mixed + [prompt for kind in chosen for prompt in kind[min(map(len, chosen)) :]]


def repeated_share(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of an answer's runs of four tokens that its prompt has too."""

    def runs(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1)]

    known, said = set(runs(prompt)), runs(answer)
    return sum(run in known for run in said) / len(said) if said else 0.0


def spread(items: Sequence[str], count: int) -> list[str]:
    """``count`` of ``items``, evenly spread; all where there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _edits() -> Iterator[str]:
    number = 0
    for module in _MODULES:
        file = importlib.import_module(module).__file__
        assert file is not None, "these are written in Python"
        source = Path(file).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            code = ast.get_source_segment(source, node)
            if isinstance(node, ast.FunctionDef) and code and _SHORTEST < len(code) < _LONGEST:
                task = _EDITS[number % len(_EDITS)].format(name=node.name)
                yield f"{task}:\n\n```python\n{code}\n```"
                number += 1


def _texts(path: Path) -> Iterator[str]:
    """Turns that are long enough to be worked on."""
    for line in _lines(path):
        for turn in line["turns"]:
            if len(turn) > _SHORTEST:
                yield turn[:_LONGEST]
