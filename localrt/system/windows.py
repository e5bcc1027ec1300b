"""Windows. See ``localrt.system``, and ``posix`` for what each function promises."""

from __future__ import annotations

import platform
import struct
import sys


def count_records(records: bytes, allowed: int, processor: str) -> tuple[int, int]:
    """Count fast and slow cores in PROCESSOR_RELATIONSHIP records of 64-bit Windows.

    ``allowed`` is the process's mask within the first group of processors.
    """
    classes, at = [], 0
    while at + 42 <= len(records):
        (size,) = struct.unpack_from("<I", records, at + 4)
        mask, group = struct.unpack_from("<QH", records, at + 32)
        if group or not allowed or mask & allowed:
            classes.append(records[at + 9])  # the higher, the faster
        at += max(size, 42)
    if "AuthenticAMD" in processor:  # compact cores do the same work per cycle
        return len(classes), 0
    fast = classes.count(max(classes, default=0))
    return fast, len(classes) - fast


if sys.platform == "win32":
    import ctypes
    import errno
    import io
    import mmap
    import msvcrt
    import os
    import shlex
    import signal
    import subprocess
    import tempfile
    import threading
    import time
    import weakref
    import winreg
    from collections.abc import Iterable
    from contextlib import AbstractContextManager, nullcontext, suppress
    from ctypes import wintypes
    from pathlib import Path
    from typing import Any

    _KERNEL = ctypes.WinDLL("kernel32", use_last_error=True)
    _ROOT = winreg.HKEY_LOCAL_MACHINE
    _READ, _WRITE = 0x80000000, 0x40000000
    _SHARE_ALL = 0x7
    _OPEN_EXISTING = 3
    _NO_BUFFERING, _OVERLAPPED, _DELETE_ON_CLOSE = 0x20000000, 0x40000000, 0x04000000
    _IO_PENDING, _END_OF_FILE, _INVALID_PARAMETER = 997, 38, 87
    _PRIORITY_IDLE = -15
    _MEM_COMMIT, _MEM_RESERVE, _MEM_RELEASE, _PAGE_READWRITE = 0x1000, 0x2000, 0x8000, 4
    _LIMIT_PROCESS_MEMORY, _EXTENDED_LIMITS = 0x100, 9
    _FEATURES = {19: "asimd", 40: "avx2", 41: "avx512f", 43: "asimddp"}  # by PF_ constant
    _INVALID = ctypes.c_void_p(-1).value

    ROOT = Path(os.devnull)

    class _Overlapped(ctypes.Structure):
        _fields_ = [
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        ]

    _KERNEL.CreateFileW.restype = wintypes.HANDLE
    _KERNEL.CreateFileW.argtypes = [
        wintypes.LPCWSTR,
        wintypes.DWORD,
        wintypes.DWORD,
        ctypes.c_void_p,
        wintypes.DWORD,
        wintypes.DWORD,
        wintypes.HANDLE,
    ]
    for _transfer in (_KERNEL.ReadFile, _KERNEL.WriteFile):
        _transfer.argtypes = [
            wintypes.HANDLE,
            ctypes.c_void_p,
            wintypes.DWORD,
            ctypes.POINTER(wintypes.DWORD),
            ctypes.POINTER(_Overlapped),
        ]
    _KERNEL.GetOverlappedResult.argtypes = [
        wintypes.HANDLE,
        ctypes.POINTER(_Overlapped),
        ctypes.POINTER(wintypes.DWORD),
        wintypes.BOOL,
    ]
    _KERNEL.VirtualAlloc.restype = ctypes.c_void_p
    _KERNEL.VirtualAlloc.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        wintypes.DWORD,
        wintypes.DWORD,
    ]
    _KERNEL.VirtualFree.argtypes = [ctypes.c_void_p, ctypes.c_size_t, wintypes.DWORD]
    _KERNEL.CreateEventW.restype = _KERNEL.CreateJobObjectW.restype = wintypes.HANDLE

    class _Thread(threading.local):
        """Has an event for each thread: its transfers wait for it."""

        def __init__(self) -> None:
            self.event = _KERNEL.CreateEventW(None, True, False, None)

    _thread = _Thread()

    def open_file(
        path: Path | str, *, write: bool = False, direct: bool = False
    ) -> tuple[int, bool]:
        access = os.O_RDWR if write else os.O_RDONLY
        if direct:
            # Overlapped: transfers of several threads do not wait for one another.
            handle = _KERNEL.CreateFileW(
                str(path),
                _READ | (_WRITE if write else 0),
                _SHARE_ALL,
                None,
                _OPEN_EXISTING,
                _NO_BUFFERING | _OVERLAPPED,
                None,
            )
            if handle != _INVALID:
                return msvcrt.open_osfhandle(handle, access | os.O_NOINHERIT), True
        return os.open(path, access | os.O_BINARY | os.O_NOINHERIT), False

    def open_temporary(folder: Path, prefix: str) -> tuple[int, int]:
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        os.close(descriptor)
        # The system deletes the file when it is closed.
        return os.open(name, os.O_RDWR | os.O_BINARY | os.O_NOINHERIT | os.O_TEMPORARY), -1

    def read_at(descriptor: int, view: memoryview, offset: int) -> int:
        return _transfer_at(_KERNEL.ReadFile, descriptor, view, offset)

    def write_at(descriptor: int, data: memoryview, offset: int) -> int:
        return _transfer_at(_KERNEL.WriteFile, descriptor, data, offset)

    def _transfer_at(call: object, descriptor: int, view: memoryview, offset: int) -> int:
        if not view.nbytes:
            return 0
        handle = msvcrt.get_osfhandle(descriptor)
        memory = (ctypes.c_char * view.nbytes).from_buffer(view)
        done = wintypes.DWORD(0)
        where = _Overlapped(
            offset=offset & 0xFFFFFFFF, offset_high=offset >> 32, event=_thread.event
        )
        if not call(handle, memory, view.nbytes, ctypes.byref(done), ctypes.byref(where)):
            error = ctypes.get_last_error()
            if error == _IO_PENDING and _KERNEL.GetOverlappedResult(
                handle, ctypes.byref(where), ctypes.byref(done), True
            ):
                return done.value
            if error == _IO_PENDING:
                error = ctypes.get_last_error()
            if error == _END_OF_FILE:
                return 0
            raise ctypes.WinError(error)
        return done.value

    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        """Does nothing: a file that is written past its end grows, without holes."""

    def drop_cached(
        descriptor: int, offset: int = 0, nbytes: int = 0, *, written: bool = False
    ) -> None:
        """Not possible: files that should not be cached are opened as ``direct``."""

    def sync_folder(folder: Path) -> None:
        """Renames are durable with the file system's journal."""

    def map_zeros(nbytes: int, *, large_pages: bool = False) -> memoryview:
        return memoryview(mmap.mmap(-1, nbytes))

    def reserve_zeros(nbytes: int) -> memoryview:
        address = _KERNEL.VirtualAlloc(None, nbytes, _MEM_RESERVE, _PAGE_READWRITE)
        if not address:
            raise ctypes.WinError(ctypes.get_last_error())
        region = (ctypes.c_char * nbytes).from_address(address)
        end = weakref.finalize(region, _KERNEL.VirtualFree, address, 0, _MEM_RELEASE)
        end.atexit = False  # threads may still compute
        return memoryview(region).cast("B")

    def commit(address: int, nbytes: int) -> None:
        if nbytes and not _KERNEL.VirtualAlloc(address, nbytes, _MEM_COMMIT, _PAGE_READWRITE):
            raise ctypes.WinError(ctypes.get_last_error())

    def resident_nbytes() -> int:
        return int(_memory_info().rss)

    def unshared_nbytes(process: int) -> int:
        import psutil

        try:
            memory = _memory_info(process)
            return int(min(memory.private, memory.rss))  # private memory may be paged out
        except psutil.Error:
            return 0

    def peak_nbytes() -> int:
        return int(_memory_info().peak_wset)

    def _memory_info(process: int | None = None) -> Any:
        import psutil  # not every command needs it

        return psutil.Process(process).memory_info()

    def process_start(number: int) -> str | None:
        import psutil

        try:
            return f"{psutil.Process(number).create_time():.3f}"  # as the clock showed it then
        except (psutil.Error, ValueError, OverflowError):
            return None

    def process_place() -> tuple[str, str, str]:
        return "", "", ""

    def return_free_memory() -> None:
        """The system's allocator does so by itself."""

    def pinnable_nbytes(ram: int) -> int | None:
        return ram // 2  # the system allows no more, and other programs cannot use it

    def spilling_nbytes(vram: int) -> int:
        return vram // 16  # the driver moves data to RAM before VRAM is full: passes become slow

    def allowed_cores() -> set[int] | None:
        return None

    def count_cores() -> tuple[int, int]:
        size = wintypes.DWORD(0)
        _KERNEL.GetLogicalProcessorInformationEx(0, None, ctypes.byref(size))
        records = ctypes.create_string_buffer(size.value)
        if not _KERNEL.GetLogicalProcessorInformationEx(0, records, ctypes.byref(size)):
            return 0, 0
        own, every = ctypes.c_size_t(0), ctypes.c_size_t(0)
        this = ctypes.c_void_p(-1)
        _KERNEL.GetProcessAffinityMask(this, ctypes.byref(own), ctypes.byref(every))
        return count_records(records.raw[: size.value], own.value, platform.processor())

    def describe_processor() -> tuple[str, set[str]]:
        key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        try:
            with winreg.OpenKey(_ROOT, key) as opened:
                name = str(winreg.QueryValueEx(opened, "ProcessorNameString")[0]).strip()
        except OSError:
            name = ""
        has = _KERNEL.IsProcessorFeaturePresent
        return name, {flag for number, flag in _FEATURES.items() if has(number)}

    def has_nvidia_driver() -> bool:
        root = Path(os.environ.get("SYSTEMROOT", r"C:\Windows"))
        return (root / "System32" / "nvcuda.dll").exists()

    def disk_bytes_read() -> int | None:
        return None  # hits in the page cache are counted too

    def give_way() -> None:
        thread = wintypes.HANDLE(_KERNEL.GetCurrentThread())
        _KERNEL.SetThreadPriority(thread, _PRIORITY_IDLE)

    def allow_open_files(most: int) -> None:
        """Sockets have no limit here."""

    def write_no_core_file() -> None:
        """The system writes none."""

    def limit_helper(process: subprocess.Popen[bytes], nbytes: int) -> bool:
        # JOBOBJECT_EXTENDED_LIMIT_INFORMATION; the job lasts as long as its process.
        limits = struct.pack("<16xI44x48xQ24x", _LIMIT_PROCESS_MEMORY, nbytes)
        job = wintypes.HANDLE(_KERNEL.CreateJobObjectW(None, None))
        _KERNEL.SetInformationJobObject(job, _EXTENDED_LIMITS, limits, len(limits))
        _KERNEL.AssignProcessToJobObject(job, wintypes.HANDLE(int(process._handle)))
        _KERNEL.CloseHandle(job)
        return True

    def bare_python() -> str:
        # A venv's python.exe only starts another process: it would be taken for the helper.
        return getattr(sys, "_base_executable", "") or sys.executable

    def owns(status: os.stat_result) -> bool:
        return False  # access is inherited from the user's folder

    def is_own_client(client: tuple[str, int] | None, server: tuple[str, int]) -> bool | None:
        return None

    def home_folder() -> Path:
        return Path.home()

    def own_folders(home: Path) -> tuple[Path, Path, Path]:
        application = home / "AppData"
        local = Path(os.environ.get("LOCALAPPDATA") or application / "Local") / "localrt"
        roaming = Path(os.environ.get("APPDATA") or application / "Roaming") / "localrt"
        return local / "cache", local / "data", roaming

    UNIFIED_MEMORY = False
    IS_WINDOWS = True
    NVML = "nvml.dll"
    LOGOUT_SIGNALS = ()
    STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK)
    OWN_GROUP: dict[str, Any] = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    STOPPABLE = OWN_GROUP  # a group is asked, not a process
    STOP_SIGNAL = signal.CTRL_BREAK_EVENT

    def typed_ahead(terminal: int) -> AbstractContextManager[bool]:
        return nullcontext(False)  # the console keeps keys and replies apart

    def use_utf8_in_pipes() -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
                stream.reconfigure(encoding="utf-8")

    def replace(source: Path, target: Path) -> None:
        # Refused while somebody, a virus scanner too, has one of them open.
        for pause_s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
            try:
                source.replace(target)
                return
            except PermissionError:
                time.sleep(pause_s)
        source.replace(target)

    def is_broken_pipe(error: OSError) -> bool:
        return error.errno in (errno.EPIPE, errno.EINVAL) and not error.filename

    _DISPLAYS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"

    def display_adapters() -> list[tuple[str, int | None]]:
        found: list[tuple[str, int | None]] = []
        for number in range(16):
            with suppress(OSError), winreg.OpenKey(_ROOT, rf"{_DISPLAYS}\{number:04}") as key:
                name, nbytes = str(winreg.QueryValueEx(key, "DriverDesc")[0]), None
                with suppress(OSError):
                    value = winreg.QueryValueEx(key, "HardwareInformation.qwMemorySize")[0]
                    nbytes = value if isinstance(value, int) and value >> 31 else None
                found.append((name, nbytes))
        return found

    def quote(argument: str) -> str:
        return subprocess.list2cmdline([argument])

    def split(line: str) -> list[str]:
        return [word.strip("\"'") for word in shlex.split(line, posix=False)]

    def join(command: Iterable[str]) -> str:
        return subprocess.list2cmdline(list(command))
