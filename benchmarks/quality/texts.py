"""What quality is measured on, and what quantizers calibrate on: disjoint by construction.

Prose is a file of passages: the first three quarters are for evaluation, the rest for calibration.
Code is this machine's own Python standard library: a hash of each file's name says on which side it
is. It knows neither models nor tokens.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrt.common.errors import OptionError

_PIECE = 8000  # characters of one source file: many files, so that no single style decides
_ENOUGH = 600_000  # characters of code on either side


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text to evaluate on and a disjoint one to calibrate on; ``source`` says what they are."""

    name: str
    evaluation: str
    calibration: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """What identifies it, without the texts."""
        return {
            "name": self.name,
            "source": self.source,
            "evaluation_sha256": _digest(self.evaluation),
            "calibration_sha256": _digest(self.calibration),
        }


def prose(path: Path) -> Corpus:
    """The passages of a UTF-8 file, which blank lines part.

    Raises:
        OptionError: fewer than four passages.
    """
    passages = [part for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    cut = len(passages) * 3 // 4
    if len(passages) < 4:
        raise OptionError(f"{path.name} has {len(passages)} passages between blank lines, not 4")
    source = f"{path.name}, passages 1-{cut} of {len(passages)}; calibration on the others"
    return Corpus("prose", "\n\n".join(passages[:cut]), "\n\n".join(passages[cut:]), source)


def python_source(folder: Path | None = None) -> Corpus:
    """Pieces from the middle of the standard library's modules, in the order of a hash of names."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: _digest(path.name))
    sides: tuple[list[str], list[str]] = ([], [])
    for path in files:
        side = sides[int(_digest(path.name)[:2], 16) % 2]
        if sum(map(len, side)) < _ENOUGH:
            side.append(_middle(path.read_text(encoding="utf-8", errors="replace")))
    if not all(sides):
        raise OptionError(f"{folder} holds too few Python files to evaluate and calibrate on")
    source = (
        f"standard library of Python {platform.python_version()}, pieces of {len(sides[0])} "
        f"modules; calibration on {len(sides[1])} others"
    )
    return Corpus("code", "\n".join(sides[0]), "\n".join(sides[1]), source)


def interleaved(parts: Sequence[Sequence[int]], *, total: int, length: int = 512) -> list[int]:
    """``total`` tokens or less: ``length`` of each part in turn, as long as all of them last.

    Raises:
        OptionError: a part is shorter than one stretch.
    """
    whole = min(len(part) for part in parts) // length
    if not whole:
        raise OptionError(f"the calibration text has fewer than {length} tokens")
    turns = [part[i * length : (i + 1) * length] for i in range(whole) for part in parts]
    return [token for turn in turns for token in turn][:total]


def _middle(text: str) -> str:
    """At most ``_PIECE`` characters, whole lines, beginning a quarter into the text."""
    start = text.find("\n", len(text) // 4) + 1
    piece = text[start : start + _PIECE]
    return piece[: piece.rfind("\n") + 1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
