"""What all parts share: files that are replaced whole, foreign text, and options in messages."""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt import system
from localrt.cli import main
from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError, StorageError
from localrt.common.files import (
    atomic_write,
    is_there,
    private_file,
    private_folder,
    read_bytes,
    read_stream,
    read_text,
    remove_folder,
    write_bytes,
    write_text,
)
from localrt.common.formatting import format_bytes, parse_size, printable, table
from localrt.common.option_names import on_command_line, option, spelled
from localrt.common.processes import is_alive, is_seen_alive, own_name, process_name
from localrt.common.speeds import keep_speed, known_speed
from localrt.common.toml_file import TomlFile
from localrt.documents.reading import read_document
from localrt.models.vision.picture import read_picture
from localrt.tui.text import in_app


def test_files_are_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 100 + ".json")  # 205 of 255 bytes
    write_text(path, "grüße \ud83d\n")
    assert path.read_bytes() == "grüße ".encode() + b"\\ud83d\n"
    write_bytes(path, b"new", sync=False)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")

    def fail() -> None:
        with atomic_write(path) as stream:
            stream.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    texts = [bytes([65 + n]) * 200_000 for n in range(6)]
    start = threading.Barrier(len(texts))

    def write(data: bytes) -> None:
        start.wait()
        for _ in range(10):
            write_bytes(path, data, sync=False)
            with suppress(PermissionError) if system.IS_WINDOWS else nullcontext():
                assert path.read_bytes() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert path.read_bytes() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("none", "file"):
        with pytest.raises(StorageError, match=r"^cannot write .*: ") as caught:
            write_bytes(tmp_path / folder / "x", b"")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("work", "room", "step"),
    [
        (write_bytes, system, "replace"),
        (lambda path, _: TomlFile(path).change({"a": 1}), system, "replace"),
        (lambda path, _: TomlFile(path).read(), Path, "open"),
        (lambda path, _: read_text(path), Path, "open"),
        (lambda path, _: read_document(path), Path, "open"),
        (lambda path, _: is_there(path), Path, "stat"),
    ],
)
def test_a_message_names_its_file_once(
    work: Callable[[Path, bytes], object],
    room: Any,
    step: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though an error may become another on its way."""
    path = tmp_path / "config.toml"
    path.write_text("")

    def fail(*_given: object, **_options: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(room, step, fail)
    with pytest.raises(StorageError) as caught:
        work(path, b"a")
    monkeypatch.undo()
    assert str(caught.value).count(path.name) == 1
    assert str(caught.value).endswith(os.strerror(errno.EACCES))


class Asked(io.BytesIO):
    """A stream that notes how much it is asked for: it would take memory for that."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.most = max(self.most, size or 0)
        return super().read(size)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_streams_are_read_in_pieces(size: int) -> None:
    stream = Asked(bytes(size))
    assert len(read_stream(stream, "stdin", size)) == size
    assert stream.most < 10_000_000
    if size:
        with pytest.raises(OptionError, match="stdin is too large"):
            read_stream(Asked(bytes(size)), "stdin", size - 1)


@pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX's")
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_what_is_private_is_so_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    before = os.umask(umask)
    try:
        with atomic_write(tmp_path / "shared" / "a", private=True) as stream:
            (aside,) = (tmp_path / "shared").iterdir()
            assert rights(aside) == 0o600  # before its first byte
            stream.write(b"text")
        write_text(tmp_path / "b" / "c" / "d", "text", private=True, folder=True)
        private_folder(tmp_path / "e" / "f")
        private_folder(tmp_path / "shared")
        private_file(tmp_path / "shared" / "g")
    finally:
        os.umask(before)
    found = {path.relative_to(tmp_path).as_posix(): rights(path) for path in tmp_path.rglob("*")}
    folders = dict.fromkeys(("b", "b/c", "e", "e/f"), 0o700)
    files = dict.fromkeys(("shared/a", "shared/g", "b/c/d"), 0o600)
    assert found == {"shared": 0o755, **folders, **files}


@pytest.mark.parametrize(
    ("sync", "steps"), [(True, ["file", "rename", "folder"]), (False, ["rename"])]
)
def test_order_of_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool, steps: list[str]
) -> None:
    """A power cut after the block keeps the new file."""
    done: list[str] = []
    rename = system.replace
    monkeypatch.setattr(os, "fsync", lambda _: done.append("file"))
    monkeypatch.setattr(system, "sync_folder", lambda _: done.append("folder"))
    monkeypatch.setattr(system, "replace", lambda *both: (done.append("rename"), rename(*both)))
    write_bytes(tmp_path / "x", b"new", sync=sync)
    assert done == steps


