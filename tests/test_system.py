"""What systems do differently, and that nobody else asks which system it is."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from localrt import system

PAGE = 4096


def pages(count: int) -> np.ndarray:
    """So many pages of memory at a page boundary."""
    return np.frombuffer(system.map_zeros(count * PAGE), np.uint8)


@pytest.mark.parametrize("direct", [False, True])
def test_reads_at_offsets_by_several_threads(tmp_path: Path, direct: bool) -> None:
    content = np.random.default_rng(0).integers(0, 256, 64 * PAGE, dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(content.tobytes())
    descriptor, _ = system.open_file(path, direct=direct)
    try:

        def read(at: int) -> bool:
            out = pages(1)
            assert system.read_at(descriptor, memoryview(out), at * PAGE) == PAGE
            return bool((out == content[at * PAGE : (at + 1) * PAGE]).all())

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, [*range(64), *reversed(range(64))]))
        assert system.read_at(descriptor, memoryview(pages(1)), 64 * PAGE) == 0
    finally:
        os.close(descriptor)


def test_a_file_opened_by_python_is_read_at_offsets_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with path.open("rb", buffering=0) as file:
        out = bytearray(4)
        assert system.read_at(file.fileno(), memoryview(out), 8) == 2
        assert out[:2] == b"89"


def test_a_temporary_file_is_written_and_gone(tmp_path: Path) -> None:
    descriptor, direct = system.open_temporary(tmp_path, "kv-")
    try:
        system.allocate(descriptor, 0, 4 * PAGE)
        data = pages(2)
        data[:] = 7
        assert system.write_at(descriptor, memoryview(data), 2 * PAGE) == 2 * PAGE
        system.drop_cached(descriptor, written=True)
        out = pages(2)
        assert (
            system.read_at(direct if direct >= 0 else descriptor, memoryview(out), 2 * PAGE)
            == 2 * PAGE
        )
        assert (out == 7).all()
    finally:
        for each in {descriptor, direct} - {-1}:
            os.close(each)
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    for direct in (False, True):
        with pytest.raises(FileNotFoundError):
            system.open_file(tmp_path / "nothing", direct=direct)


def test_zeros_are_at_a_page_boundary_and_can_be_written() -> None:
    memory = np.frombuffer(system.map_zeros(1 << 22, large_pages=True), np.uint8)
    assert memory.ctypes.data % PAGE == 0
    assert not memory[:: PAGE // 2].any()
    memory[-1] = 1


def test_reserved_memory_grows_where_it_is() -> None:
    memory = np.frombuffer(system.reserve_zeros(1 << 30), np.uint8)
    for size in (1, 3 * PAGE, 3 * PAGE + 1):
        system.commit(memory.ctypes.data, size)
        assert not memory[size - 1]
        memory[size - 1] = 7
    assert memory[[0, 3 * PAGE - 1]].tolist() == [7, 7]


@pytest.mark.parametrize("argument", ["plain", "two words", r"C:\models\a b.gguf", 'say "x"', ""])
def test_a_quoted_argument_arrives_as_it_is(argument: str) -> None:
    command = f"{system.quote(sys.executable)} -c {system.quote('import sys; print(sys.argv[1:])')}"
    command += f" {system.quote(argument)}"
    words = command if os.name == "nt" else shlex.split(command)
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(shown) == [argument]


@pytest.mark.skipif(os.name != "nt", reason="Windows has it in a folder of its own")
def test_the_driver_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYSTEMROOT", str(tmp_path))
    assert not system.has_nvidia_driver()
    (tmp_path / "System32").mkdir()
    (tmp_path / "System32" / "nvcuda.dll").touch()
    assert system.has_nvidia_driver()


@pytest.mark.skipif(os.name != "nt", reason="helpers limit themselves elsewhere")
def test_a_helper_takes_no_more_memory_than_it_may() -> None:
    code = "input(); print(len(bytearray(1 << 29)))"
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    command = [system.bare_python(), "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none) as helper:
        assert system.limit_helper(helper, 1 << 28)
        shown, _ = helper.communicate(b"\n", timeout=60)
    assert (shown, helper.returncode) == (b"", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
@pytest.mark.parametrize(
    ("host", "to", "family"),
    [
        ("127.0.0.1", "127.0.0.1", socket.AF_INET),
        ("127.0.0.1", "::ffff:127.0.0.1", socket.AF_INET6),
        ("::1", "::1", socket.AF_INET6),
    ],
)
@pytest.mark.parametrize("answers", [True, False])
def test_own_client(
    host: str, to: str, family: int, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has gone is none, though Linux lists its connection as root's for a while.

    Not every kernel answers questions about one connection.
    """
    if not answers:
        monkeypatch.delattr(socket, "AF_NETLINK")
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=kind)
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with server, socket.socket(family) as client:
        client.connect((to, server.getsockname()[1]))
        there, address = server.accept()
        with there:
            ends = address[:2], there.getsockname()[:2]
            assert system.is_own_client(*ends)
            assert not system.is_own_client((host, 1), ends[1])
            assert not system.is_own_client(None, ends[1])
            with monkeypatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: 12345)
                assert system.is_own_client(*ends) == (os.getuid() == 0)
            client.close()
            assert system.is_own_client(*ends) is False


ROOMS = ("localrt", "models", "offload", "quant", "speculative", "tui")
SOME_HAVE = {"fcntl", "grp", "msvcrt", "pty", "pwd", "resource", "termios", "tty", "winreg"}
ASK = {"ctypes.WinDLL", "ctypes.windll", "os.name", "platform.system", "sys.platform"}
ASK |= {"system.IS_WINDOWS"}
WORDS = re.compile("|".join(map(re.escape, SOME_HAVE | ASK | {"platform", "/proc/", "/sys/"})))
ALLOWED = {
    # Other PCs, which are like this one unless it is said.
    "localrt/planning/describe_pc.py",
    "localrt/planning/machine.py",
}


def asks_for_the_system(tree: ast.AST) -> bool:
    """Whether code imports what only some systems have, or asks which one it is on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = any(name.name in SOME_HAVE for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            wanted = {f"{node.module}.{name.name}" for name in node.names}
            found = node.module in SOME_HAVE or not wanted.isdisjoint(ASK)
        elif isinstance(node, ast.Attribute):
            found = isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in ASK
        else:
            text = node.value if isinstance(node, ast.Constant) else None
            found = isinstance(text, str) and text.startswith(("/proc/", "/sys/"))
        if found:
            return True
    return False


def test_no_other_room_asks_for_the_system() -> None:
    root = Path(__file__).parents[1]
    files = {
        str(path.relative_to(root).as_posix()): path
        for room in ROOMS
        for path in (root / room).rglob("*.py")
        if path.parent != root / "localrt/system"
    }
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    found = {name: text for name, text in texts.items() if WORDS.search(text)}
    assert {name for name, text in found.items() if asks_for_the_system(ast.parse(text))} == ALLOWED
