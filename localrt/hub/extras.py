"""What another program's store keeps beside a model's weights: how it wants to be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Extras"]

# Ollama's name of an option, and ours.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Extras:
    """``params`` are Ollama's, ``go_template`` is a chat template of Go's text/template."""

    go_template: str | None = None
    system: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[Path, ...] = ()
    license: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Generation options by localrt's names; below zero Ollama means no limit, or no seed."""
        found: dict[str, Any] = {}
        for name, value in self.params.items():
            ours = _OPTIONS.get(name)
            if ours is None or (ours in ("max_tokens", "seed") and _is_below_zero(value)):
                continue
            found[ours] = [value] if ours == "stop" and isinstance(value, str) else value
        return found

    @property
    def ctx(self) -> int | None:
        """The context length, in tokens."""
        value = self.params.get("num_ctx")
        return value if isinstance(value, int) and value > 0 else None


def _is_below_zero(value: object) -> bool:
    return isinstance(value, int | float) and value < 0
