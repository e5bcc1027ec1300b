"""The models that there are, as the models screen needs them, through the public API.

Plans with the budgets that the app was started with; a test puts another in its place.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import localrt

if TYPE_CHECKING:
    from localrt import FoundModel, LocalModel, Preview, Variant
    from localrt.progress import ProgressCallback

__all__ = ["Library"]

_PREVIEWED = ("ram", "gpu_memory", "ctx", "kv_format", "device", "engine")


class Library:
    """``options`` are those of ``localrt.load`` that the app was started with."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options or {}

    def models(self) -> list[LocalModel]:
        """Those on this machine."""
        return localrt.list_models()

    def uses(self) -> Mapping[str, float]:
        """When each was last loaded."""
        return localrt.uses()

    def free_bytes(self, models: list[LocalModel]) -> int | None:
        """Free space where models are kept; None: not known."""
        try:
            return shutil.disk_usage(models[0].path if models else Path.home()).free
        except OSError:
            return None

    def preview(self, name: str) -> Preview:
        """What to expect of one that is here."""
        given = {key: self.options.get(key) for key in _PREVIEWED}
        options: dict[str, Any] = {key: each for key, each in given.items() if each is not None}
        return localrt.preview(name, **options)

    def preview_size(self, nbytes: int) -> Preview:
        """What to expect of one that is not here."""
        return localrt.preview_size(nbytes, ram=self.options.get("ram"))

    def search(self, words: str) -> list[FoundModel]:
        """Ask the hub."""
        return localrt.search_models(words)

    def variants(self, repo: str) -> list[Variant]:
        """Ask the hub what there is of one."""
        return localrt.list_variants(repo)

    def pull(self, name: str, progress: ProgressCallback, cancel: threading.Event) -> str:
        """Download; the name to load it by."""
        return localrt.pull(name, progress=progress, cancel=cancel).name

    def delete(self, name: str) -> int:
        """Delete; the bytes freed."""
        return localrt.remove_model(name)