def test_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(system, "sync_folder", synced.append)
    write_bytes(tmp_path / "a" / "b" / "x", b"", sync=False, folder=True)
    private_folder(tmp_path / "a" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a"]


@pytest.mark.skipif(system.IS_WINDOWS, reason="its journal keeps folders")
@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_file_systems_that_cannot_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no") if fails else nullcontext():
        system.sync_folder(tmp_path)


def test_files_of_killed_writers_are_removed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, *others = (tmp_path / f".{name}.tmp" for name in ("x.3-4", "x.1-2", "y.1-2", "x.mine"))
    new.touch()
    for path in others:
        path.touch()
        os.utime(path, (0, 0))
    write_bytes(tmp_path / "x", b"")
    assert sorted(tmp_path.iterdir()) == sorted([new, *others[1:], tmp_path / "x"])
    monkeypatch.setattr(Path, "glob", None)  # not again
    write_bytes(tmp_path / "x", b"")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    waits = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield process


A_DAY = 86_400


@pytest.mark.parametrize(
    ("changed", "alive", "seen"),
    [
        ({}, True, True),
        ({"began": -A_DAY - 60}, True, True),
        ({"machine": "of a clone"}, True, True),
        # The id is nobody's, or another process's by now.
        ({"id": 999_999_999}, False, False),
        ({"start": 1}, False, False),
        # The machine was started again.
        ({"boot": "other"}, False, False),
        ({"boot": "other", "namespace": 1}, False, False),
        # In another container.
        ({"namespace": 1}, True, None),
        ({"namespace": 1, "began": -A_DAY - 60}, False, None),
        ({"namespace": 1, "began": A_DAY + 60}, False, None),
        # On another machine.
        ({"boot": "other", "machine": "other"}, True, None),
        ({"boot": "other", "machine": "other", "began": -A_DAY - 60}, False, None),
    ],
    ids=str,
)
def test_names_of_processes(changed: dict[str, Any], alive: bool, seen: bool | None) -> None:
    """This process's name, with other parts. ``began`` is added to its own."""
    parts = ("id", "start", "namespace", "boot", "machine", "began")
    own: dict[str, Any] = dict(zip(parts, (own_name() or "").split("+"), strict=True))
    changed = {**changed, "began": int(time.time()) + changed.get("began", 0)}
    name = "+".join(map(str, {**own, **changed}.values()))
    assert (is_alive(name), is_seen_alive(name)) == (alive, seen)


@pytest.mark.parametrize(("seconds", "alive"), [(0, True), (-0.9, True), (0.9, True), (-2, False)])
def test_names_of_processes_by_earlier_versions(seconds: float, alive: bool) -> None:
    name = f"{os.getpid()}@{psutil.Process().create_time() + seconds:.2f}"
    assert is_alive(name) == is_seen_alive(name) == alive


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "x",
        "@",
        "1@0.00",
        "1@x",
        "1@nan",
        "9" * 500 + "@1",
        "+",
        "1+2",
        "1+@",
    ],
)
def test_no_names_of_processes(name: str | None) -> None:
    assert is_alive(name) is is_seen_alive(name) is False


@pytest.mark.parametrize("began", ["", "x", "-1", "9" * 5000, "nan"])
def test_processes_elsewhere_that_say_no_time(began: str) -> None:
    name = f"1+2+3+4+5+{began}"
    assert (is_alive(name), is_seen_alive(name)) == (False, None)


@pytest.mark.parametrize("number", [-1, 999_999_999, 10**30])
def test_processes_that_are_not_there_have_no_name(number: int) -> None:
    assert process_name(number) is None


@pytest.mark.parametrize("zombie", [True, False])
def test_a_process_that_has_ended(child: subprocess.Popen[bytes], zombie: bool) -> None:
    name = process_name(child.pid)
    assert is_alive(name)
    assert child.stdin is not None
    child.stdin.close()
    if not zombie:
        child.wait()
    elif hasattr(os, "waitid"):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    else:
        pytest.skip("this system cannot wait for a zombie")
    assert not is_alive(name)
    assert process_name(child.pid) is None


