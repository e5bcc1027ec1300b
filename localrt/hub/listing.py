"""What is on this machine, and making room: the list of models, their last use, removing one.

Walks the folders with ``os.scandir``: the answer is there in milliseconds, without huggingface_hub.
Knows files, not what is in them, but for the format that a store's manifest names.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from localrt.errors import ModelNotFoundError, OptionError, StorageError
from localrt.files import private_folder
from localrt.hub.cache import CachedRepo
from localrt.hub.demo import DEMO_NAME, DEMO_PACKAGE, demo_cache_file, demo_in_package
from localrt.hub.files import (
    choose_variant,
    gguf_variants,
    quantization_label,
    variant_name,
)
from localrt.hub.names import HubRef, parse_hub_ref
from localrt.settings import Settings

__all__ = [
    "LocalModel",
    "forget_use",
    "last_used",
    "list_models",
    "note_use",
    "remove_model",
]

# As models/checkpoints/store_manifest.py has them: importing it would take numpy, and time.
_MANIFEST = "manifest.json"
_PARTIAL_MANIFEST = "manifest.partial.json"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that ``resolve(name)`` finds without the network.

    ``bytes`` counts its files, ``kind`` is ``"gguf"``, ``"safetensors"`` or ``"store"``,
    ``modified`` is in POSIX seconds. A store's name is its path.
    """

    name: str
    path: Path
    bytes: int
    kind: str
    quantization: str | None
    modified: float


def list_models(settings: Settings) -> list[LocalModel]:
    """Every model in the package, in localrt's folders and in the hub's cache, by name."""
    models = []
    demo = demo_in_package() or demo_cache_file(settings)
    if demo.is_file():
        models.append(_local(DEMO_NAME, demo, [demo], "gguf", quantization_label(demo.stem)))
    for repo in CachedRepo.all_in(settings.hub_cache):
        models += _models_of(repo)
    models += _stores(settings)
    return sorted(models, key=lambda model: (model.name != DEMO_NAME, model.name.lower()))


def remove_model(name: str, settings: Settings) -> int:
    """Delete a model's files; returns the bytes this freed.

    ``org/name`` removes the repository with all its revisions, ``org/name:LABEL`` one GGUF
    variant, ``org/name@revision`` one revision, a path one of localrt's own stores, finished or
    not. Bytes that another model shares stay.

    Raises:
        ModelNotFoundError: it is not in a cache of this machine.
        OptionError: it is a file of the user's own, or the installed demo package.
        StorageError: a file cannot be deleted.
    """
    try:
        if name == DEMO_NAME:
            return _remove_demo(settings)
        if (store := _own_store(name, settings)) is not None:
            return _remove_folder(store)
        ref = parse_hub_ref(name)
        if ref is None:
            raise OptionError(f"{name} is not a downloaded model: delete such files yourself")
        repo = CachedRepo(settings.hub_cache, ref.repo)
        if not repo.folder.is_dir():
            raise ModelNotFoundError(f"{name} is not on this machine (see `localrt list`)")
        if ref.revision is None and ref.variant is None:
            return _remove_repo(repo)
        return _remove_part(repo, ref)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot delete {error.filename or name}: {reason}") from error


def _models_of(repo: CachedRepo) -> Iterator[LocalModel]:
    refs = repo.refs()
    for commit in repo.commits():
        files = repo.files(commit)
        snapshot = repo.snapshot(commit)
        name = f"{repo.repo}{_revision_suffix(refs, commit)}"
        if repo.has_safetensors(commit, files):
            others = [snapshot / file for file in files if not file.lower().endswith(".gguf")]
            yield _local(name, snapshot, others, "safetensors", None)
        variants = [variant for variant in gguf_variants(files) if variant.complete]
        for variant in variants:
            paths = [snapshot / file for file in variant.files]
            full_name = f"{name}:{variant_name(variant, variants)}"
            label = variant.label if variant.is_labelled else None
            yield _local(full_name, paths[0], paths, "gguf", label)


def _stores(settings: Settings) -> Iterator[LocalModel]:
    """What ``localrt quantize`` wrote without ``--out``."""
    for folder in _entries(settings.data_dir / "stores"):
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            files = [path for path in folder.rglob("*") if path.is_file()]
            yield _local(_shown(folder), folder, files, "store", str(manifest["format"]))
        except (OSError, ValueError, LookupError, TypeError):
            continue  # unfinished, or not a store


