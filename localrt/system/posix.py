"""Linux and macOS. See ``localrt.system``; other functions are documented here."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import mmap
import os
import shlex
import signal
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

_DIRECT = getattr(os, "O_DIRECT", 0)
_F_NOCACHE = 48  # of macOS
# Errors of file systems that cannot allocate ahead, or sync folders.
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}
_LARGE_PAGE = 1 << 21
_MACOS_UTILITY = 0x11
_MACOS_FEATURES = ["hw.optional.AdvSIMD", "hw.optional.arm.FEAT_DotProd"]
_MACOS_FEATURES += ["hw.optional.arm.FEAT_I8MM"]

ROOT = Path("/")
"""Where ``proc`` and ``sys`` lie, in which Linux describes the machine."""


def open_file(path: Path | str, *, write: bool = False, direct: bool = False) -> tuple[int, bool]:
    """Open a file that exists; return its descriptor, and whether it bypasses the page cache.

    If so, reads and writes must begin and end at multiples of 4096, in memory too.
    """
    flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
    if direct and _DIRECT:
        with suppress(OSError):  # file systems in memory refuse; a missing file fails below
            return os.open(path, flags | _DIRECT), True
    descriptor = os.open(path, flags)
    if direct and sys.platform == "darwin":
        import fcntl

        return descriptor, fcntl.fcntl(descriptor, _F_NOCACHE, 1) != -1
    return descriptor, False


def open_temporary(folder: Path, prefix: str) -> tuple[int, int]:
    """Make a file in ``folder`` that is gone once it is closed, or its process has ended.

    Returns:
        Its descriptor, and a second one that bypasses the page cache, or -1.
    """
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    try:
        second, direct = open_file(name, write=True, direct=True)
        if not direct:
            os.close(second)
        return descriptor, second if direct else -1
    except OSError:
        os.close(descriptor)
        raise
    finally:
        Path(name).unlink()


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from ``offset`` on; return how many bytes were read, 0 at the file's end.

    Several threads may read through one descriptor at once.
    """
    return os.preadv(descriptor, [view], offset)


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write ``data`` from ``offset`` on; return how many bytes were written."""
    return os.pwritev(descriptor, [data], offset)


def allocate(descriptor: int, offset: int, nbytes: int) -> None:
    """Reserve room on the disk, where the file system can.

    Raises:
        OSError: there is none.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def drop_cached(
    descriptor: int, offset: int = 0, nbytes: int = 0, *, written: bool = False
) -> None:
    """Drop pages of a file from the page cache, where that can be asked for; 0 bytes mean all."""
    if hasattr(os, "posix_fadvise"):
        if written:
            os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Make new, renamed and removed files in ``folder`` durable, where the file system can.

    Raises:
        OSError: the disk fails.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder that may be written to, but not read
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def map_zeros(nbytes: int, *, large_pages: bool = False) -> memoryview:
    """Memory of zeros at a page boundary, which takes RAM as it is touched.

    It goes back to the system when the last view of it is gone.

    Raises:
        OSError, ValueError, OverflowError: the system refuses.
    """
    # Shared memory, the default, would count as page cache, and have small pages.
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _LARGE_PAGE:
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)


def reserve_zeros(nbytes: int) -> memoryview:
    """Like ``map_zeros``, but only what ``commit`` has been called for may be used.

    Raises:
        OSError, ValueError, OverflowError: the system refuses.
    """
    return map_zeros(nbytes)


def commit(address: int, nbytes: int) -> None:
    """Let the beginning of a reserved region be used; its contents so far are kept.

    Raises:
        OSError: there is no memory for it.
    """


def resident_nbytes() -> int:
    """Bytes of this process in RAM."""
    with suppress(OSError):  # a system without /proc
        return int(_statm("self")[1]) * mmap.PAGESIZE
    import psutil

    return int(psutil.Process().memory_info().rss)


def unshared_nbytes(process: int) -> int:
    """Bytes in RAM that only ``process`` has; 0 if it has ended, or the system does not say."""
    try:
        _, resident, shared, *_ = _statm(process)
    except OSError:
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def _statm(process: int | str) -> list[str]:
    return Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()


def peak_nbytes() -> int:
    """The most bytes of this process that were in RAM."""
    # Not getrusage at first: its peak outlives exec, so a child would start with its parent's.
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def process_start(number: int) -> str | None:
    """When a process began, as text that no change of the clock changes; None if it has ended."""
    if sys.platform == "darwin":  # what the clock showed then, in struct proc_bsdinfo
        about = ctypes.create_string_buffer(136)
        ask = ctypes.CDLL(None).proc_pidinfo
        size = ask(ctypes.c_int(number), 3, ctypes.c_uint64(0), about, len(about))
        return about.raw[120:].hex() if size == len(about) else None
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # a name may have spaces
    return None if state in "ZX" else fields[18]  # ticks since Linux started


