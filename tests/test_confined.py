"""What a confined process cannot do any more: each ban tried for real, in a process of its own."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from localrt.common.processes import helper_command

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have limits alone")
SECCOMP, LANDLOCK = "(seccomp)", "(Landlock)"
# What bans it, and what is done.
BANNED = [
    (SECCOMP, "socket.socket()"),
    (SECCOMP, "socket.socketpair()"),
    (SECCOMP, "os.execv('/bin/true', ['true'])"),
    (SECCOMP, "os.fork() or os._exit(0)"),
    (SECCOMP, "subprocess.run(['/bin/true'])"),
    (SECCOMP, "os.posix_spawn('/bin/true', ['true'], {})"),
    (SECCOMP, "call(0, 101 if x86 else 117, 0, 0, 0, 0)"),  # ptrace: be traced
    (SECCOMP, "call(0, 425, 1, ctypes.create_string_buffer(120))"),  # io_uring
    (SECCOMP, "call(0, 437, -100, b'.', struct.pack('QQQ', 0, 0, 0), 24)"),  # openat2
    (SECCOMP, "os.kill(os.getppid(), 0)"),
    (SECCOMP, "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)"),
    (SECCOMP, "open(inside, 'wb')"),
    (SECCOMP, "open(inside, 'ab')"),
    (SECCOMP, "open(inside, 'r+b')"),
    (SECCOMP, "open(folder + '/new', 'xb')"),
    (SECCOMP, "os.truncate(inside, 0)"),
    (SECCOMP, "os.rename(inside, folder + '/other')"),
    (SECCOMP, "os.unlink(inside)"),
    (SECCOMP, "os.link(inside, folder + '/other')"),
    (SECCOMP, "os.symlink(inside, folder + '/other')"),
    (SECCOMP, "os.mkdir(folder + '/new')"),
    (SECCOMP, "os.chmod(inside, 0o600)"),
    (SECCOMP, "os.setxattr(inside, 'user.a', b'')"),
    (SECCOMP, "os.utime(inside)"),
    (LANDLOCK, "open(outside, 'rb')"),
    (LANDLOCK, "os.listdir('/')"),
]
STILL = ["open(inside, 'rb').read()", "os.listdir(folder)", "os.stat(outside)", "bytearray(99999)"]
TRY = """
import ctypes, json, os, platform, resource, socket, struct, subprocess, sys
from localrt.system.confined import confine
folder, outside, *codes = sys.argv[1:]
inside, x86 = folder + "/file", platform.machine() == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
def call(fine, number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0: raise OSError(ctypes.get_errno(), "refused")
found = {"": confine([folder])}
for code in codes:
    try:
        eval(code)
        found[code] = ""
    except BaseException as error:
        found[code] = type(error).__name__
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each attempt, by its code; "" is what is in force."""
    folder, outside = tmp_path_factory.mktemp("inside"), tmp_path_factory.mktemp("outside") / "file"
    (folder / "file").write_bytes(b"0")
    outside.write_bytes(b"1")
    codes = [code for _, code in BANNED] + STILL
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(folder), str(outside), *codes],
        capture_output=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    assert [each.name for each in folder.iterdir()] == ["file"]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@needs_linux
@pytest.mark.parametrize(("ban", "code"), BANNED, ids=[code for _, code in BANNED])
def test_what_is_banned(ban: str, code: str, tried: dict[str, str]) -> None:
    if not any(ban in each for each in tried[""]):
        pytest.skip(f"this machine has no {ban}")
    assert tried[code] == "PermissionError"


@needs_linux
def test_what_the_kernel_has_is_used(tried: dict[str, str]) -> None:
    libc = ctypes.CDLL(None)
    landlock = libc.syscall(444, None, ctypes.c_size_t(0), 1) > 0
    filters = "Seccomp_filters" in Path("/proc/self/status").read_text(encoding="ascii")
    for ban, here in ((LANDLOCK, landlock), (SECCOMP, filters)):
        assert any(ban in each for each in tried[""]) == here


@needs_linux
@pytest.mark.parametrize("code", STILL)
def test_what_a_parser_still_does(code: str, tried: dict[str, str]) -> None:
    assert tried[code] == ""


@pytest.mark.skipif(sys.platform == "win32", reason="limit_helper limits it from outside")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(len(bytearray(1 << 20)))", 0),
        pytest.param("bytearray(1 << 30)", 1, marks=needs_linux),
        ("while True: pass", -getattr(signal, "SIGPROF", 0)),
        ("open('written', 'wb', buffering=0).write(b'0')", 1),
    ],
)
def test_limits(code: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(
        "from localrt.system.confined import limiter\n"
        f"def main():\n    limiter()(64 << 20, 0.5)\n    {code}\n"
    )
    command = helper_command("limited", folders=[tmp_path])
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == status, done.stderr
