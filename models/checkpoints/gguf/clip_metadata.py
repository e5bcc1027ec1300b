"""Checked metadata values of ``mmproj`` GGUF files."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.gguf.metadata import GgufMetadata

_COLOURS = 3
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class ClipMetadata:
    """Checked metadata values under ``clip.``."""

    pairs: GgufMetadata

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST
    ) -> int:
        """An integer."""
        value = self.pairs.integer(f"clip.{key}")
        value = default if value is None else value
        if value is None or not least <= value <= most:
            raise self.error(key, f"is {value}, not from {least} to {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0, in its shortest decimal form."""
        value = self.pairs.number(f"clip.{key}")
        value = default if value is None else value
        if not 0 < value < 1e9:
            raise self.error(key, f"is {value}, not a number above 0")
        return _decimal(value)

    def colours(self, key: str) -> list[float]:
        """One number per colour."""
        values = self.pairs.numbers(f"clip.{key}")
        numbers = [] if values is None else [_decimal(value) for value in values[: 2 * _COLOURS]]
        if len(numbers) != _COLOURS or not all(map(math.isfinite, numbers)):
            raise self.error(key, f"is {numbers}, not {_COLOURS} numbers")
        return numbers

    def flags(self, key: str) -> list[int]:
        """The indices of true values in an array of booleans."""
        values = self.pairs.numbers(f"clip.{key}")
        return [] if values is None else np.flatnonzero(values).tolist()

    def error(self, key: str, reason: str) -> CheckpointError:
        """An error about a value."""
        return CheckpointError(f"{self.pairs.path}: metadata key 'clip.{key}' {reason}")

    def activation(self) -> str:
        """transformers' name of the blocks' activation."""
        if self.pairs.flag("clip.use_silu"):
            return "silu"
        return "gelu_pytorch_tanh" if self.pairs.flag("clip.use_gelu") else "quick_gelu"


def _decimal(value: float) -> float:
    """The shortest decimal of a float32, which is the published value."""
    return float(str(np.float32(value)))
