"""Files that are replaced whole or not at all, and files that nobody else may read.

The bytes go to another file in the same folder, which is synced to the disk and renamed: neither a
reader nor a crash ever sees half a file. Then the folder is synced, so that a power cut does not
bring back the old file. Concurrent writers do not disturb each other: the last one wins. Users'
texts are private from the first byte, whatever the umask.
"""

from __future__ import annotations

import errno
import glob
import io
import json
import math
import os
import re
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from localrt import system
from localrt.common.errors import CancelledError, OptionError, StorageError, reason_of

MOST_BYTES = 256 << 20
"""The largest size of a file that a user names, and of stdin."""

MOST_WORDS = 2 << 20
"""The most memory for the values of a JSON text, in words of up to 30 bytes: a number takes one, a
string two, a list or an object eight. That is enough for the token ids of a long prompt.
"""

PAGE = 4096
"""Offsets, sizes and addresses of direct reads are multiples of this many bytes."""

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
_MODE = 0o666  # the default mode of ``open``, before the umask
_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_OTHERS = 0o077  # the rights of group and others
_STALE_S = 86_400.0  # a writer that pauses longer has been killed
_POLL_S = 0.02
_PIECE = 1 << 20  # bytes
_NAME_CHARACTERS = 40  # file systems allow names of 255 bytes
_JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


