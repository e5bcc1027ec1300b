"""Models on this disk: the hub's cache folder, and localrt's own folders of packed weights.

The cache has the documented layout, read and written without huggingface_hub:

    models--ORG--NAME/refs/main                 the commit a branch or tag stood at
                     /snapshots/COMMIT/FILE     a link to a blob
                     /blobs/ETAG                the bytes, named by their checksum
    .locks/models--ORG--NAME/ETAG.lock          held while a blob is written

Other tools read and write the same folder. A packed copy belongs to its source model, and is made
again when missing; a quantized model is named after its folder.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from localrt import system
from localrt.common.errors import ModelNotFoundError
from localrt.common.files import is_there, make_folder, parse_json, private_folder, write_text
from localrt.common.settings import Settings
from localrt.hub.files import choose_variant, gguf_variants, has_safetensors, variant_name
from localrt.hub.names import HubRef
from localrt.models.weight_files import MANIFEST_NAME, PARTIAL_NAME, index_shards

_PREFIX = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A complete model in the cache: a GGUF file, or a snapshot folder (no variant).

    ``file`` is the path of a GGUF file in its snapshot.
    """

    path: Path
    commit: str
    variant: str | None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """One repository's folder in the cache, which may not exist yet."""

    cache: Path
    repo: str

    @property
    def folder(self) -> Path:
        """``CACHE/models--ORG--NAME``."""
        return self.cache / (_PREFIX + self.repo.replace("/", "--"))

    def blob(self, etag: str) -> Path:
        """The path of the bytes with this checksum."""
        return self.folder / "blobs" / etag

    def partial(self, etag: str) -> Path:
        """The path of an unfinished download's bytes."""
        return self.folder / "blobs" / f"{etag}.incomplete"

    def lock(self, etag: str) -> Path:
        """The lock file that tools hold while they write the blob."""
        return self.cache / ".locks" / self.folder.name / f"{etag}.lock"

    def snapshot(self, commit: str) -> Path:
        """The folder with the files of one commit."""
        return self.folder / "snapshots" / commit

    def commits(self) -> list[str]:
        """The commits that have a snapshot folder."""
        folders = (path for path in (self.folder / "snapshots").glob("*") if path.is_dir())
        return sorted(path.name for path in folders if _COMMIT.fullmatch(path.name))

    def refs(self) -> dict[str, str]:
        """Branches and tags with their commits at the time of download."""
        refs = {}
        root = self.folder / "refs"
        for path in root.rglob("*"):
            try:
                commit = path.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError):  # a folder, or unreadable
                continue
            refs[path.relative_to(root).as_posix()] = commit
        return refs

    def commit_of(self, revision: str | None) -> str | None:
        """The commit of a branch, tag or (abbreviated) commit, if the cache knows it."""
        name, refs = revision or "main", self.refs()
        if commit := refs.get(name):
            return commit if _COMMIT.fullmatch(commit) else None
        # Where no branch is recorded, the only snapshot is what was downloaded.
        start = "" if revision is None and not refs else name
        if start and not _SHORT_COMMIT.fullmatch(start):
            return None
        fitting = [each for each in self.commits() if each.startswith(start)]
        return fitting[0] if len(fitting) == 1 else None

    def files(self, commit: str) -> list[str]:
        """Relative paths of a snapshot's files whose bytes exist."""
        root = self.snapshot(commit)
        files = (path for path in root.rglob("*") if path.is_file())
        return sorted(path.relative_to(root).as_posix() for path in files)

    def paths(self) -> Iterator[Path]:
        """The files of all snapshots: links, or regular files."""
        for commit in self.commits():
            yield from (self.snapshot(commit) / name for name in self.files(commit))

    def link(self, commit: str, name: str, etag: str) -> None:
        """Add the blob to the snapshot: as a relative link, a hard one, or by moving it there."""
        blob, pointer = self.blob(etag), self.snapshot(commit) / name
        target = Path(os.path.relpath(blob, pointer.parent))
        with suppress(OSError):
            if pointer.samefile(blob):
                return  # others may be reading it
        make_folder(pointer.parent)
        pointer.unlink(missing_ok=True)
        try:
            pointer.symlink_to(target)
        except OSError:  # Windows without the right to make symbolic links
            try:
                pointer.hardlink_to(blob)
            except OSError:  # a file system without links, as of a memory card
                system.replace(blob, pointer)
        system.sync_folder(pointer.parent)

    def write_ref(self, revision: str, commit: str) -> None:
        """Record that ``revision`` is at ``commit``; a commit needs no such record."""
        if _COMMIT.fullmatch(revision):
            return
        path = self.folder / "refs" / revision
        write_text(path, commit, folder=True)

    def has_safetensors(self, commit: str, files: list[str]) -> bool:
        """Whether the snapshot holds a complete Hugging Face model."""
        return has_safetensors(files, index_shards(self.snapshot(commit)))

    @classmethod
    def all_in(cls, cache: Path) -> Iterator[CachedRepo]:
        """Every model repository of a cache folder."""
        for path in sorted(cache.glob(f"{_PREFIX}*")):
            if path.is_dir():
                yield cls(cache, path.name.removeprefix(_PREFIX).replace("--", "/"))


