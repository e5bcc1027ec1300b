"""The hub's cache folder, in its documented layout, read and written without huggingface_hub.

    models--ORG--NAME/refs/main                 the commit a branch or tag stood at
                     /snapshots/COMMIT/FILE     a link to a blob
                     /blobs/ETAG                the bytes, named by their checksum
    .locks/models--ORG--NAME/ETAG.lock          held while a blob is written

Other tools read and write the same folder. Knows neither the network nor what is in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localrt.common.errors import ModelNotFoundError
from localrt.common.files import write_text
from localrt.hub.files import choose_variant, gguf_variants, has_safetensors, variant_name
from localrt.hub.names import HubRef
from localrt.models.weight_files import index_shards

_PREFIX = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is complete in the cache: a GGUF file, or a snapshot folder (no variant)."""

    path: Path
    commit: str
    variant: str | None


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
        """Where the bytes with this checksum lie."""
        return self.folder / "blobs" / etag

    def partial(self, etag: str) -> Path:
        """Where the bytes of an unfinished download lie, to be resumed."""
        return self.folder / "blobs" / f"{etag}.incomplete"

    def lock(self, etag: str) -> Path:
        """The lock file that every tool holds while it writes the blob."""
        return self.cache / ".locks" / self.folder.name / f"{etag}.lock"

    def snapshot(self, commit: str) -> Path:
        """The folder with the files of one commit."""
        return self.folder / "snapshots" / commit

    def commits(self) -> list[str]:
        """The commits that have a snapshot folder."""
        folders = (path for path in (self.folder / "snapshots").glob("*") if path.is_dir())
        return sorted(path.name for path in folders if _COMMIT.fullmatch(path.name))

    def refs(self) -> dict[str, str]:
        """Branches and tags with the commit each stood at when it was downloaded."""
        refs = {}
        root = self.folder / "refs"
        for path in root.rglob("*"):
            try:
                commit = path.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError):  # a folder, or no note
                continue
            refs[path.relative_to(root).as_posix()] = commit
        return refs

    def commit_of(self, revision: str | None) -> str | None:
        """The commit of a branch, tag or (abbreviated) commit, as far as the cache knows."""
        name = revision or "main"
        if commit := self.refs().get(name):
            return commit if _COMMIT.fullmatch(commit) else None
        if _SHORT_COMMIT.fullmatch(name):
            fitting = [commit for commit in self.commits() if commit.startswith(name)]
            return fitting[0] if len(fitting) == 1 else None
        return None

    def files(self, commit: str) -> list[str]:
        """Relative paths of a snapshot's files whose bytes are there."""
        root = self.snapshot(commit)
        files = (path for path in root.rglob("*") if path.is_file())
        return sorted(path.relative_to(root).as_posix() for path in files)

    def paths(self) -> Iterator[Path]:
        """The files of all snapshots: links, or the bytes themselves."""
        for commit in self.commits():
            yield from (self.snapshot(commit) / name for name in self.files(commit))

    def link(self, commit: str, name: str, etag: str) -> None:
        """Make the blob visible as a file of the snapshot: a relative link, or the file itself."""
        blob, pointer = self.blob(etag), self.snapshot(commit) / name
        target = Path(os.path.relpath(blob, pointer.parent))
        if pointer.is_symlink() and pointer.readlink() == target:
            return  # others may be reading it
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.unlink(missing_ok=True)
        try:
            pointer.symlink_to(target)
        except OSError:  # Windows without the right to link
            blob.replace(pointer)

    def write_ref(self, revision: str, commit: str) -> None:
        """Remember that ``revision`` stands at ``commit``; a commit needs no such note."""
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
    """The model that ``ref`` names if the cache holds all of it. Asks nobody."""
    repo = CachedRepo(cache, ref.repo)
    commit = repo.commit_of(ref.revision)
    if commit is None:
        return None
    files = repo.files(commit)
    snapshot = repo.snapshot(commit)
    if ref.variant is None and repo.has_safetensors(commit, files):
        return CachedModel(snapshot, commit, None)
    variants = [variant for variant in gguf_variants(files) if variant.complete]
    try:
        variant = choose_variant(variants, ref.variant, ref.repo)
    except ModelNotFoundError:
        return None
    return CachedModel(snapshot / variant.files[0], commit, variant_name(variant, variants))
