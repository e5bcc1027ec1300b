"""What ``localrt`` exports is frozen: every name, signature and field, against ``public_api.txt``.

A change that is meant is written there by ``python -m tests.test_public_api``; to take a name away
or to change what exists breaks programs, to add one does not.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.engine.option_help import OPTION_HELP

# What one part of localrt needs of another, and no part of the published API.
INTERNAL = {"LiveAnswer": {"put"}, "Model": {"rank_counted"}}
KEPT = Path(__file__).with_name("public_api.txt")


def describe() -> str:
    """All of it as text, one line for each name or member."""
    return "\n".join(line for name in sorted(localrt.__all__) for line in _lines(name)) + "\n"


def _lines(name: str) -> Iterator[str]:
    value = getattr(localrt, name)
    if name == "__version__":
        yield "__version__: str"
    elif inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases})" if bases else f"class {name}"
        yield from sorted(f"  {line}" for line in _members(value))
    else:
        yield f"def {name}{_signature(value)}"


def _members(owner: type) -> Iterator[str]:
    if issubclass(owner, Exception):
        return
    if hasattr(owner, "__required_keys__"):  # a TypedDict
        base = localrt.GenerateOptions
        for key in owner.__annotations__:
            if owner is base or key not in base.__annotations__:
                yield f"[{key!r}]"
        return
    if dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            default = field.default is not dataclasses.MISSING
            default = default or field.default_factory is not dataclasses.MISSING
            yield f"{field.name}: {field.type}{' = ...' if default else ''}"
    for base in reversed(owner.__mro__[:-1]):
        if not base.__module__.startswith("localrt"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in INTERNAL.get(owner.__name__, ()):
                continue
            if dataclasses.is_dataclass(owner) and not _is_code(value):
                continue
            if isinstance(value, property):
                settable = " (settable)" if value.fset else ""
                yield f"{name}: {_returns(value.fget)}{settable}"
            elif isinstance(value, classmethod | staticmethod):
                yield f"{name}{_signature(getattr(owner, name))}"
            elif inspect.isfunction(value):
                yield f"{name}{_signature(value)}"


def _is_code(value: Any) -> bool:
    return isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)


def _signature(function: Any) -> str:
    return re.sub(r"<object object at .*?>", "...", str(inspect.signature(function)))


def _returns(function: Any) -> str:
    return str(inspect.signature(function).return_annotation)


def test_names_and_signatures_are_those_that_were_published() -> None:
    published, now = KEPT.read_text(encoding="utf-8").splitlines(), describe().splitlines()
    changed = [f"- {line}" for line in published if line not in now]
    changed += [f"+ {line}" for line in now if line not in published]
    assert published == now, (
        "the public API is not what was published; if that is meant: "
        "python -m tests.test_public_api\n" + "\n".join(changed)
    )


@pytest.mark.parametrize("name", sorted(set(localrt.__all__) - {"__version__"}))
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(localrt, name)
    assert inspect.getdoc(value), name
    if inspect.isclass(value) and not issubclass(value, Exception):
        for member, code in vars(value).items():
            if not member.startswith("_") and _is_code(code):
                assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"


def test_errors_have_one_root() -> None:
    for name in localrt.__all__:
        value = getattr(localrt, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            assert issubclass(value, localrt.LocalrtError)
            assert name in importlib.import_module("localrt.common.errors").__all__


@pytest.mark.parametrize("module", ["localrt.chat_format.thinking"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed


if __name__ == "__main__":
    KEPT.write_text(describe(), encoding="utf-8")


def test_each_typed_option_says_what_it_does() -> None:
    """Where an editor shows it, in the words of the app and the page."""
    (options,) = ast.parse(inspect.getsource(localrt.GenerateOptions)).body
    assert isinstance(options, ast.ClassDef)
    keys = {
        key.target.id: ast.literal_eval(text.value)
        for key, text in zip(options.body[1::2], options.body[2::2], strict=True)
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr)
        if isinstance(key.target, ast.Name)
    }
    assert keys.keys() == localrt.GenerateOptions.__annotations__.keys()
    assert keys.items() >= OPTION_HELP.items()