def _own_store(name: str, settings: Settings) -> Path | None:
    """The folder that ``name`` is the path of, if it is one of localrt's own stores."""
    path = Path(os.path.expanduser(name)).absolute()  # noqa: PTH111  Path's own fails on "~nobody"
    manifests = (_MANIFEST, _PARTIAL_MANIFEST)
    if path.parent != settings.data_dir / "stores" or not any(
        (path / m).is_file() for m in manifests
    ):
        return None
    return path


def _shown(path: Path) -> str:
    """``path`` below ``~`` where it lies there: ``resolve`` takes both."""
    home = Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else str(path)


def _remove_folder(folder: Path) -> int:
    freed = _own_bytes(folder.rglob("*"))
    shutil.rmtree(folder)
    return freed


def _own_bytes(paths: Iterable[Path]) -> int:
    """Bytes of the files among ``paths``; those of a link are another's."""
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def _revision_suffix(refs: dict[str, str], commit: str) -> str:
    if refs.get("main") == commit:
        return ""
    names = sorted(ref for ref, target in refs.items() if target == commit)
    return f"@{names[0] if names else commit[:12]}"


def _local(
    name: str, path: Path, files: Iterable[Path], kind: str, quantization: str | None
) -> LocalModel:
    stats = [file.stat() for file in files]
    size, modified = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
    return LocalModel(name, path, size, kind, quantization, modified)


def _remove_demo(settings: Settings) -> int:
    cached = demo_cache_file(settings)
    if cached.is_file():
        freed = cached.stat().st_size
        cached.unlink()
        return freed
    if demo_in_package() is not None:
        raise OptionError(
            f"{DEMO_NAME} belongs to an installed package: `pip uninstall {DEMO_PACKAGE}`"
        )
    raise ModelNotFoundError(f"{DEMO_NAME} is not on this machine (see `localrt list`)")


def _remove_repo(repo: CachedRepo) -> int:
    freed = sum(_remove_blob(repo, blob) for blob in _entries(repo.folder / "blobs"))
    # Where links cannot be made, a snapshot holds the bytes themselves.
    freed += _own_bytes(repo.paths())
    shutil.rmtree(repo.folder)
    shutil.rmtree(repo.lock("").parent, ignore_errors=True)
    return freed


def _remove_part(repo: CachedRepo, ref: HubRef) -> int:
    commits = repo.commits() if ref.revision is None else [repo.commit_of(ref.revision)]
    pointers: list[Path] = []
    for commit in filter(None, commits):
        files: Sequence[str] = repo.files(commit)
        if ref.variant is not None:
            try:
                files = choose_variant(gguf_variants(files), ref.variant, ref.repo).files
            except ModelNotFoundError:
                continue
        pointers += [repo.snapshot(commit) / file for file in files]
    if not pointers:
        raise ModelNotFoundError(f"{ref} is not on this machine (see `localrt list`)")
    freed = _own_bytes(pointers)
    blobs = {repo.blob(pointer.readlink().name) for pointer in pointers if pointer.is_symlink()}
    for pointer in pointers:
        pointer.unlink()
    for commit in repo.commits():
        if not repo.files(commit):
            shutil.rmtree(repo.snapshot(commit))
    used = {path.resolve() for path in repo.paths()}
    freed += sum(_remove_blob(repo, blob) for blob in blobs if blob.resolve() not in used)
    return freed if any(_models_of(repo)) else freed + _remove_repo(repo)


def _remove_blob(repo: CachedRepo, blob: Path) -> int:
    """Delete a blob; returns the bytes freed: none while other repositories share them.

    Since version 2 huggingface_hub may keep bytes once for all repositories, a blob being a link.
    """
    target = blob.resolve()
    freed = target.stat().st_size if target.exists() else 0
    shared = blob.is_symlink()
    blob.unlink()
    if not shared:
        return freed
    for other in CachedRepo.all_in(repo.cache):
        if any(entry.resolve() == target for entry in _entries(other.folder / "blobs")):
            return 0
    target.unlink(missing_ok=True)
    target.with_name(f"{target.name}.refs").unlink(missing_ok=True)
    return freed


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


# -- use -----------------------------------------------------------------------------------------

# When each model was last loaded: the time of an empty file for each name, so that no two processes
# meet. A folder that cannot be written keeps nothing, silently.


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