def process_place() -> tuple[str, str, str]:
    """What tells processes with the same id and start apart: the PID namespace (a container has its
    own), the boot and the machine. Empty texts where the system does not say, or need not.
    """
    namespace = boot = machine = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # The text itself is meant to stay on the machine.
        machine = f"{zlib.crc32(Path('/etc/machine-id').read_bytes()):08x}"
    return namespace, boot, machine


def return_free_memory() -> None:
    """Ask for freed memory to be returned to the system, which takes milliseconds.

    glibc keeps freed memory (several megabytes after reading a vocabulary), which counts towards a
    memory limit. Other C libraries return it by themselves, or have no function for it.
    """
    with suppress(OSError, AttributeError):
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
        trim(0)


def pinnable_nbytes(ram: int) -> int | None:
    """Bytes of ``ram`` that may be pinned for a GPU's copies; None where there is no limit."""
    return None


def spilling_nbytes(vram: int) -> int:
    """Bytes of a GPU's ``vram`` to leave free so that its driver moves nothing to RAM."""
    return 0


def allowed_cores() -> set[int] | None:
    """The logical cores that this process may use; None where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def count_cores() -> tuple[int, int]:
    """Fast and slow physical cores; 0 where the system does not say."""
    if sys.platform == "darwin":
        fast = _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu")
        return fast, _sysctl("hw.perflevel1.physicalcpu")
    return 0, 0


def _sysctl(name: str) -> int:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0
    )
    return 0 if failed else value.value


def describe_processor() -> tuple[str, set[str]]:
    """The processor's name and features (spelled as by Linux or macOS), if no file has them."""
    return _describe_mac() if sys.platform == "darwin" else ("", set())


