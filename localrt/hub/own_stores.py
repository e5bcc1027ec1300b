"""localrt's own folders of packed weights: copies that streaming reads, and quantized models.

A packed copy belongs to the model that it was made from; it is made again when it is missing. A
quantized model is one of its own, whose name is its folder's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from localrt.common.files import private_folder
from localrt.common.settings import Settings

# As models/checkpoints/store/manifest.py has them: importing it would take numpy, and time.
_MANIFEST, _PARTIAL = "manifest.json", "manifest.partial.json"


@dataclass(frozen=True, slots=True)
class OwnStore:
    """``source`` is the file or folder name of what was packed, ``origin`` where that lay, if the
    store says it. ``quantized``: a model of its own, no mere copy. ``finished``: all of it is here.
    """

    path: Path
    format: str
    source: str
    origin: Path | None
    quantized: bool
    finished: bool

    @property
    def files(self) -> list[Path]:
        """What it is made of."""
        return [path for path in self.path.rglob("*") if path.is_file()]

    @property
    def bytes(self) -> int:
        """On the disk."""
        return sum(path.stat().st_size for path in self.files)


def own_stores(settings: Settings) -> Iterator[OwnStore]:
    """Those in the data folder, finished or not."""
    folder = settings.data_dir / "stores"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        store = read_store(path) or _read(path, _PARTIAL)
        if store is not None:
            yield store


def read_store(path: Path) -> OwnStore | None:
    """What the manifest in this folder says; None where there is no finished store."""
    return _read(path, _MANIFEST)


def _read(path: Path, manifest: str) -> OwnStore | None:
    try:
        values = json.loads((path / manifest).read_text(encoding="utf-8"))
        source, origin = values["source"], values["source"].get("path")
        return OwnStore(
            path,
            str(values["format"]),
            source=str(source["name"]),
            origin=None if origin is None else Path(origin),
            quantized=values.get("quantization") is not None,
            finished=manifest == _MANIFEST,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def find_quantized(name: str, settings: Settings) -> Path | None:
    """The quantized model whose folder is called so."""
    folder = settings.data_dir / "stores" / name
    inside = "/" not in name and "\\" not in name and name not in ("", ".", "..")
    # os.path's is False for a name too long for the file system
    return folder if inside and os.path.isfile(folder / _MANIFEST) else None  # noqa: PTH113


def is_own_store(path: Path, settings: Settings) -> bool:
    """Whether this is a folder of localrt's data folder with a store, finished or not."""
    return path.parent == settings.data_dir / "stores" and any(
        (path / name).is_file() for name in (_MANIFEST, _PARTIAL)
    )


# -- when models were last used --------------------------------------------------------------------


def note_use(name: str, settings: Settings) -> None:
    """A model of this name is used now."""
    with suppress(OSError):
        file = _use_file(name, settings)
        private_folder(file.parent)
        file.touch(mode=0o600)


def forget_use(name: str, settings: Settings) -> None:
    """There is no such model any more."""
    with suppress(OSError):
        _use_file(name, settings).unlink(missing_ok=True)


def last_used(settings: Settings) -> dict[str, float]:
    """Seconds since the epoch, by name."""
    try:
        files = (settings.data_dir / "used").iterdir()
        return {unquote(file.name): file.stat().st_mtime for file in files}
    except OSError:
        return {}


def _use_file(name: str, settings: Settings) -> Path:
    return settings.data_dir / "used" / quote(name, safe="")[:250]
