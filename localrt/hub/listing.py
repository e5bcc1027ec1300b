"""Lists and deletes the models on this machine: localrt's, the hub's, other programs', the user's.

It walks the folders, which takes milliseconds and needs no huggingface_hub. It looks at file names
and sizes, and opens only the manifests of stores. localrt may delete from the hub's cache, although
other tools share it. It never deletes files of other programs or of the user: the error says what
to do instead.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from localrt import system
from localrt.common.errors import (
    LocalrtError,
    ModelNotFoundError,
    OptionError,
    StorageError,
    reason_of,
)
from localrt.common.files import is_there, remove_folder, user_path
from localrt.common.formatting import format_bytes, one_line
from localrt.common.settings import Settings
from localrt.hub.cache import (
    CachedRepo,
    OwnStore,
    find_quantized,
    forget_use,
    is_own_store,
    last_used,
    own_stores,
    read_store,
)
from localrt.hub.files import (
    choose_variant,
    gguf_variants,
    models_among,
    quantization_label,
    variant_name,
    variant_projectors,
)
from localrt.hub.names import (
    DEMO_HUB,
    DEMO_NAME,
    DEMO_PACKAGE,
    HubRef,
    client_name,
    close_to,
    demo_cache_file,
    demo_in_package,
    expand_alias,
    find_known,
    looks_like_path,
    parse_hub_ref,
    read_aliases,
    shown_path,
)
from localrt.hub.other_programs import OtherModel, find_other_model, other_models
from localrt.models.weight_files import MANIFEST_NAME, PARTIAL_NAME


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that ``resolve(name)`` finds without the network.

    ``bytes`` is the size of its files; ``kind`` is ``"gguf"``, ``"safetensors"`` or ``"store"``
    (packed by localrt); ``modified`` is in POSIX seconds. ``place`` says who owns the files:
    ``"localrt"``, ``"hub cache"``, ``"Ollama"``, ``"LM Studio"``, ``"llama.cpp"``, ``"package"`` or
    ``"yours"``. ``packed`` are folders with packed copies that localrt streams from, finished or
    not; ``packed_bytes`` is their size. ``aliases`` are the user's names for it (``config.toml``).
    ``projector`` is the vision encoder's file of a GGUF model in the hub's cache; ``bytes`` include
    it.
    """

    name: str
    path: Path
    bytes: int
    kind: str
    quantization: str | None
    modified: float
    place: str = "localrt"
    packed: tuple[Path, ...] = ()
    packed_bytes: int = 0
    aliases: tuple[str, ...] = ()
    projector: Path | None = None

    @property
    def how_to_delete(self) -> str:
        """How to delete files that localrt does not delete; empty if localrt can delete them."""
        return {
            "Ollama": f"run `ollama rm {self.name.removeprefix('ollama:')}`",
            "LM Studio": "delete it in LM Studio, under My Models",
            "llama.cpp": f"delete {shown_path(self.path)}",
            "package": f"run `pip uninstall {DEMO_PACKAGE}`",
            "yours": "delete it yourself",
        }.get(self.place, "")

    @property
    def where(self) -> str:
        """Who owns the files, in words."""
        if self.place == "yours":
            return "your file" if self.path.is_file() else "your folder"
        if self.place == "package":
            return "installed package"
        if self.place == "localrt" and self.kind == "store" and "/" in self.name:
            return "packed copy of a model that is gone"
        return self.place


def list_models(settings: Settings) -> list[LocalModel]:
    """Return every model that localrt finds on this machine, by name; the demo comes first."""
    models = []
    demo = demo_in_package()
    place = "package" if demo else "localrt"
    demo = demo or demo_cache_file(settings)
    if demo.is_file():
        label = quantization_label(demo.stem)
        models.append(_local(DEMO_NAME, demo, [demo], "gguf", label, place))
    for repo in CachedRepo.all_in(settings.hub_cache):
        models += models_of_repo(repo)
    models += _of_other_programs(settings)
    stores = list(own_stores(settings))
    quantized = [store for store in stores if store.quantized and store.finished]
    models += [_of_store(store, store.path.name) for store in quantized]
    copies = [store for store in stores if not store.quantized]
    models += _used_files(settings, copies, {_identity(model.path) for model in models})
    models = _with_packed(models, copies)
    models = _with_aliases(models, settings)
    return sorted(models, key=lambda model: (model.name != DEMO_NAME, model.name.lower()))


