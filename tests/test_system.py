"""What systems do differently, this PC's cores, and what a confined process cannot do."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from localrt import system
from localrt.common.cores import Cores, find_cores
from localrt.common.processes import helper_command
from localrt.system import confined
from localrt.system.windows import count_records

PAGE = 4096


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


@pytest.mark.parametrize("argument", [r"C:\models\a b.gguf", 'say "x"', ""])
def test_a_quoted_argument_arrives_as_it_is(argument: str) -> None:
    command = f"{system.quote(sys.executable)} -c {system.quote('import sys; print(sys.argv[1:])')}"
    command += f" {system.quote(argument)}"
    words = command if os.name == "nt" else shlex.split(command)
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(shown) == [argument]


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


ASKS = re.compile(
    r"""^ *(?:import|from) (?:fcntl|grp|msvcrt|pty|pwd|resource|termios|tty|winreg)\b"""
    r"""|^[^#`\n]*(?:os\.name|sys\.platform|platform\.system|ctypes\.windll|IS_WINDOWS|["']/(?:proc|sys)/)""",
    re.MULTILINE | re.IGNORECASE,
)


def test_no_other_room_asks_for_the_system() -> None:
    """But what describes other PCs, which are like this one unless it is said."""
    root = Path(__file__).parents[1]
    rooms = ("localrt", "models", "offload", "quant", "speculative", "tui")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]
    files = [path for path in files if path.parent != root / "localrt/system"]
    found = {path.name for path in files if ASKS.search(path.read_text(encoding="utf-8"))}
    assert found == {"describe_pc.py", "machine.py"}


CPU = "sys/devices/system/cpu"


def machine(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def siblings(*groups: str) -> dict[str, object]:
    """Topology files of physical cores, each written as Linux lists its logical cores."""
    files = {}
    for group in groups:
        first, _, last = group.replace(",", "-").partition("-")
        for number in {first, last or first}:
            files[f"{CPU}/cpu{number}/topology/thread_siblings_list"] = group
    return files


def each(name: str, *values: int) -> dict[str, object]:
    return {f"{CPU}/cpu{number}/{name}": value for number, value in enumerate(values)}


CLOCK = "cpufreq/cpuinfo_max_freq"
ALONE_8 = siblings(*map(str, range(8)))
RYZEN_5600 = siblings(*(f"{n},{n + 6}" for n in range(6)))  # two threads a core
CORE_12700 = {  # 8 performance cores of two threads, 4 efficiency cores
    **siblings(*(f"{n}-{n + 1}" for n in range(0, 16, 2)), *map(str, range(16, 20))),
    "sys/devices/cpu_core/cpus": "0-15",
    "sys/devices/cpu_atom/cpus": "16-19",
    **each(CLOCK, *[4_900_000] * 16, *[3_600_000] * 4),
}
RYZEN_8500 = {  # Zen 4 and Zen 4c
    **siblings(*(f"{n}-{n + 1}" for n in range(0, 12, 2))),
    **each(CLOCK, *[5_000_000] * 4, *[3_700_000] * 8),
}
RK3588 = {**ALONE_8, **each("cpu_capacity", 397, 397, 397, 397, 1024, 1024, 1024, 1024)}
THREE_KINDS = {**ALONE_8, **each("cpu_capacity", 310, 310, 310, 310, 750, 750, 750, 1024)}
NO_CAPACITY = {**ALONE_8, **each(CLOCK, *[1_400_000] * 4, *[2_800_000] * 4)}


@pytest.mark.parametrize(
    ("files", "allowed", "cores"),
    [
        (RYZEN_5600, range(12), Cores(6, 0, 6)),
        (RYZEN_5600, {0, 6, 1}, Cores(2, 0, 2)),
        (CORE_12700, range(20), Cores(8, 4, 8)),
        (CORE_12700, {0, 1, 2, 16}, Cores(2, 1, 2)),
        (CORE_12700, range(16, 20), Cores(4, 0, 4)),  # the efficiency cores are all it has
        (RYZEN_8500, range(12), Cores(6, 0, 6)),
        (RK3588, range(8), Cores(4, 4, 4)),
        (RK3588, {0, 1, 7}, Cores(1, 2, 1)),
        (THREE_KINDS, range(8), Cores(4, 4, 4)),
        (NO_CAPACITY, range(8), Cores(4, 4, 4)),
        ({**ALONE_8, **each("cpu_capacity", 1024, 850)}, range(8), Cores(8, 0, 8)),
        ({}, range(2), Cores(2, 0, 2)),  # a virtual machine that shows nothing
    ],
)
def test_find_cores(
    tmp_path: Path, files: Mapping[str, object], allowed: range | set[int], cores: Cores
) -> None:
    assert find_cores(machine(tmp_path, files), set(allowed)) == cores


V1, V2 = "sys/fs/cgroup/cpu", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("groups", "files", "threads"),
    [
        ("0::/app/worker", {f"{V2}/app/cpu.max": "300000 100000"}, 3),  # a parent's limit binds
        ("0::/", {f"{V2}/cpu.max": "20000 100000"}, 1),
        (
            "3:cpu,cpuacct:/docker/abc",  # a folder of the host
            {f"{V1}/cpu.cfs_quota_us": 250_000, f"{V1}/cpu.cfs_period_us": 50_000},
            5,
        ),
        ("0::/", {f"{V2}/cpu.max": ""}, 8),
    ],
)
def test_limited_cpu_time(
    tmp_path: Path, groups: str, files: Mapping[str, object], threads: int
) -> None:
    root = machine(tmp_path, {**ALONE_8, **files, "proc/self/cgroup": groups})
    assert find_cores(root, set(range(8))) == Cores(8, 0, threads)


