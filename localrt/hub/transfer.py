"""Bytes over HTTP into the cache: resumed, cancellable, and checked before they become visible.

huggingface_hub 2 throws an unfinished file away, so the transfer is ours: a file grows as
``ETAG.incomplete``, is continued by a range request however it was interrupted, and becomes a blob
once its checksum is right. Knows what a file is (URL, size, checksum), not what a model is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from filelock import Timeout
from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not re-exported
    WeakFileLock,
    build_hf_headers,
    hf_raise_for_status,
)

from localrt.errors import CancelledError, HubError, OfflineError, StorageError
from localrt.formatting import format_bytes
from localrt.hub.cache import CachedRepo
from localrt.hub.repository import HTTP_ERROR, RemoteFile, RemoteRepo, hub_errors
from localrt.progress import Progress, ProgressCallback
from localrt.settings import Settings

__all__ = ["Meter", "check_cancelled", "check_space", "download"]

_READ_TIMEOUT_S = 10.0
_MAX_FAILURES = 5  # in a row, without a byte of progress
_FIRST_WAIT_S = 0.25
_HASH_BLOCK = 4 << 20
_REPORT_EVERY_S = 0.1


def check_cancelled(cancel: Event | None) -> None:
    """Raise ``CancelledError`` once the caller has set ``cancel``."""
    if cancel is not None and cancel.is_set():
        raise CancelledError("the download was cancelled; what was downloaded is kept")


@dataclass(slots=True)
class Meter:
    """Bytes done over several files, reported at most ten times a second and never backwards."""

    stage: str
    total: int
    callback: ProgressCallback | None
    _per_file: dict[str, int] = field(default_factory=dict, init=False)
    _reported: int = field(default=-1, init=False)
    _last: float = field(default=0.0, init=False)

    def set(self, name: str, done: int) -> None:
        """``name`` stands at ``done`` bytes now, be it more or fewer than before."""
        self._per_file[name] = done
        if self.callback is None:
            return
        overall = sum(self._per_file.values())
        now = time.monotonic()
        due = overall >= self.total or now - self._last >= _REPORT_EVERY_S
        if overall > self._reported and due:
            self._reported, self._last = overall, now
            self.callback(Progress(self.stage, overall, self.total, "bytes", name))


def download(
    remote: RemoteRepo,
    names: Sequence[str],
    *,
    revision: str | None,
    settings: Settings,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
) -> CachedRepo:
    """Bring ``names`` of a repository into the cache, in this order; only what is missing moves.

    Stages of ``progress``: ``"download"``, then ``"verify"``, each in bytes over all files.

    Raises:
        HubError: and its kinds; a file with a wrong checksum is removed.
        StorageError: the cache cannot be written, or the disk is too small.
        CancelledError: ``cancel`` was set; the next call continues.
    """
    cached = CachedRepo(settings.hub_cache, remote.repo)
    with hub_errors(remote.repo, settings, folder=settings.hub_cache):
        here = set(cached.files(remote.commit))
        wanted = [remote.files[name] for name in names if name not in here]
        missing = [file for file in wanted if not cached.blob(file.etag).exists()]
        needed = sum(file.size - _size(cached.partial(file.etag)) for file in missing)
        check_space(settings.hub_cache, needed)
        cached.blob("").mkdir(parents=True, exist_ok=True)
        total = sum(file.size for file in missing)
        meter = Meter("download", total, progress)
        for file in missing:
            with _locked(cached.lock(file.etag), cancel):
                if not cached.blob(file.etag).exists():
                    partial = cached.partial(file.etag)
                    _Transfer(remote, file, partial, settings, meter, cancel).run()
                meter.set(file.name, file.size)
        meter = Meter("verify", total, progress)
        for file in wanted:
            with _locked(cached.lock(file.etag), cancel):
                if not cached.blob(file.etag).exists():
                    _publish(file, cached.partial(file.etag), cached.blob(file.etag), meter, cancel)
                cached.link(remote.commit, file.name, file.etag)
                if file in missing:  # also when another process, or a twin, was faster
                    meter.set(file.name, file.size)
        cached.snapshot(remote.commit).mkdir(parents=True, exist_ok=True)
        cached.write_ref(revision or "main", remote.commit)
    return cached


def check_space(folder: Path, needed: int) -> None:
    """Raise ``StorageError`` when the disk of ``folder`` has fewer than ``needed`` bytes free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise StorageError(
            f"not enough space in {folder}: the download needs {format_bytes(needed)}, "
            f"{format_bytes(free)} are free"
        )