@cache
def _describe_mac() -> tuple[str, set[str]]:
    keys = ["machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    command = ["/usr/sbin/sysctl", *keys, *_MACOS_FEATURES]
    import subprocess  # half a megabyte

    # Unknown keys are errors to sysctl, and the known ones are printed all the same.
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return "", set()
    values = dict(line.split(": ", 1) for line in output.stdout.splitlines() if ": " in line)
    flags = {key for key in _MACOS_FEATURES if values.get(key) == "1"}
    for key in keys[1:]:
        flags.update(values.get(key, "").lower().split())
    return values.get(keys[0], ""), flags


def has_nvidia_driver() -> bool:
    """Whether there is a driver for NVIDIA's GPUs: Linux's own or, on WSL, that of Windows."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def disk_bytes_read() -> int | None:
    """The bytes that this process has read from storage; None if unknown.

    Linux counts page faults on mapped files, buffered reads and direct reads, but not hits in the
    page cache. So all programs are measured alike.
    """
    if sys.platform != "linux":
        return None
    import psutil

    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, OSError, psutil.Error):  # a kernel without task accounting
        return None


def give_way() -> None:
    """Let the calling thread run only while no other program wants its core."""
    with suppress(OSError, AttributeError):  # where it is not allowed
        if sys.platform == "darwin":
            ctypes.CDLL(None).pthread_set_qos_class_self_np(_MACOS_UTILITY, 0)
        else:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def allow_open_files(most: int) -> None:
    """Raise the soft limit of open files to the hard one, but not above ``most``."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems allow fewer than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def write_no_core_file() -> None:
    """Let this process, which may crash, write no core file."""
    import resource

    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_helper(process: subprocess.Popen[bytes], nbytes: int) -> bool:
    """Limit a process's memory to ``nbytes``, unless it does so itself.

    Returns:
        Whether its time has to be limited from outside too.
    """
    return False


def bare_python() -> str:
    """The interpreter, to be started without packages; "" if there is none."""
    return sys.executable


def owns(status: os.stat_result) -> bool:
    """Whether a file of this status belongs to this user, who may then change its mode."""
    return status.st_uid == os.geteuid()


def is_own_client(client: tuple[str, int] | None, server: tuple[str, int]) -> bool | None:
    """Whether this user, or root, has the TCP socket at ``client`` that is connected to ``server``,
    an address of this machine. None where the system does not say; only Linux does.
    """
    if users := _users_of(client or server, server):
        return users <= {0, os.geteuid()}
    # This kernel may lack sock_diag: its list of all sockets takes long if there are many.
    texts = [path.read_text(encoding="ascii") for path in Path("/proc/net").glob("tcp*")]
    rows = [line.split() for text in texts for line in text.splitlines()]
    near, far = _as_listed(*(client or server)), _as_listed(*server)
    # A socket that its process has closed is listed as root's, without an inode.
    users = {int(row[7]) for row in rows if row[1] in near and row[2] in far and row[9] != "0"}
    return bool(users) and users <= {0, os.geteuid()} if texts else None


def _users_of(near: tuple[str, int], far: tuple[str, int]) -> set[int]:
    """Ask Linux which user has a TCP socket (sock_diag(7)); empty if there is no answer."""
    import socket

    if sys.platform != "linux":
        return set()
    hosts = [ipaddress.ip_address(host) for host, _ in (near, far)]
    family = socket.AF_INET if hosts[0].version == 4 else socket.AF_INET6
    head = struct.pack("=IHHIIBBxxI", 72, 20, 1, 0, 0, family, socket.IPPROTO_TCP, 0xFFFFFFFF)
    ends = struct.pack("!HH16s16s", near[1], far[1], *(host.packed for host in hosts))
    with (
        suppress(OSError, AttributeError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel,
    ):
        kernel.send(head + ends + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF))
        answer = kernel.recv(1 << 12)
        # For an unknown socket it answers with an error, or a socket that listens there.
        if struct.unpack_from("=4xH", answer) == (20,) and answer[20:24] == ends[:4]:
            user, inode = struct.unpack_from("=II", answer, 80)
            return {user} if inode else set()
    return set()


def _as_listed(host: str, port: int) -> set[str]:
    """An address as /proc/net/tcp has it, in numbers of four bytes; IPv4 also as IPv6."""
    packed = ipaddress.ip_address(host).packed
    forms = {packed, packed.rjust(6, b"\xff").rjust(16, b"\0")}
    numbers = (struct.unpack(f"={len(form) // 4}I", form) for form in forms)
    return {"".join(map("{:08X}".format, each)) + f":{port:04X}" for each in numbers}


def home_folder() -> Path:
    """The user's folder, even if HOME is empty, which would mean the root of the disk."""
    if os.environ.get("HOME") != "":
        return Path.home()
    import pwd

    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def own_folders(home: Path) -> tuple[Path, Path, Path]:
    """Where the system wants localrt's cache, data and settings."""
    data = home / ".local" / "share"
    return home / ".cache" / "localrt", data / "localrt", home / ".config" / "localrt"


UNIFIED_MEMORY = sys.platform == "darwin"  # of CPU and GPU
IS_WINDOWS = False
"""Whether forecasts for a described PC assume Windows, unless its description says otherwise."""
NVML = "libnvidia-ml.so.1"
"""The name of NVIDIA's library for the state of GPUs."""
LOGOUT_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end an app in a terminal, as far as asyncio can handle them."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a server to shut down gracefully."""
OWN_GROUP: dict[str, Any] = {"start_new_session": True}
"""Options of ``subprocess.Popen`` for a process that Ctrl+C does not reach."""
STOPPABLE: dict[str, Any] = {}
"""Options of ``subprocess.Popen`` for a process that ``STOP_SIGNAL`` will be sent to."""
STOP_SIGNAL = signal.SIGTERM
"""The signal that asks a process to shut down gracefully."""


@contextmanager
def typed_ahead(terminal: int) -> Iterator[bool]:
    """Whether anything typed can be read now, even an unfinished line."""
    import termios
    import tty

    modes = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield bool(select([terminal], [], [], 0)[0])
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, modes)


def use_utf8_in_pipes() -> None:
    """Use UTF-8 in standard streams that are not terminals, which is the default here."""


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder, in place of a file that is there."""
    source.replace(target)


def is_broken_pipe(error: OSError) -> bool:
    """Whether ``error`` means that nobody reads a pipe any more."""
    return isinstance(error, BrokenPipeError)


def display_adapters() -> list[tuple[str, int | None]]:
    """Names of GPUs that the system lists, and the bytes of their own memory; None: unknown."""
    name = _describe_mac()[0] if sys.platform == "darwin" else ""
    return [(name, None)] if name.startswith("Apple") else []


def quote(argument: str) -> str:
    """An argument as it is typed in the system's shell."""
    return shlex.quote(argument)


def split(line: str) -> list[str]:
    """The words of a command line.

    Raises:
        ValueError: a quotation mark is open.
    """
    return shlex.split(line)


def join(command: Iterable[str]) -> str:
    """A command line as it is typed in the system's shell."""
    return shlex.join(command)