def windows(*cores: tuple[int, int, int]) -> bytes:
    """Records of (efficiency class, mask, group)."""
    form = "<IIBB20xHQH6x"
    return b"".join(struct.pack(form, 0, 48, 1, kind, 1, mask, at) for kind, mask, at in cores)


@pytest.mark.parametrize(
    ("records", "allowed", "processor", "counts"),
    [
        (windows((1, 3, 0), (1, 12, 0), (0, 16, 0)), 31, "Intel64, GenuineIntel", (2, 1)),
        (windows((1, 3, 0), (0, 12, 0)), 15, "AMD64, AuthenticAMD", (2, 0)),
        (windows((0, 3, 0), (0, 3, 1)), 3, "AMD64, AuthenticAMD", (2, 0)),
        (b"", 3, "", (0, 0)),
    ],
)
def test_windows_records(
    records: bytes, allowed: int, processor: str, counts: tuple[int, int]
) -> None:
    assert count_records(records, allowed, processor) == counts


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have limits alone")
SECCOMP, LANDLOCK = "(seccomp)", "(Landlock)"
# What bans it, and what is done.
BANNED = [
    (SECCOMP, "socket.socket()"),
    (SECCOMP, "os.execv('/bin/true', ['true'])"),
    (SECCOMP, "os.fork() or os._exit(0)"),
    (SECCOMP, "call(0, 101 if x86 else 117, 0, 0, 0, 0)"),  # ptrace: be traced
    (SECCOMP, "call(0, 425, 1, ctypes.create_string_buffer(120))"),  # io_uring
    (SECCOMP, "call(0, 437, -100, b'.', struct.pack('QQQ', 0, 0, 0), 24)"),  # openat2
    (SECCOMP, "os.kill(os.getppid(), 0)"),
    (SECCOMP, "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)"),
    # What disturbs others: the parent's priority, scheduling, cores and input.
    (SECCOMP, "os.setpriority(os.PRIO_PROCESS, os.getppid(), 0)"),
    (SECCOMP, "os.nice(0)"),
    (SECCOMP, "os.sched_setscheduler(os.getppid(), os.SCHED_OTHER, os.sched_param(0))"),
    (SECCOMP, "os.sched_setparam(os.getppid(), os.sched_param(0))"),
    (SECCOMP, "os.sched_setaffinity(os.getppid(), [0])"),
    (SECCOMP, "call(0, 314 if x86 else 274, 0, None, 0)"),  # sched_setattr
    (SECCOMP, "call(0, 251 if x86 else 30, 1, os.getppid(), 0)"),  # ioprio_set
    (SECCOMP, "fcntl.ioctl(0, 0x5412, b'x')"),  # type into the terminal
    (SECCOMP, "fcntl.ioctl(0, 0x8901, b'1234')"),  # have signals sent to others
    (SECCOMP, "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())"),
    (SECCOMP, "fcntl.fcntl(0, fcntl.F_SETSIG, 9)"),
    (SECCOMP, "fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)"),
    (SECCOMP, "fcntl.lockf(0, fcntl.LOCK_UN)"),
    (SECCOMP, "fcntl.flock(0, fcntl.LOCK_UN)"),
    # What watches others: files, the kernel's log, processes, the system.
    (SECCOMP, "call(0, 253) if x86 else call(0, 26, 0)"),  # inotify_init
    (SECCOMP, "call(0, 294 if x86 else 26, 0)"),  # inotify_init1
    (SECCOMP, "call(0, 254 if x86 else 27, 0, b'.', 1)"),  # inotify_add_watch
    (SECCOMP, "call(0, 300 if x86 else 262, 0, 0)"),  # fanotify_init
    (SECCOMP, "call(0, 103 if x86 else 116, 10, None, 0)"),  # syslog
    (SECCOMP, "call(0, 298 if x86 else 241, None, 0, 0, 0, 0)"),  # perf_event_open
    (SECCOMP, "call(0, 310 if x86 else 270, os.getppid(), None, 0, None, 0, 0)"),  # its memory
    (SECCOMP, "call(0, 312 if x86 else 272, os.getppid(), os.getppid(), 0, 0, 0)"),  # kcmp
    (SECCOMP, "call(0, 434, os.getppid(), 0)"),  # pidfd_open
    # What root might do, or what has been a way into the kernel.
    (SECCOMP, "call(0, 169 if x86 else 142, 0, 0, 0, None)"),  # reboot
    (SECCOMP, "call(0, 170 if x86 else 161, None, 0)"),  # sethostname
    (SECCOMP, "call(0, 165 if x86 else 40, None, None, None, 0, None)"),  # mount
    (SECCOMP, "os.setuid(os.getuid())"),
    (SECCOMP, "os.chroot(folder)"),
    (SECCOMP, "os.chdir(folder)"),
    (SECCOMP, "os.unshare(0) if hasattr(os, 'unshare') else call(0, 272 if x86 else 97, 0)"),
    (SECCOMP, "call(0, 135 if x86 else 92, 0xFFFFFFFF)"),  # personality
    (SECCOMP, "call(0, 250 if x86 else 219, 0, 0, 0, 0, 0)"),  # keyctl
    (SECCOMP, "call(0, 321 if x86 else 280, 0, None, 0)"),  # bpf
    (SECCOMP, "call(0, 323 if x86 else 282, 0)"),  # userfaultfd
    (SECCOMP, "call(0, 157 if x86 else 167, 15, b'name', 0, 0, 0)"),  # prctl
    (SECCOMP, "os.memfd_create('a')"),
    (SECCOMP, "open(inside, 'wb')"),
    (SECCOMP, "open(inside, 'r+b')"),
    (SECCOMP, "os.truncate(inside, 0)"),
    (SECCOMP, "os.rename(inside, folder + '/other')"),
    (SECCOMP, "os.unlink(inside)"),
    (SECCOMP, "os.link(inside, folder + '/other')"),
    (SECCOMP, "os.mkdir(folder + '/new')"),
    (SECCOMP, "os.chmod(inside, 0o600)"),
    (LANDLOCK, "open(outside, 'rb')"),
    (LANDLOCK, "os.listdir('/')"),
]
STILL = [
    *("open(inside, 'rb').read()", "os.listdir(folder)", "os.stat(outside)", "os.getcwd()"),
    *("os.isatty(0)", "os.set_inheritable(0, True)", "os.close(os.dup(0))", "os.cpu_count()"),
    *("time.sleep(0)", "time.localtime()", "select.select([], [], [], 0)", "os.urandom(8)"),
    *("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "resource.getrusage(0)"),
    *("signal.setitimer(signal.ITIMER_PROF, 60)", "len(bytearray(1 << 28))", "os.uname()"),
    *("signal.signal(signal.SIGTERM, signal.SIG_DFL)", "lacks(1000)"),
]
TRY = """
import ctypes, errno, fcntl, json, os, platform, resource, select, signal, socket, struct, sys, time
from localrt.system.confined import confine
folder, outside, *codes = sys.argv[1:]
inside, x86 = folder + "/file", platform.machine() == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
def call(fine, number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0: raise OSError(ctypes.get_errno(), "refused")
def lacks(number):  # for which a libc takes an older call
    assert libc.syscall(number) < 0 and ctypes.get_errno() == errno.ENOSYS
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


ONLY_X86 = {
    *("access", "dup2", "getdents", "lstat", "open", "poll", "readlink", "select", "stat", "time")
}


def names_of(ranges: str, header: str) -> set[str]:
    """The names of calls in a header of Linux."""
    path = Path("/usr/include", header)
    if not path.is_file():
        pytest.skip(f"needs {path}")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text(encoding="ascii"))
    named = {int(number): "newfstatat" if name == "fstatat" else name for name, number in lines}
    ends = [each.split("-") for each in ranges.split()]
    return {named.get(n, str(n)) for each in ends for n in range(int(each[0]), int(each[-1]) + 1)}


@pytest.mark.parametrize(
    ("x86", "arm"),
    [*confined._CALLS, *((str(x86), str(arm or "")) for (x86, arm), *_ in confined._CHECKED)],
)
def test_both_processors_are_allowed_the_same(x86: str, arm: str) -> None:
    """But calls that newer processors never had."""
    allowed = names_of(x86, "x86_64-linux-gnu/asm/unistd_64.h")
    assert allowed - ONLY_X86 == names_of(arm, "asm-generic/unistd.h")


# On a processor whose calls are not known; everything may be read.
LANDLOCK_ALONE = """
import os, sys
from localrt.system.confined import confine
os.uname = lambda: os.uname_result(["", "", "", "", "other"])
print(*confine(["/"]), flush=True)
"""


@needs_linux
@pytest.mark.parametrize("code", ["os.execv('/bin/true', ['true'])", "open(sys.argv[1], 'wb')"])
def test_what_landlock_alone_bans(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LANDLOCK_ALONE + code, str(tmp_path / "new")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    if LANDLOCK not in done.stdout:
        pytest.skip(f"this machine has no {LANDLOCK}")
    assert "PermissionError" in done.stderr


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
