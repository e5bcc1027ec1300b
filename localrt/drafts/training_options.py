"""The options of a draft head's training, its progress, and the folder that belongs to it.

Options, text and target are written down when a training begins, and compared when it continues.
Nothing here knows models or torch.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from localrt.errors import CancelledError, OptionError, StorageError
from localrt.files import write_text
from localrt.models.config import DecoderConfig
from localrt.progress import Progress, ProgressCallback
from localrt.speculative.draft_head_file import MOST_BLOCKS

__all__ = ["DraftTraining", "Reporter", "claim"]

_BOUNDS = {
    "generate": (0, 1 << 40),
    "tokens": (1, 1 << 40),
    "depth": (1, MOST_BLOCKS),
    "vocab": (2, 1 << 20),
    "length": (16, 1 << 16),
    "batch": (1, 4096),
    "seed": (0, (1 << 63) - 1),
    "threads": (1, 1 << 16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraining:
    """The options of a training.

    ``generate`` tokens are written by the target; 0 learns from the given text as it is.
    ``tokens`` are learnt from in all, the same ones again if need be; None is three times what was
    written. ``depth`` is the number of blocks, ``vocab`` the most tokens that are guessed,
    ``length`` the tokens of a sequence and how far the head's attention sees. ``device`` is
    ``"cpu"`` or ``"cuda"``.

    Raises:
        OptionError: a number out of bounds, with its bounds.
    """

    generate: int = 500_000
    tokens: int | None = None
    depth: int = 1
    vocab: int = 8192
    length: int = 384
    batch: int = 4
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OptionError(f"{name} must be from {low} to {high}, is {value}")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise OptionError(f"device must be cpu or cuda, is {self.device!r}")


class Reporter:
    """Progress out, cancelling in."""

    def __init__(self, progress: ProgressCallback | None, cancel: threading.Event | None) -> None:
        self.progress = progress
        self.cancel = cancel

    def check(self) -> None:
        """Raise ``CancelledError`` once it was asked for."""
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError("the training was cancelled; the same command continues it")

    def show(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` tokens of a stage."""
        if self.progress is not None:
            self.progress(Progress(stage, done, total, "tokens", detail))


def claim(work: Path, training: DraftTraining, text: str | None, decoder: DecoderConfig) -> None:
    """Begin in the folder ``work``, or make sure that what lies there is the same training.

    Raises:
        OptionError: it is another one.
        StorageError: it cannot be written.
    """
    file = work / "settings.json"
    options = asdict(training)
    del options["device"], options["threads"]  # it may continue elsewhere
    sizes = ("architecture", "layers", "hidden_size", "vocab_size")
    settings = {
        "options": options,
        "text": hashlib.sha256((text or "").encode()).hexdigest(),
        "target": {name: getattr(decoder, name) for name in sizes},
    }
    record = json.dumps(settings, indent=1, sort_keys=True)
    try:
        if not file.exists():
            work.mkdir(parents=True, exist_ok=True)
            write_text(file, record)
        elif file.read_text(encoding="utf-8") != record:
            raise OptionError(
                f"{work.parent} holds a training with other options or another text: give the "
                "same ones to continue it, or another --out"
            )
    except OSError as error:
        raise StorageError(f"{file}: {error.strerror or error}") from error
