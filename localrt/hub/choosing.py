"""A repository with several GGUF files offers them, and who knows the machine chooses one.

The hub knows names and sizes; how fast each would be is the planner's matter
(``planning/recommending.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Chooser", "Offer"]


@dataclass(frozen=True, slots=True)
class Offer:
    """``sizes`` are bytes by quantization (or file name). ``config`` is the model's published one,
    None where it is not known; ``here`` says that the files are on this machine.
    """

    repo: str
    sizes: Mapping[str, int]
    config: Mapping[str, Any] | None = None
    here: bool = False


Chooser: TypeAlias = Callable[[Offer], str]
"""Takes one of ``sizes``."""
