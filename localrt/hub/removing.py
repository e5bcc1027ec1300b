"""Deletes models: finds the files of a name, and checks that localrt may delete them.

localrt may delete from the hub's cache, although other tools share it. It never deletes files of
other programs or of the user: the error says what to do instead.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from localrt import system
from localrt.common.errors import ModelNotFoundError, OptionError, StorageError, reason_of
from localrt.common.files import is_there, remove_folder
from localrt.common.formatting import format_bytes, one_line
from localrt.common.settings import Settings
from localrt.hub.cache import CachedRepo, forget_use
from localrt.hub.files import choose_variant, gguf_variants
from localrt.hub.listing import (
    LocalModel,
    expand_name,
    list_models,
    models_named,
    models_of_repo,
    own_store,
)
from localrt.hub.names import DEMO_HUB, DEMO_NAME, HubRef, close_to, demo_cache_file, parse_hub_ref
from localrt.models.weight_files import MANIFEST_NAME, PARTIAL_NAME


@dataclass(frozen=True, slots=True)
class Removal:
    """What deleting ``name`` would delete: ``models``, ``bytes`` in all (none if only packed copies
    are deleted), and the packed copies in ``packed``. ``place`` is as in ``LocalModel``.
    """

    name: str
    models: tuple[str, ...]
    bytes: int
    packed: tuple[Path, ...]
    packed_bytes: int
    place: str


def plan_removal(name: str, settings: Settings, *, packed_only: bool = False) -> Removal:
    """Return what ``remove_model`` would delete.

    Raises:
        ModelNotFoundError: it is not on this machine, or has no packed copy.
        OptionError: the files are another program's, the user's, or an installed package's.
    """
    if not name.strip():
        raise OptionError("the name is empty: say which model, as `localrt list` names it")
    full = expand_name(name, settings)
    listed = list_models(settings)
    models = list(models_named(full, listed, settings, linked=packed_only))
    if not packed_only:
        _refuse_what_is_not_ours(name, full, models)
    if not models and (packed_only or not _is_begun(full, settings)):
        if not is_there(full):
            raise _not_here(name, listed)
        if not packed_only:
            raise OptionError(f"{full} belongs to you: delete it yourself")
    if packed_only and not any(model.packed for model in models):
        raise ModelNotFoundError(f"{name} has no packed copy (`localrt list` shows which have one)")
    gone = [] if packed_only else models
    return Removal(
        name,
        tuple(model.name for model in gone),
        sum(model.bytes for model in gone) - _counted_twice(gone, listed),
        tuple(path for model in models for path in model.packed),
        sum(model.packed_bytes for model in models),
        models[0].place if models else "localrt",
    )


def _counted_twice(gone: Sequence[LocalModel], listed: Sequence[LocalModel]) -> int:
    """Excess bytes of shared vision encoders: all but one count of each, or all if it stays."""
    kept = {model.projector for model in listed if model not in gone}
    encoders = Counter(model.projector for model in gone if model.projector is not None)
    return sum((n - (t not in kept)) * t.stat().st_size for t, n in encoders.items())


def remove_model(name: str, settings: Settings, *, packed_only: bool = False) -> int:
    """Delete a model's files and packed copies of it; returns the bytes this freed.

    ``org/name`` removes the repository with all its revisions; ``org/name:LABEL``, one GGUF
    variant; ``org/name@revision``, one revision; a path, one of localrt's own stores, finished or
    not. Bytes that another model shares are kept. ``packed_only`` deletes only packed copies, and
    works for any owner's model.

    Raises:
        ModelNotFoundError: it is not on this machine, or has no packed copy.
        OptionError: the files are another program's, the user's, or an installed package's.
        StorageError: a file cannot be deleted.
    """
    removal = plan_removal(name, settings, packed_only=packed_only)
    try:
        freed = 0 if packed_only else _remove(name, removal, settings)
        freed += sum(_remove_folder(path) for path in removal.packed if path.is_dir())
    except OSError as error:
        raise StorageError(f"cannot delete {error.filename or name}: {reason_of(error)}") from error
    if not packed_only:
        for each in {name, *removal.models}:
            forget_use(each, settings)
    return freed


def _remove(name: str, removal: Removal, settings: Settings) -> int:
    full = expand_name(name, settings)
    if (store := own_store(full, settings)) is not None:
        return _remove_folder(store)
    if full == DEMO_NAME:
        cached = demo_cache_file(settings)
        if cached.is_file():
            return _remove_file(cached)
        full = str(DEMO_HUB)
    elif removal.place == "hub cache" and parse_hub_ref(full) is None:  # a path into the cache
        full = removal.models[0]
    ref = parse_hub_ref(full)
    repo = None if ref is None else CachedRepo(settings.hub_cache, ref.repo)
    if ref is None or repo is None or not repo.folder.is_dir():
        raise _not_here(name, list_models(settings))
    if ref.revision is None and ref.variant is None:
        return _remove_repo(repo)
    return _remove_part(repo, ref)


def _not_here(name: str, listed: Iterable[LocalModel]) -> ModelNotFoundError:
    close = " or ".join(close_to(name, [model.name for model in listed]))
    hint = f": did you mean {close}?" if close else " (see `localrt list`)"
    return ModelNotFoundError(f"{one_line(name)} is not on this machine{hint}")


def _is_begun(full: str, settings: Settings) -> bool:
    """Whether an unfinished store or download of the model is on this machine."""
    ref = DEMO_HUB if full == DEMO_NAME else parse_hub_ref(full)
    in_cache = ref is not None and CachedRepo(settings.hub_cache, ref.repo).folder.is_dir()
    return in_cache or own_store(full, settings) is not None


def _refuse_what_is_not_ours(name: str, full: str, models: Sequence[LocalModel]) -> None:
    others = [model for model in models if model.how_to_delete]
    if others:
        model = others[0]
        owner = {"yours": "you", "package": "an installed package"}.get(model.place, model.place)
        copy = (
            f"; localrt's packed copy of it, {format_bytes(model.packed_bytes)}, goes with "
            f"`localrt rm --packed {system.quote(name)}`"
        )
        raise OptionError(
            f"{model.name} belongs to {owner}: {model.how_to_delete}{copy if model.packed else ''}"
        )


def _remove_folder(folder: Path) -> int:
    freed = _own_bytes(folder.rglob("*"))
    remove_folder(folder, last=(MANIFEST_NAME, PARTIAL_NAME))
    return freed


def _own_bytes(paths: Iterable[Path]) -> int:
    """Return the size of the regular files among ``paths`` that have no other name."""
    files = (path.stat() for path in paths if path.is_file() and not path.is_symlink())
    return sum(status.st_size for status in files if status.st_nlink == 1)


def _identity(path: Path) -> tuple[int, int]:
    """Identifies a file: it is equal for every link to it."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _remove_file(file: Path) -> int:
    freed = file.stat().st_size
    file.unlink()
    return freed


