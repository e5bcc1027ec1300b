"""Lists repositories of the hub, and downloads files to its cache after checking their bytes.

Every failure of huggingface_hub becomes one of localrt's errors here. That library takes a fifth of
a second to import, so this module is imported only when the hub is asked. It deletes unfinished
files, so the transfer is our own: a file grows as ``ETAG.incomplete``, is resumed by a range
request after any interruption, and becomes a blob once its checksum is right.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any, TypeVar
from urllib.parse import quote

from filelock import Timeout
from huggingface_hub import ModelInfo, get_session, hf_hub_url
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not re-exported
    WeakFileLock,
    hf_raise_for_status,
    validate_repo_id,
)

from localrt import system
from localrt.common.errors import (
    CancelledError,
    GatedModelError,
    HubError,
    LocalrtError,
    ModelNotFoundError,
    OfflineError,
    StorageError,
    reason_of,
)
from localrt.common.files import make_folder, parse_json
from localrt.common.formatting import format_bytes, one_line
from localrt.common.network import network_problem
from localrt.common.progress import Progress, ProgressCallback
from localrt.common.settings import Settings
from localrt.common.version import __version__
from localrt.hub.cache import CachedRepo

# The HTTP client's root exception; the client depends on huggingface_hub's version.
HTTP_ERROR: type[Exception] = next(
    base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"
)
_T = TypeVar("_T")
_METADATA_TIMEOUT_S = 10.0
_MOST_METADATA = 16 << 20  # bytes; 40,000 files take that much
_REDIRECTS = 10
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it. ``etag`` is its SHA-256 (large files) or its git blob id."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class RemoteRepo:
    """A repository at one commit."""

    repo: str
    commit: str
    files: dict[str, RemoteFile]


def list_repo(repo: str, revision: str | None, settings: Settings) -> RemoteRepo:
    """Ask the hub for the files of a repository: one request, no retry, ten seconds at most.

    Raises:
        HubError: or a subclass of it; see ``hub_errors``.
    """
    with hub_errors(repo, settings, revision=revision):
        path = repo if revision is None else f"{repo}/revision/{quote(revision, safe='')}"
        try:
            validate_repo_id(repo)
        except HFValidationError as error:
            raise ModelNotFoundError(f"{repo!r} is not a name that the hub allows") from error
        info = ask_hub(f"models/{path}", settings, _METADATA_TIMEOUT_S, _model_info, blobs=True)
        files = {}
        for sibling in info.siblings or ():
            etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            size = sibling.lfs.size if sibling.lfs else sibling.size
            name = sibling.rfilename
            if etag is None or size is None or not _ETAG.fullmatch(etag) or not _is_inside(name):
                raise HubError(
                    f"{settings.hub_endpoint} lists {one_line(name, 80)!r} of {repo} without a "
                    "usable checksum, size or name: nothing was downloaded"
                )
            files[name] = RemoteFile(name, size, etag)
        if info.sha is None or not _COMMIT.fullmatch(info.sha):
            raise HubError(f"{settings.hub_endpoint} does not state a commit for {repo}")
        return RemoteRepo(repo, info.sha, files)


def _model_info(found: dict[str, Any]) -> Any:
    return ModelInfo(**found)  # type: ignore[no-untyped-call]


def ask_hub(
    path: str, settings: Settings, timeout_s: float, read: Callable[[Any], _T], **params: object
) -> _T:
    """What ``read`` makes of the JSON that the hub answers; without retries.

    Raises:
        HTTP_ERROR, HubError: it is refused, too large, too slow or something else.
    """
    hub, body, end = settings.hub_endpoint, bytearray(), time.monotonic() + timeout_s
    options = {"params": params, "timeout": timeout_s}
    with _response(f"{hub}/api/{path}", settings, {}, **options) as response:
        for piece in response.iter_raw():
            body += piece
            if len(body) > _MOST_METADATA or time.monotonic() > end:
                raise HubError(f"{hub} sends too much, or too slowly: try again later")
    try:
        return read(parse_json(bytes(body)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a login page
        raise HubError(f"{hub} does not answer like a model hub: is it the right one?") from error


@contextmanager
def _response(
    url: str, settings: Settings, headers: dict[str, str], **options: Any
) -> Iterator[Any]:
    """An answer of the hub, for ``iter_raw``: of nothing else the client limits the size.

    Raises:
        HTTP_ERROR, HubError: it is refused, compressed, or redirected without end.
    """
    # Not the library's: for those it asks the hub which environment variables to tell it.
    headers["User-Agent"] = f"localrt/{__version__}"
    if token := settings.read_hub_token():
        headers["Authorization"] = f"Bearer {token}"
    headers["Accept-Encoding"] = "identity"  # a range counts the file's own bytes
    request = get_session().build_request("GET", url, headers=headers, **options)
    for _ in range(_REDIRECTS):
        with closing(get_session().send(request, stream=True, follow_redirects=False)) as response:
            if response.next_request is None:
                if response.is_error:
                    response.close()  # before its text is read, which may have no end
                hf_raise_for_status(response)
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise HubError(f"{settings.hub_endpoint} sends compressed answers, unasked")
                yield response
                return
            request = response.next_request
    raise HubError(f"{settings.hub_endpoint} redirects without end: is it a model hub?")


@contextmanager
def hub_errors(
    repo: str, settings: Settings, *, revision: str | None = None, folder: Path | None = None
) -> Iterator[None]:
    """Turn any exception in the block into a LocalrtError that names ``repo``.

    Raises:
        GatedModelError: HTTP 401 or 403.
        ModelNotFoundError: no such repository, revision or file.
        OfflineError: the hub cannot be reached, or the connection was lost.
        StorageError: ``folder`` cannot be written, or the disk is full.
        HubError: any other answer of the hub, or failure to ask.
    """
    try:
        get_session()  # fails at the environment's proxies and certificates, whatever follows
        yield
    except LocalrtError:
        raise
    except Exception as error:
        if problem := network_problem(error, settings.hub_endpoint):
            raise HubError(f"cannot ask the hub for {repo}: {problem}") from error
        if isinstance(error, HTTP_ERROR):
            raise _hub_error(error, repo, settings, revision, folder) from error
        if isinstance(error, OfflineModeIsEnabled):
            raise OfflineError(f"{repo} needs the hub, and HF_HUB_OFFLINE is on") from error
        if isinstance(error, OSError):
            raise storage_error(error, folder) from error
        if folder is not None:  # a callback's error
            raise
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise HubError(f"cannot ask the hub for {repo}: {reason}") from error


def storage_error(error: OSError, folder: Path | None) -> StorageError:
    """The error for a file that could not be written."""
    where = folder or error.filename or "the cache"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk of {where} is full: free some space and try again")
    reason = one_line(reason_of(error))
    return StorageError(f"cannot write to {where}: {reason} (HF_HOME sets another folder)")


def _hub_error(
    error: Exception, repo: str, settings: Settings, revision: str | None, folder: Path | None
) -> HubError:
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{repo} has no revision {revision!r} on the hub")
    if isinstance(error, RemoteEntryNotFoundError):
        return ModelNotFoundError(f"a file of {repo} is missing on the hub: try again later")
    if isinstance(error, HfHubHTTPError):
        return _refused(error.response.status_code, repo, settings)
    reason = one_line(error, 120) or type(error).__name__
    kept = "" if folder is None else "; what was downloaded is kept"
    return OfflineError(
        f"cannot reach {settings.hub_endpoint} for {repo} ({reason}): check the connection and try "
        f"again{kept}"
    )


def _refused(status: int, repo: str, settings: Settings) -> HubError:
    page = f"{settings.hub_endpoint}/{repo}"
    if status in (401, 403):
        return GatedModelError(
            f"the hub refuses access to {repo} (HTTP {status}): check the name, accept its licence "
            f"at {page}, then log in with `hf auth login` or set HF_TOKEN"
        )
    if status == 404:
        return ModelNotFoundError(f"there is no model {repo} on {settings.hub_endpoint}")
    if status == 429:
        return HubError("the hub says that too many requests were made: try again in some minutes")
    return HubError(f"the hub answered HTTP {status} for {repo}: try again later")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    unsafe = path.is_absolute() or ".." in path.parts or "\\" in name or ":" in path.parts[0]
    return bool(name) and not unsafe


_READ_TIMEOUT_S = 10.0
_MAX_FAILURES = 5  # consecutive attempts without progress
_FIRST_WAIT_S = 0.25
_HASH_BLOCK = 4 << 20
_REPORT_EVERY_S = 0.1


def check_cancelled(cancel: Event | None) -> None:
    """Raise ``CancelledError`` once the caller has set ``cancel``."""
    if cancel is not None and cancel.is_set():
        raise CancelledError("the download was cancelled; what was downloaded is kept")


@dataclass(slots=True)
class DownloadMeter:
    """Bytes done over several files, reported at most ten times a second and never backwards."""

    stage: str
    total: int
    callback: ProgressCallback | None
    _per_file: dict[str, int] = field(default_factory=dict, init=False)
    _reported: int = field(default=-1, init=False)
    _last: float = field(default=0.0, init=False)

    def set(self, name: str, done: int) -> None:
        """Set ``name``'s bytes to ``done``, more or fewer than before."""
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
    """Download ``names`` of a repository into the cache, in this order; skips complete files.

    Stages of ``progress``: ``"download"``, then ``"verify"``, each in bytes over all files.

    Raises:
        HubError: or a subclass of it; a file with a wrong checksum is removed.
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
        begun = {file.etag for file in missing if cached.partial(file.etag).exists()}
        make_folder(cached.blob(""))
        total = sum(file.size for file in missing)
        meter = DownloadMeter("download", total, progress)
        for file in missing:
            with _locked(cached.lock(file.etag), cancel):
                if not cached.blob(file.etag).exists():
                    partial = cached.partial(file.etag)
                    _Transfer(remote, file, partial, settings, meter, cancel).run()
                meter.set(file.name, file.size)
        meter = DownloadMeter("verify", total, progress)
        for file in wanted:
            with _locked(cached.lock(file.etag), cancel):
                partial, blob = cached.partial(file.etag), cached.blob(file.etag)
                try:
                    if not blob.exists():
                        _publish(file, partial, blob, meter, cancel)
                except HubError:
                    if file.etag not in begun:
                        raise
                    # A power cut damaged what an earlier run had downloaded.
                    _Transfer(remote, file, partial, settings, meter, cancel).run()
                    _publish(file, partial, blob, meter, cancel)
                cached.link(remote.commit, file.name, file.etag)
                if file in missing:  # also if another process finished first
                    meter.set(file.name, file.size)
        make_folder(cached.snapshot(remote.commit))
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
    file: RemoteFile, partial: Path, blob: Path, meter: DownloadMeter, cancel: Event | None
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
    system.replace(partial, blob)
    system.sync_folder(blob.parent)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The download of one file to ``partial``."""

    remote: RemoteRepo
    file: RemoteFile
    partial: Path
    settings: Settings
    meter: DownloadMeter
    cancel: Event | None

    def run(self) -> None:
        """Download ``partial`` to its full size, reconnecting as needed."""
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
                    f"the hub keeps cutting {file.name} short, or sends too much of it: try again "
                    "later; what was downloaded is kept"
                )
            if now != file.size:
                (self.cancel or Event()).wait(_FIRST_WAIT_S * 2**failures)

    def _stream(self, have: int) -> None:
        """Make one request: append from byte ``have`` on, or start over if the server sends all."""
        remote, file, settings = self.remote, self.file, self.settings
        url = hf_hub_url(
            remote.repo, file.name, revision=remote.commit, endpoint=settings.hub_endpoint
        )
        headers = {"Range": f"bytes={have}-"} if 0 < have < file.size else {}
        try:
            with _response(url, settings, headers, timeout=_READ_TIMEOUT_S) as response:
                done = have if response.status_code == 206 else 0
                self.meter.set(file.name, done)
                with self.partial.open("ab" if done else "wb") as out:
                    for chunk in response.iter_raw():
                        check_cancelled(self.cancel)
                        out.write(chunk)
                        done += len(chunk)
                        self.meter.set(file.name, done)
                        if done > file.size:
                            break
        except HfHubHTTPError as error:
            if error.response.status_code != 416:
                raise
            self.partial.unlink(missing_ok=True)


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
    """Hold the lock that all tools of the hub use; waiting for it can be cancelled."""
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
