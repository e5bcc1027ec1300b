"""A config's object that describes a quantization: its values, checked, with the path to each.

What is not understood is an error that names the key and what would work: a scheme that is read in
part would give other numbers without a sign.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from localrt.common.errors import CheckpointError, UnsupportedModelError

T = TypeVar("T")
_PAIR = re.compile(r"(\d{1,9})x(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Keys:
    """``values`` as ``where`` has them: a file's path, and the keys that lead there."""

    values: Mapping[str, Any]
    where: str

    def value(self, key: str) -> Any:
        """As it stands; None if there is none."""
        return self.values.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            CheckpointError: anything else, or nothing without a ``default``.
        """
        found = self.values.get(key, default)
        if type(found) is not int or abs(found) > 1 << 30:
            raise self.wrong(key, "should be a whole number")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self.values.get(key, default)
        if type(found) is not bool:
            raise self.wrong(key, "should be true or false")
        return found

    def one_of(self, key: str, known: Sequence[T], default: T) -> T:
        """A value that is read here.

        Raises:
            UnsupportedModelError: it is not; the message lists what is.
        """
        found = self.values.get(key, default)
        for value in known:
            if type(value) is type(found) and value == found:
                return value
        names = ", ".join(str(value) for value in known if value is not None)
        raise UnsupportedModelError(
            f"{self.where}: {key} is {_short(found)}, of which localrt reads {names}; use the "
            "original model, or a GGUF file of it"
        )

    def inner(self, key: str) -> Keys | None:
        """The object of a key; None if there is none, or an empty one."""
        found = self.values.get(key)
        if not found:
            return None
        if not isinstance(found, Mapping):
            raise self.wrong(key, "should be an object")
        return Keys(found, f"{self.where}: {key[:80]}")

    def all_inner(self, key: str) -> Iterator[Keys]:
        """Every object in the object of a key."""
        outer = self.inner(key)
        for name in () if outer is None else outer.values:
            found = outer.inner(name) if outer is not None else None
            if found is not None:
                yield found

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two whole numbers of at least 1, as a list or like "128x128"; None if there are none."""
        found = self.values.get(key)
        if isinstance(found, str) and (match := _PAIR.fullmatch(found)):
            found = [int(match[1]), int(match[2])]
        if found is None:
            return None
        if isinstance(found, list) and len(found) == 2 and all(type(n) is int for n in found):
            first, second = found
            if 0 < first < 1 << 30 and 0 < second < 1 << 30:
                return first, second
        raise self.wrong(key, "should be two whole numbers of at least 1")

    def wrong(self, key: str, reason: str) -> CheckpointError:
        """The refusal of a malformed value."""
        found = self.values.get(key)
        return CheckpointError(f"{self.where}: {key} {reason}, is {_short(found)}")

    def unread(self, key: str, what: str) -> UnsupportedModelError:
        """The refusal of a scheme that is not read here."""
        return UnsupportedModelError(
            f"{self.where}: {key} asks for {what}, which localrt cannot read; use the original "
            "model, or a GGUF file of it"
        )


def weights_alone(kind: str, bits: int, input_bits: int) -> str:
    """The note on a scheme that quantizes activations too."""
    letters = "FP" if kind == "float" else "INT"
    return (
        f"published for {letters}{bits} weights and {input_bits}-bit activations "
        f"(W{bits}A{input_bits}): localrt runs it as weight-only"
    )


def _short(value: Any) -> str:
    """In one line of the message."""
    return repr(value)[:60]
