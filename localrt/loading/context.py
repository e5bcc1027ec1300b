"""What loading a model needs besides its options, from the public API down to the packed form."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.common.errors import CancelledError
from localrt.common.progress import Progress, ProgressCallback
from localrt.common.settings import Settings
from localrt.hub import ResolvedModel, resolve, resolve_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """``settings`` say where files are kept. ``offline``: never use the network; None follows the
    environment. ``progress`` is called with every step, and setting ``cancel`` ends loading.
    ``notes`` collects lines for the user about one model.
    """

    settings: Settings = field(default_factory=Settings.from_environment)
    offline: bool | None = None
    progress: ProgressCallback | None = None
    cancel: threading.Event | None = None
    notes: list[str] = field(default_factory=list)

    def resolve(self, name: str, **options: Any) -> ResolvedModel:
        """Find the model ``name``; see ``hub.resolve``."""
        return resolve(name, **self._for_hub(), **options)

    def resolve_adapter(self, name: str) -> Path:
        """Find the adapter ``name``."""
        return resolve_adapter(name, **self._for_hub())

    def _for_hub(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "offline": self.offline,
            "progress": self.progress,
            "cancel": self.cancel,
        }

    def report(self, stage: str, done: int, total: int, unit: str, detail: str = "") -> None:
        """Report progress, if anybody listens."""
        if self.progress is not None:
            self.progress(Progress(stage, done, total, unit, detail))

    def check(self) -> None:
        """Raise CancelledError once loading is cancelled."""
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError("loading was cancelled")

    def byte_counter(self, total: int) -> Callable[[int], None]:
        """Return a function that reports loaded bytes out of ``total``, and ``check``s."""
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.check()
            self.report("load", done, total, "bytes")

        return count
