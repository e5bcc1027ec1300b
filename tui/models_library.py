"""The models that there are, as the models screen needs them, and the download of one.

A thin layer over the public API, with the budgets that the app was started with; a test puts
another in its place. Knows no widget.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.errors import LocalrtError

if TYPE_CHECKING:
    from localrt import FoundModel, LocalModel, Preview, Variant
    from localrt.progress import Progress, ProgressCallback

__all__ = ["Library", "Pull", "Room"]

_PREVIEWED = ("ram", "gpu_memory", "ctx", "kv_format", "device", "engine")


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that all models take, and that are free on their disk (None: not known)."""

    used: int
    free: int | None


class Library:
    """``options`` are those of ``localrt.load`` that the app was started with."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options or {}

    def models(self) -> list[LocalModel]:
        """Those on this machine."""
        import localrt

        return localrt.list_models()

    def uses(self) -> Mapping[str, float]:
        """When each was last loaded."""
        import localrt

        return localrt.uses()

    def room(self, models: list[LocalModel]) -> Room:
        """What they take."""
        import shutil

        used = sum(model.bytes for model in models)
        folder = models[0].path if models else Path.home()
        try:
            return Room(used, shutil.disk_usage(folder).free)
        except OSError:
            return Room(used, None)

    def preview(self, name: str) -> Preview:
        """What to expect of one that is here."""
        import localrt

        options = {
            key: self.options[key] for key in _PREVIEWED if self.options.get(key) is not None
        }
        return localrt.preview(name, **options)

    def preview_size(self, nbytes: int) -> Preview:
        """What to expect of one that is not here."""
        import localrt

        return localrt.preview_size(nbytes, ram=self.options.get("ram"))

    def search(self, words: str) -> list[FoundModel]:
        """Ask the hub."""
        import localrt

        return localrt.search_models(words)

    def variants(self, repo: str) -> list[Variant]:
        """Ask the hub what there is of one."""
        import localrt

        return localrt.list_variants(repo)

    def pull(self, name: str, progress: ProgressCallback, cancel: threading.Event) -> str:
        """Download; the name to load it by."""
        import localrt

        return localrt.pull(name, progress=progress, cancel=cancel).name

    def delete(self, name: str) -> int:
        """Delete; the bytes freed."""
        import localrt

        return localrt.remove_model(name)


class Pull:
    """A download in a thread: ``progress`` is the latest, ``done`` says that it ended.

    Then ``result`` is the name of the model, or ``error`` why there is none.
    """

    def __init__(self, library: Library, name: str) -> None:
        self.name = name
        self.progress: Progress | None = None
        self.result: str | None = None
        self.error: Exception | None = None
        self._library = library
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._run, name="localrt-pull", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.result is not None or self.error is not None

    def cancel(self) -> None:
        """Stop soon; what was downloaded is kept for the next time."""
        self._cancel.set()

    def _run(self) -> None:
        try:
            self.result = self._library.pull(self.name, self._step, self._cancel)
        except LocalrtError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the screen shows it
            self.error = error

    def _step(self, progress: Progress) -> None:
        self.progress = progress