@contextmanager
def atomic_write(
    path: Path, *, private: bool = False, sync: bool = True, aside: Path | None = None
) -> Iterator[BinaryIO]:
    """A stream whose bytes become the file ``path`` at the end of the block, unless it raises.

    Args:
        path: the file to write or replace.
        private: no other user may read it; otherwise the umask decides.
        sync: wait for the disk, so that a power cut at any time leaves the old file or the new one,
            and after the block the new one; False for what can be computed again if it is damaged.
        aside: the temporary file, in the same folder; by default one per thread.

    Raises:
        OSError: the file cannot be written; the old file stays.
    """
    if aside is None:
        writer = f"{os.getpid()}-{threading.get_ident()}"
        aside = path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{writer}.tmp")
        _clean_once(path)
    aside.unlink(missing_ok=True)
    mode = _PRIVATE_FILE if private else _MODE
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        system.replace(aside, path)
        if sync:
            system.sync_folder(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path, wait_s: float, cancel: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock of a file or folder between processes and threads, where the file system has
    locks. It is a file beside it, which stays.

    Raises:
        StorageError: another process has held it for ``wait_s``, or there is no place for a lock.
        CancelledError: ``cancel`` was set meanwhile.
    """
    from filelock import FileLock, Timeout  # it imports asyncio, and most runs lock nothing

    lock = FileLock(path.with_name(path.name + ".lock"), timeout=0, mode=_PRIVATE_FILE)
    end = time.monotonic() + wait_s
    while True:
        try:
            private_folder(path.parent)
            lock.acquire()
            break
        except Timeout:
            if time.monotonic() >= end:
                raise StorageError(f"{path} is in use by another process: try again") from None
            if cancel is not None and cancel.is_set():
                raise CancelledError(f"waiting for {path} was cancelled") from None
            time.sleep(_POLL_S)
        except (OSError, NotImplementedError) as error:
            if not isinstance(error, OSError) or error.filename is None:  # there are no locks
                break
            raise StorageError(f"{error.filename} cannot be written: {reason_of(error)}") from error
    try:
        yield
    finally:
        lock.release()


def write_bytes(
    path: Path, data: bytes, *, private: bool = False, sync: bool = True, folder: bool = False
) -> None:
    """Write or replace a file by ``atomic_write``. ``folder``: also make its folder, as private as
    the file.

    Raises:
        StorageError: the file cannot be written; what was there stays.
    """
    try:
        if folder and private:
            private_folder(path.parent)
        elif folder:
            make_folder(path.parent)
        with atomic_write(path, private=private, sync=sync) as stream:
            stream.write(data)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {reason_of(error)}") from error


def write_text(
    path: Path, text: str, *, private: bool = False, sync: bool = True, folder: bool = False
) -> None:
    """``write_bytes`` in UTF-8. A lone surrogate becomes ``\\udcff``, say, which JSON reads back.

    Raises:
        StorageError: the file cannot be written; what was there stays.
    """
    data = text.encode("utf-8", "backslashreplace")
    write_bytes(path, data, private=private, sync=sync, folder=folder)


def parse_json(text: str | bytes, most: int = MOST_WORDS, **hooks: Any) -> Any:
    """``json.loads``, whose ``ValueError`` also says that values are too many or nested too deeply:
    little text can take much memory.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")  # as ``json.loads``
    if json_words(text, most) > most:
        raise ValueError("it has too many values")
    try:
        return json.loads(text, **hooks)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_words(text: str, enough: float = 0) -> int:
    """An estimate of a JSON text's ``MOST_WORDS``; up to ``enough`` it may be too high."""
    marks = {",": 1, ":": 1, '"': 1, "[": 8, "{": 8}
    words = sum(text.count(mark) * words for mark, words in marks.items())
    return words if words <= enough else json_words(_JSON_STRING.sub('""', text), math.inf)


def read_cached(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_cached(path: Path, values: Mapping[str, object]) -> None:
    """Write a file for ``read_cached``; if that fails, the values are computed again next time."""
    with suppress(OSError):
        text = json.dumps(values, indent=1)
        write_text(path, text, private=True, sync=False, folder=True)


def json_sum(values: Mapping[str, object]) -> int:
    """The CRC-32 of values as JSON; writing and reading them does not change it."""
    return zlib.crc32(json.dumps(values).encode())


def user_path(path: str | Path) -> Path:
    """A path with the home folder for ``~``, which stays where there is no such user.

    Raises:
        OptionError: it has a null character.
    """
    if "\0" in str(path):
        raise OptionError(f"{str(path)!r:.80} is no name of a file or folder")
    return Path(os.path.expanduser(path))  # noqa: PTH111  Path's own fails on "~nobody"


def several(given: Any) -> Any:
    """What a caller gave as paths or pictures; a single one is not taken for its characters."""
    return [given] if isinstance(given, str | bytes | Path) else given


def is_there(path: str | Path) -> bool:
    """Whether a path that a user may have meant (see ``user_path``) leads to a file or folder.
    False for a text that cannot be a path.

    Raises:
        StorageError: the system cannot tell, as on a failing disk or in a closed folder.
    """
    try:
        user_path(path).stat()
    except OptionError:
        return False
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise StorageError(f"cannot open {path}: {reason_of(error)}") from error
    return True


def is_file(path: Path) -> bool:
    """Whether a path leads to a file; also True if only reading can tell, as in a closed folder."""
    try:
        return path.is_file()
    except OSError:
        return True


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file that a user names. Devices and pipes are refused: they may never end.

    Raises:
        OptionError: it is missing, no regular file, or larger than ``most``.
        StorageError: it cannot be read, as on a failing disk.
    """
    path = user_path(path)
    if not is_there(path):
        raise OptionError(f"{path} does not exist")
    try:
        if not path.is_file():
            raise OptionError(f"{path} is not a regular file")
        with path.open("rb") as file:
            return read_stream(file, str(path), most)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {reason_of(error)}") from error


def read_stream(stream: BinaryIO, name: str, most: int = MOST_BYTES) -> bytes:
    """The rest of a stream.

    Raises:
        OptionError: it has more than ``most`` bytes.
    """
    data, more = io.BytesIO(), True
    while more and data.tell() <= most:  # in pieces: a stream takes memory for all it is asked for
        more = data.write(stream.read(_PIECE)) == _PIECE
    if data.tell() > most:
        raise OptionError(f"{name} is too large: the most is {most // 1_000_000} MB")
    return data.getvalue()


def read_text(path: str | Path) -> str:
    """``read_bytes`` of a UTF-8 text.

    Raises:
        OptionError, StorageError: as ``read_bytes``; or it is not UTF-8.
    """
    return decoded(read_bytes(path), str(path))


def text_lines(text: str) -> list[str]:
    """The lines of a text, which end at LF or CRLF alone, unlike those of ``splitlines``."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def decoded(data: bytes, name: str) -> str:
    """UTF-8 bytes as text, without a byte order mark.

    Raises:
        OptionError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start}"
        ) from error


def private_folder(path: Path) -> None:
    """Make a folder that nobody else may enter, and its missing parents.

    An existing folder is not changed: it may be shared on purpose. See ``keep_private``.

    Raises:
        OSError: it cannot be made.
    """
    make_folder(path, _PRIVATE_FOLDER)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its missing parents, if it is not there, so that a power cut keeps them.

    Raises:
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode)
    except FileNotFoundError:
        make_folder(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
    except OSError:
        if not path.is_dir():
            raise
        return
    system.sync_folder(path.parent)


def remove_folder(path: Path, last: Collection[str]) -> None:
    """Remove a folder, and its files named ``last`` after all others: if the process or the power
    ends before that, they show what the rest is.

    Raises:
        OSError: a file cannot be removed.
    """
    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name not in last:
            each.unlink()
    system.sync_folder(path)
    shutil.rmtree(path)


def remove_stale(folder: Path, pattern: str) -> None:
    """Remove files and folders of this pattern that killed processes left a day ago or earlier."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@lru_cache(maxsize=1024)
def _clean_once(path: Path) -> None:
    """``remove_stale`` for what killed writers of a file left, once a process: it lists a folder,
    which may be large.
    """
    begins = glob.escape(f".{path.name[:_NAME_CHARACTERS]}.")
    remove_stale(path.parent, f"{begins}[0-9]*-[0-9]*.tmp")


def private_file(path: Path) -> None:
    """Make an empty file that no other user may read, for libraries that open files by name.

    An existing file keeps its content. It is not opened: closing it would end all locks that this
    process has on it, those of SQLite too.

    Raises:
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE))
    keep_private(path)


def keep_private(path: Path) -> None:
    """Remove the access of other users that an earlier version gave to a file or folder.

    Only if this user owns it; links are not followed.
    """
    with suppress(OSError):  # missing, or a file system without permissions
        status = path.lstat()
        rights = stat.S_IMODE(status.st_mode)
        shared = bool(rights & _OTHERS) and not stat.S_ISLNK(status.st_mode)
        if shared and system.owns(status):
            path.chmod(rights & ~_OTHERS)