def _publish(
    file: RemoteFile, partial: Path, blob: Path, meter: Meter, cancel: Event | None
) -> None:
    """Check the finished file and give it its final name."""
    # Git's name for a small file is a SHA-1 over a header and the bytes.
    large = len(file.etag) == 64
    digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % file.size)
    done = 0
    with partial.open("rb+") as written:
        while block := written.read(_HASH_BLOCK):
            check_cancelled(cancel)
            digest.update(block)
            done += len(block)
            meter.set(file.name, done)
        os.fsync(written.fileno())
    if digest.hexdigest() != file.etag:
        partial.unlink()
        raise HubError(
            f"{file.name} arrived damaged (wrong checksum) and was removed: download it again"
        )
    partial.replace(blob)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One file on its way to ``partial``."""

    remote: RemoteRepo
    file: RemoteFile
    partial: Path
    settings: Settings
    meter: Meter
    cancel: Event | None

    def run(self) -> None:
        """Grow ``partial`` to its full size, over as many connections as it takes."""
        file, partial = self.file, self.partial
        failures = 0
        while (have := _size(partial)) != file.size or not partial.exists():
            check_cancelled(self.cancel)
            lost: Exception | None = None
            try:
                self._stream(have)
            except HTTP_ERROR as error:
                if isinstance(error, HfHubHTTPError) and not _is_transient(error):
                    raise
                lost = error
            now = _size(partial)
            if now > file.size:
                partial.unlink()
            failures = failures + 1 if now <= have or now > file.size else 0
            if failures >= _MAX_FAILURES:
                raise lost or OfflineError(
                    f"the hub keeps cutting {file.name} short: try again later; "
                    "what was downloaded is kept"
                )
            if now != file.size:
                (self.cancel or Event()).wait(_FIRST_WAIT_S * 2**failures)

    def _stream(self, have: int) -> None:
        """One request: append from byte ``have`` on, or start over if the server sends it all."""
        remote, file, settings = self.remote, self.file, self.settings
        url = hf_hub_url(
            remote.repo, file.name, revision=remote.commit, endpoint=settings.hub_endpoint
        )
        headers: dict[str, Any] = build_hf_headers(token=settings.read_hub_token() or False)
        headers["Accept-Encoding"] = "identity"  # a range counts the file's own bytes
        if 0 < have < file.size:
            headers["Range"] = f"bytes={have}-"
        with get_session().stream(
            "GET", url, headers=headers, timeout=_READ_TIMEOUT_S, follow_redirects=True
        ) as response:
            if response.status_code == 416:
                self.partial.unlink(missing_ok=True)
                return
            hf_raise_for_status(response)
            done = have if response.status_code == 206 else 0
            self.meter.set(file.name, done)
            with self.partial.open("ab" if done else "wb") as out:
                for chunk in response.iter_bytes():
                    check_cancelled(self.cancel)
                    out.write(chunk)
                    done += len(chunk)
                    self.meter.set(file.name, done)


def _is_transient(error: HfHubHTTPError) -> bool:
    status = error.response.status_code
    return status in (408, 429) or status >= 500


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _locked(path: Path, cancel: Event | None) -> Iterator[None]:
    """Hold the lock that all tools of the hub respect; waiting for it can be cancelled."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        while True:
            check_cancelled(cancel)
            try:
                stack.enter_context(WeakFileLock(path, timeout=1.0))
                break
            except Timeout:
                continue
        yield