def _remove_repo(repo: CachedRepo) -> int:
    freed = _own_bytes(repo.paths())
    freed += sum(_remove_blob(repo, blob) for blob in list(repo.folder.glob("blobs/*")))
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
    removed = {_identity(pointer) for pointer in pointers}
    there = (blob for blob in repo.folder.glob("blobs/*") if blob.exists())
    blobs = [blob for blob in there if _identity(blob) in removed]
    for pointer in pointers:
        pointer.unlink()
    for commit in repo.commits():
        if not repo.files(commit):
            shutil.rmtree(repo.snapshot(commit))
            for name in [name for name, at in repo.refs().items() if at == commit]:
                (repo.folder / "refs" / name).unlink()
    used = {_identity(path) for path in repo.paths()}
    freed += sum(_remove_blob(repo, blob) for blob in blobs if _identity(blob) not in used)
    return freed if any(models_of_repo(repo)) else freed + _remove_repo(repo)


def _remove_blob(repo: CachedRepo, blob: Path) -> int:
    """Delete a blob; return the bytes freed, 0 while other repositories share them.

    From version 2 on, huggingface_hub may store the bytes once and make each blob a link to them.
    """
    target = blob.resolve()
    freed = target.stat().st_size if target.exists() else 0
    shared = blob.is_symlink()
    blob.unlink()
    if not shared:
        return freed
    if any(entry.resolve() == target for entry in repo.cache.glob("*--*/blobs/*")):
        return 0
    target.unlink(missing_ok=True)
    target.with_name(f"{target.name}.refs").unlink(missing_ok=True)
    return freed
