"""What the hub says: the files of a repository with their sizes and checksums, and its refusals.

Every failure of huggingface_hub or of its HTTP client becomes one of localrt's errors here. That
library takes a fifth of a second to import: so this module, like ``transfer``, is
imported by those who ask the hub, when they do.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)

from localrt.errors import (
    GatedModelError,
    HubError,
    LocalrtError,
    ModelNotFoundError,
    OfflineError,
    StorageError,
)
from localrt.formatting import one_line
from localrt.settings import Settings

__all__ = [
    "HTTP_ERROR",
    "RemoteFile",
    "RemoteRepo",
    "hub_errors",
    "list_repo",
    "storage_error",
]

# The root of the HTTP client's errors; which client it is depends on huggingface_hub.
HTTP_ERROR: type[Exception] = next(
    base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"
)
_METADATA_TIMEOUT_S = 10.0
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
    """Ask the hub for the files of a repository. One request, no retry: ten seconds at most.

    Raises:
        HubError: and its kinds; see ``hub_errors``.
    """
    with hub_errors(repo, settings, revision=revision):
        # False, not None: with None the library would look for a token by itself.
        api = HfApi(endpoint=settings.hub_endpoint, token=settings.read_hub_token() or False)
        try:
            info = api.model_info(
                repo, revision=revision, files_metadata=True, timeout=_METADATA_TIMEOUT_S
            )
        except HFValidationError as error:
            raise ModelNotFoundError(f"{repo!r} is not a name that the hub allows") from error
        except HfHubHTTPError:
            raise
        except (KeyError, TypeError, ValueError) as error:  # a login page, a proxy's greeting
            raise HubError(
                f"{settings.hub_endpoint} does not answer like a model hub: is it the right one?"
            ) from error
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


@contextmanager
def hub_errors(
    repo: str, settings: Settings, *, revision: str | None = None, folder: Path | None = None
) -> Iterator[None]:
    """Turn whatever the block raises into a LocalrtError that names ``repo``.

    Raises:
        GatedModelError: HTTP 401 or 403.
        ModelNotFoundError: no such repository, revision or file.
        OfflineError: the hub cannot be reached, or the connection was lost.
        StorageError: ``folder`` cannot be written, or the disk is full.
        HubError: anything else that the hub answered.
    """
    try:
        yield
    except LocalrtError:
        raise
    except Exception as error:
        if isinstance(error, HTTP_ERROR):
            raise _hub_error(error, repo, settings, revision) from error
        if isinstance(error, OfflineModeIsEnabled):
            raise OfflineError(f"{repo} needs the hub, and HF_HUB_OFFLINE is on") from error
        if isinstance(error, OSError):
            raise storage_error(error, folder) from error
        raise


def storage_error(error: OSError, folder: Path | None) -> StorageError:
    """The one line for a file that could not be written."""
    where = folder or error.filename or "the cache"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk of {where} is full: free some space and try again")
    reason = error.strerror or one_line(error)
    return StorageError(f"cannot write to {where}: {reason} (HF_HOME sets another folder)")


def _hub_error(error: Exception, repo: str, settings: Settings, revision: str | None) -> HubError:
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{repo} has no revision {revision!r} on the hub")
    if isinstance(error, RemoteEntryNotFoundError):
        return ModelNotFoundError(f"a file of {repo} is missing on the hub: try again later")
    if isinstance(error, HfHubHTTPError):
        return _refused(error.response.status_code, repo, settings)
    reason = one_line(error, 120) or type(error).__name__
    return OfflineError(
        f"cannot reach {settings.hub_endpoint} for {repo} ({reason}): check the connection and try "
        "again; what was downloaded is kept"
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