def models_named(
    name: str, models: Iterable[LocalModel], settings: Settings, *, linked: bool = False
) -> Iterator[LocalModel]:
    """Yield those of ``models`` that an expanded name refers to; ``org/name`` may match several.

    ``linked``: a path also matches a model that is a link to the same file.
    """
    store = own_store(name, settings)
    path = store or _expanded(name)
    file = _identity(path)
    ref = None if store else parse_hub_ref(name)
    for model in models:
        if ref is not None and ref.variant is None and model.place == "hub cache":
            own = model.name.partition(":")[0]
            if (own if ref.revision else own.partition("@")[0]) == name:
                yield model
        elif (
            model.path == path
            or (store is None and model.name.lower() == name.lower())
            or (linked and _identity(model.path) == file)
        ):
            yield model


def own_store(name: str, settings: Settings) -> Path | None:
    """Return localrt's own store at this path or with this name, finished or not."""
    path = _expanded(name)
    return path if is_own_store(path, settings) else find_quantized(name, settings)


def models_of_repo(repo: CachedRepo) -> Iterator[LocalModel]:
    """Yield the models of a repository that are complete in the hub's cache."""
    refs = repo.refs()
    for commit in repo.commits():
        files = repo.files(commit)
        snapshot = repo.snapshot(commit)
        name = f"{repo.repo}{_revision_suffix(refs, commit)}"
        if repo.has_safetensors(commit, files):
            others = [snapshot / file for file in files if not file.lower().endswith(".gguf")]
            yield _local(name, snapshot, others, "safetensors", None, "hub cache")
        variants = gguf_variants(files)
        for variant in variants:
            paths = [snapshot / file for file in variant.files]
            full_name = f"{name}:{variant_name(variant, variants)}"
            label = variant.label if variant.is_labelled else None
            encoder = next(iter(variant_projectors(variant, files)), "")
            own = [*paths, snapshot / encoder] if encoder else paths
            found = _local(full_name, paths[0], own, "gguf", label, "hub cache")
            yield replace(found, projector=snapshot / encoder if encoder else None)


def _of_other_programs(settings: Settings) -> Iterator[LocalModel]:
    for m in other_models(settings):
        with suppress(OSError):  # deleted in the meantime
            yield LocalModel(
                m.name, m.path, m.bytes, m.kind, m.quantization, m.path.stat().st_mtime, m.title
            )


def _used_files(
    settings: Settings, copies: Iterable[OwnStore], known: set[object]
) -> Iterator[LocalModel]:
    """Yield the user's own files and folders that were run before (latest first) or packed. Skips
    links to files in ``known``.
    """
    used = last_used(settings)
    packed = [shown_path(store.origin) for store in copies if store.origin is not None]
    for name in (*sorted(used, key=lambda each: -used[each]), *packed):
        path = user_path(name)
        with suppress(OSError, ValueError):
            identity = _identity(path)
            if not path.is_absolute() or identity in known:
                continue
            known.add(identity)
            if path.is_file():
                variants = gguf_variants(each.name for each in path.parent.iterdir())
                own = [v.files for v in variants if path.name == v.files[0]] or [(path.name,)]
                files = [path.parent / each for each in own[0]]
                yield _local(name, path, files, "gguf", quantization_label(path.stem), "yours")
            elif (store := read_store(path)) is not None:
                yield replace(_of_store(store, name), place="yours")
            elif path.is_dir():
                files = [each for each in path.iterdir() if each.is_file()]
                gguf = any(each.suffix.lower() == ".gguf" for each in files)
                whole = any(each.suffix == ".safetensors" for each in files)
                kind = "gguf" if gguf and not whole else "safetensors"
                yield _local(name, path, files, kind, None, "yours")


def _of_store(store: OwnStore, name: str) -> LocalModel:
    return _local(name, store.path, store.files, "store", store.format, "localrt")


def _with_packed(models: list[LocalModel], copies: list[OwnStore]) -> list[LocalModel]:
    """Add each packed copy to its model; a finished copy whose model is gone is listed alone."""
    gone = []
    for store in copies:
        place = _place_of_source(store, models)
        if place is not None:
            model = models[place]
            packed, total = (*model.packed, store.path), model.packed_bytes + store.bytes
            models[place] = replace(model, packed=packed, packed_bytes=total)
        elif store.finished:
            gone.append(_of_store(store, shown_path(store.path)))
    return [*models, *gone]


