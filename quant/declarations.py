"""C++ declarations as ctypes: structs and enums are written once, where the kernels are."""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import (
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, TypeVar

_Struct = TypeVar("_Struct", bound=Structure)

# What a struct or an enum has; member functions come last.
_BODY = re.compile(r"^(?:struct|enum) (\w+)[^;{]*{([^{}]*)", re.MULTILINE)
_CONSTANTS = re.compile(r"^constexpr int ([^;]+);", re.MULTILINE)
_CONSTANT = re.compile(r"(\w+) = (\d+)(?=,|$)")
_DECLARATION = re.compile(r"\s*(?:const )?(\w+)(.+)", re.DOTALL)
_DECLARATOR = re.compile(r"(\*?) *(\w+)(?:\[(\w+)\])?")
_TYPES: dict[str, Any] = {
    "void": None,
    **dict.fromkeys(("int", "i32", "int32_t"), c_int32),
    **dict.fromkeys(("i64", "int64_t"), c_int64),
    "u32": c_uint32,
    "u64": c_uint64,
    "float": c_float,
    "double": c_double,
}


class Declarations:
    """The declarations in ``text``, C++ in this project's style. A pointer is an address."""

    def __init__(self, text: str) -> None:
        self.text = re.sub("//.*", "", text)
        self._bodies = dict(_BODY.findall(self.text))
        constants = _CONSTANT.findall(",".join(_CONSTANTS.findall(self.text)))
        self.constants = {name: int(number) for name, number in constants}
        self.structs: dict[str, type[Structure]] = {}

    def struct(self, name: str) -> Callable[[type[_Struct]], type[_Struct]]:
        """Give a class the fields of a struct, whose own structs have come before."""

        def define(struct: type[_Struct]) -> type[_Struct]:
            declarations = self._bodies[name].split(";")[:-1]
            struct._fields_ = [field for each in declarations for field in self.declared(each)]
            self.structs[name] = struct
            return struct

        return define

    def numbers(self, enum: str, names: str) -> dict[str, int]:
        """The numbers of an enum, by our names for its members in their order."""
        numbers: list[int] = []
        for member in self._bodies[enum].split(","):
            _, _, number = member.partition("=")
            numbers.append(int(number) if number else numbers[-1] + 1 if numbers else 0)
        return dict(zip(names.split(), numbers, strict=True))

    def declared(self, declaration: str) -> list[tuple[str, Any]]:
        """Names and types of fields or of a parameter, such as ``const float *x, *y``."""
        kind, declarators = _DECLARATION.findall(declaration.replace("* const*", "*"))[0]
        address = c_char_p if kind == "char" else c_void_p
        found = []
        for star, name, size in _DECLARATOR.findall(declarators):
            type_ = address if star else self.structs.get(kind) or _TYPES[kind]
            found.append((name, type_ * (self.constants.get(size) or int(size)) if size else type_))
        return found