def find_cached(cache: Path, ref: HubRef) -> CachedModel | None:
    """The model that ``ref`` names, if it is complete in the cache. Uses no network."""
    repo = CachedRepo(cache, ref.repo)
    commit = repo.commit_of(ref.revision)
    if commit is None:
        return None
    files = repo.files(commit)
    snapshot = repo.snapshot(commit)
    if ref.variant is None and repo.has_safetensors(commit, files):
        return CachedModel(snapshot, commit, None)
    variants = gguf_variants(files)
    try:
        variant = choose_variant(variants, ref.variant, ref.repo)
    except ModelNotFoundError:
        return None
    file = variant.files[0]
    return CachedModel(snapshot / file, commit, variant_name(variant, variants), file)


@dataclass(frozen=True, slots=True)
class OwnStore:
    """A store made by localrt. ``source`` is the packed model's file or folder name, ``origin`` its
    path, if recorded. ``quantized``: a separate model, not a copy. ``finished``: it is complete.
    """

    path: Path
    format: str
    source: str
    origin: Path | None
    quantized: bool
    finished: bool

    @property
    def files(self) -> list[Path]:
        """The files of the store."""
        return [path for path in self.path.rglob("*") if path.is_file()]

    @property
    def bytes(self) -> int:
        """Bytes on the disk."""
        return sum(path.stat().st_size for path in self.files)


def own_stores(settings: Settings) -> Iterator[OwnStore]:
    """The stores in the data folder, finished or not."""
    folder = settings.data_dir / "stores"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        store = read_store(path) or _read(path, PARTIAL_NAME)
        if store is not None:
            yield store


def read_store(path: Path) -> OwnStore | None:
    """Read the manifest in this folder; None if there is no finished store."""
    return _read(path, MANIFEST_NAME)


def _read(path: Path, manifest: str) -> OwnStore | None:
    try:
        values = parse_json((path / manifest).read_text(encoding="utf-8"))
        source, origin = values["source"], values["source"].get("path")
        return OwnStore(
            path,
            str(values["format"]),
            source=str(source["name"]),
            origin=None if origin is None else Path(origin),
            quantized=values.get("quantization") is not None,
            finished=manifest == MANIFEST_NAME,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def find_quantized(name: str, settings: Settings) -> Path | None:
    """The quantized model whose folder has this name."""
    folder = settings.data_dir / "stores" / name
    inside = "/" not in name and "\\" not in name and name not in ("", ".", "..")
    return folder if inside and is_there(folder / MANIFEST_NAME) else None


def is_own_store(path: Path, settings: Settings) -> bool:
    """Whether this is a store, finished or not, in localrt's data folder."""
    return path.parent == settings.data_dir / "stores" and any(
        (path / name).is_file() for name in (MANIFEST_NAME, PARTIAL_NAME)
    )


# -- when models were last used --------------------------------------------------------------------


def note_use(name: str, settings: Settings) -> None:
    """Record that the model is used now, but for what lies in the folder for temporary files."""
    if Path(name).is_absolute() and Path(name).is_relative_to(tempfile.gettempdir()):
        return
    with suppress(OSError):
        file = _use_file(name, settings)
        private_folder(file.parent)
        file.touch(mode=0o600)


def forget_use(name: str, settings: Settings) -> bool:
    """Forget the last use of a model; whether there was one."""
    with suppress(OSError):
        _use_file(name, settings).unlink()
        return True
    return False


def last_used(settings: Settings) -> dict[str, float]:
    """Seconds since the epoch, by name."""
    try:
        files = (settings.data_dir / "used").iterdir()
        return {unquote(file.name): file.stat().st_mtime for file in files}
    except OSError:
        return {}


def _use_file(name: str, settings: Settings) -> Path:
    return settings.data_dir / "used" / quote(name, safe="")[:250]