def _place_of_source(store: OwnStore, models: list[LocalModel]) -> int | None:
    """Return the index of the model that was packed, or of another link to its file. If neither is
    listed, return the first model with the same file name.
    """
    paths = [model.path for model in models]
    if store.origin in paths:
        return paths.index(store.origin)
    files = [_identity(path) for path in paths]
    if store.origin is not None and (file := _identity(store.origin)) in files:
        return files.index(file)
    return next((i for i, path in enumerate(paths) if path.name == store.source), None)


def _with_aliases(models: list[LocalModel], settings: Settings) -> list[LocalModel]:
    """Add the user's names that mean one model only. An invalid name is reported when used."""
    found: dict[str, list[str]] = {}
    with suppress(LocalrtError):
        for alias in sorted(read_aliases(settings)):
            named = list(models_named(expand_name(alias, settings), models, settings))
            if len(named) == 1:
                found.setdefault(named[0].name, []).append(alias)
    return [replace(model, aliases=tuple(found.get(model.name, ()))) for model in models]


def _identity(path: Path) -> object:
    """Return a key that is equal for all links to a file, hard or soft."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return path
    return stat.st_dev, stat.st_ino


def _expanded(name: str) -> Path:
    return user_path(name).absolute()


def _revision_suffix(refs: dict[str, str], commit: str) -> str:
    if refs.get("main") == commit:
        return ""
    names = sorted(ref for ref, target in refs.items() if target == commit)
    return f"@{names[0] if names else commit[:12]}"


def _local(
    name: str, path: Path, files: Iterable[Path], kind: str, quantization: str | None, place: str
) -> LocalModel:
    stats = [file.stat() for file in files]
    size, modified = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
    return LocalModel(name, path, size, kind, quantization, modified, place)


# -- short names -----------------------------------------------------------------------------------


def expand_name(model: str, settings: Settings) -> str:
    """Return what a short name or one of the user's names stands for; other names unchanged.

    Raises:
        OptionError, StorageError: the user's own names cannot be read.
    """
    model = expand_alias(model, settings)
    if model == DEMO_NAME or is_there(model):
        return model
    found = place_of(model, settings)
    return found.name if isinstance(found, OtherModel) else str(found or model)


def may_be_a_name(model: str, settings: Settings) -> bool:
    """Whether ``model`` can be a model: a local, known or hub model, or a path."""
    name = expand_name(model, settings)
    if name == DEMO_NAME or looks_like_path(name) or parse_hub_ref(name) is not None:
        return True
    return name != model or is_there(name) or find_quantized(name, settings) is not None


def place_of(model: str, settings: Settings) -> OtherModel | HubRef | None:
    """Look up a short name in the hub's cache, then in other programs' stores, then on the hub."""
    if "/" in model and ":" not in model.partition("/")[0]:  # org/name, or a path
        return None
    known = find_known(model)
    ref = None if known is None else HubRef(known.repo)
    if ref is not None and variants_here(settings.hub_cache, ref):
        return ref
    other = find_other_model(model, settings)
    if other is None and known is not None:  # a family's name means its first model
        other = find_other_model(known.name, settings)
    return other or ref


def variants_here(cache: Path, ref: HubRef) -> dict[str, int]:
    """Map each GGUF variant of a repository that is complete in the cache to its bytes."""
    repo = CachedRepo(cache, ref.repo)
    commit = repo.commit_of(ref.revision)
    if commit is None:
        return {}
    snapshot = repo.snapshot(commit)
    variants = gguf_variants(repo.files(commit))
    return {
        variant_name(each, variants): sum((snapshot / name).stat().st_size for name in each.files)
        for each in models_among(variants, ref.repo)
    }


def client_names(models: Iterable[LocalModel]) -> dict[str, LocalModel]:
    """Map client names to models; if two names are equal, the second gets a number."""
    found: dict[str, LocalModel] = {}
    for model in models:
        name = plain = client_name(model.name)
        count = 1
        while name in found:
            count += 1
            name = f"{plain}-{count}"
        found[name] = model
    return found


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
