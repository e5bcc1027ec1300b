"""Structs as Python reads them lie in memory as the C++ compiler lays them out."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from localrt.quant.cpu import abi
from localrt.quant.declarations import Declarations

HEADER = Path(abi.__file__).parent / "csrc" / "abi.h"


def places(struct: type[ctypes.Structure]) -> list[int]:
    return [getattr(struct, field[0]).offset for field in struct._fields_]


def test_layout_is_the_compilers(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    structs = abi.CPP.structs
    lines = [f'#include "{HEADER}"', "#include <cstddef>", "#include <cstdio>", "int main() {"]
    for name, struct in structs.items():
        offsets = "".join(f", (int)offsetof({name}, {field[0]})" for field in struct._fields_)
        text = "%d " * (1 + len(struct._fields_)) + "\\n"
        lines.append(f'printf("{text}", (int)sizeof({name}){offsets});')
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run([compiler, "-std=c++17", source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert len(structs) > 20
    for (name, struct), line in zip(structs.items(), printed.splitlines(), strict=True):
        assert [ctypes.sizeof(struct), *places(struct)] == list(map(int, line.split())), name


CPP = """
constexpr int MOST = 3;
enum Kind : int32_t { ONE = 1, TWO, FIVE = 5, SIX };
struct Inner {
    const uint8_t *a, *b;  // addresses
    int32_t c, d;
};
struct Outer {
    Inner inner;
    i64 numbers[2], more[MOST];
    float e;

    int sum() const { return 0; }
};
struct Odd {
    unheard of;
};
"""


def test_declarations() -> None:
    cpp = Declarations(CPP)

    @cpp.struct("Inner")
    class Inner(ctypes.Structure):
        pass

    @cpp.struct("Outer")
    class Outer(ctypes.Structure):
        pass

    assert (places(Inner), ctypes.sizeof(Inner)) == ([0, 8, 16, 20], 24)
    assert (places(Outer), ctypes.sizeof(Outer)) == ([0, 24, 40, 64], 72)
    assert cpp.numbers("Kind", "one two five six") == {"one": 1, "two": 2, "five": 5, "six": 6}
    with pytest.raises(ValueError, match="longer"):
        cpp.numbers("Kind", "one two five")
    odd: Any = type("Odd", (ctypes.Structure,), {})
    with pytest.raises(KeyError, match="unheard"):
        cpp.struct("Odd")(odd)