@pytest.mark.parametrize("step", [-1e6, -2.0, 2.0, 1e6])
def test_a_clock_that_is_set_ends_no_process(
    child: subprocess.Popen[bytes], step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, name = own_name(), process_name(child.pid)
    now, booted = time.time, psutil.boot_time()
    monkeypatch.setattr(time, "time", lambda: now() + step)
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: booted + step)
    assert own_name() == own
    assert is_alive(own)
    assert is_alive(name)


def test_folders_are_recognized_until_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    for name in ("a", "known", "z", "inside/b"):
        write_bytes(folder / name, b"", folder=True)
    left: list[set[str]] = []
    unlink = os.unlink

    def noted(path: str, **options: int) -> None:
        left.append({each.name for each in folder.iterdir()})
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", noted)
    remove_folder(folder, last=("known",))
    assert len(left) == 4
    assert all("known" in names for names in left)
    assert left[-1] == {"known"}
    assert not folder.exists()


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_speeds_where_nothing_can_be_written(tmp_path: Path) -> None:
    """An answer goes on without."""
    folder = tmp_path / "file"
    folder.write_text("")
    keep_speed(folder, "model", 3.0)
    assert known_speed(folder, "model") is None


@pytest.mark.parametrize("read", [read_bytes, read_text, read_document, read_picture])
def test_a_failing_disk_is_no_wrong_option(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So commands end with status 1, as for other files."""

    def failing(_path: Path, _mode: str) -> object:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", failing)
    (tmp_path / "a.png").touch()
    with pytest.raises(StorageError, match=r"^\S*a\.png cannot be read: Input"):
        read(tmp_path / "a.png")
    for wrong in ("none.png", "a.png/b", "x" * 300):
        with pytest.raises(OptionError, match="does not exist"):
            read_bytes(tmp_path / wrong)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("é 中 🙂 a\u200db", "é 中 🙂 a\u200db"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("txt.\u202eexe \u2066", r"txt.\u202eexe \u2066"),
        ("a\u2028b\u2029c\ud800", r"a\u2028b\u2029c\ud800"),
    ],
)
def test_text_for_a_terminal_moves_nothing(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_cell_is_one_line() -> None:
    """No name ends its row, or looks like another's."""
    shown = table([["a\nb\tc", "x\u200by"], ["d", "\xadz\U000e0041"]], ("ONE", "TWO"))
    assert shown.split("\n") == [
        "ONE      TWO",
        r"a\nb\tc  x\u200by",
        r"d        \xadz\U000e0041",
    ]


SIZES = {
    **{"512MiB": 512 << 20, "1.5GB": 1_500_000_000, "2 gib": 2 << 30},
    **{"4096": 4096, "3g": 3_000_000_000, 4096: 4096},
}


@pytest.mark.parametrize("text", SIZES)
def test_parse_size(text: str | int) -> None:
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "GB", "8 apples", "-1GB", "0", "nan", "1.2.3MB", True, 1.5, "9" * 400]
)
def test_parse_size_errors(text: object) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@given(st.integers(1, 10**14), st.text(max_size=12))
def test_size_round_trip(count: int, text: str) -> None:
    assert parse_size(format_bytes(count)) == pytest.approx(count, rel=0.06)
    with suppress(OptionError):
        assert parse_size(text) > 0


def test_errors_of_commands_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "./no\x1b[2Jmodel.gguf", "hi"]) != 0
    assert "\x1b" not in capsys.readouterr().err


def test_a_message_names_options_as_its_reader_types_them() -> None:
    ways = f"use {option('ctx', 512)}, {option('ram', '1.5 GB')} or less {option('max_tokens')}"
    error = MemoryBudgetError(ways)
    assert str(error) == 'use ctx=512, ram="1.5 GB" or less max_tokens'
    assert (
        error.told(on_command_line)
        == f"use --ctx 512, --ram {system.quote('1.5 GB')} or less --max-tokens"
    )
    assert spelled(f"try {option('max_tokens', 9)}", in_app) == "try /set max_tokens 9"


def test_an_option_without_a_flag_is_spelled_as_in_python() -> None:
    assert spelled(option("tree_depth", 4), on_command_line) == "tree_depth=4"
    assert spelled(option("thinking", False), on_command_line) == "--thinking off"


def test_an_error_within_another_keeps_its_options_for_the_reader() -> None:
    inner = OptionError(f"{option('seed')} must be at least 0")
    outer = LocalrtError(f"line 2: {inner.marked}")
    assert outer.told(on_command_line) == "line 2: --seed must be at least 0"
    assert str(pickle.loads(pickle.dumps(outer))) == "line 2: seed must be at least 0"
