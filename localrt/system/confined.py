"""Sandbox of a process that reads strangers' files: limits, and on Linux seccomp and Landlock.

What the system or a container does not offer is skipped; the functions return what is in force.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of BPF
_ALLOW, _DENY = (_RETURN, 0, 0, 0x7FFF0000), (_RETURN, 0, 0, 0x50001)  # EPERM
_WRITE, _OTHER, _TYPE = (_ANY_BIT, 0o3103), (_ANY_BIT, 0xFFFFFFFF), (_EQUAL, 0x5412)
# Of each processor: its audit number; calls that are denied with some values of an argument, by the
# argument's index (opening files for more than reading, limits of another process, typing into the
# terminal); calls that are always denied (sockets and shared memory, threads, processes and
# signals, mounts, keys, files' names, sizes and rights, io_uring, bpf and the like).
_CALLS = {
    "x86_64": (
        *(0xC000003E, {2: (1, *_WRITE), 257: (2, *_WRITE), 302: (0, *_OTHER), 16: (1, *_TYPE)}),
        "29-31 41-59 62 64-71 76-77 82-88 90-94 101 129 132-133 155 161 165-166 188-190 197-200 "
        "234-235 240 248-250 258-261 263-266 268 272 280 285 288 297-298 304 307-308 310-311 316 "
        "321-323 424-435 437-438 452 463 466",
    ),
    "aarch64": (
        *(0xC00000B7, {56: (2, *_WRITE), 261: (0, *_OTHER), 29: (1, *_TYPE)}),
        "5-7 14-16 33-41 45-47 51-55 88 97 117 129-131 138 180 186-212 217-221 240-242 265 268-271 "
        "276 280-282 424-435 437-438 452 463 466",
    ),
}


def limiter() -> Callable[[int, float], list[str]]:
    """Return a function that limits this process to so many further bytes of memory and seconds of
    processor time, and returns the limits in force. Exceeding the time ends the process.
    """
    try:
        import resource
    except ImportError:  # Windows: the parent process limits this one
        return lambda nbytes, seconds: []
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    memory = None
    with suppress(OSError):  # not Linux
        memory = os.open("/proc/self/statm", os.O_RDONLY)

    def limit(nbytes: int, seconds: float) -> list[str]:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if memory is None:
            return [f"{seconds:g} s"]
        most = int(os.pread(memory, 99, 0).split()[0]) * resource.getpagesize() + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        return [f"{nbytes >> 20} MB", f"{seconds:g} s"]

    return limit


def confine(readable: Iterable[str | Path]) -> list[str]:
    """Forbid this process, for good, what a parser does not need; return the bans in force.

    Forbidden are the network, threads, programs, writing files, and reading files other than the
    interpreter and those in or below ``readable``. Call it before there are threads.
    """
    if sys.platform != "linux":
        return []
    libc, found = ctypes.CDLL(None), []
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges: Landlock and seccomp need it
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)  # of Landlock
    rights = struct.pack("=Q", (1 << min(12 + version, 15)) - 1 if version > 0 else 0)
    rules = libc.syscall(444, rights, ctypes.c_size_t(8), 0)
    for path in map(Path, [sys.executable, *readable] if rules >= 0 else ()):
        with suppress(OSError):  # some of Python's folders for modules do not exist
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            own = 12 if path.is_dir() else 4  # to read files, and to list folders
            libc.syscall(445, rules, 1, struct.pack("=Qi", own, place), 0)
            os.close(place)
    if rules >= 0 and libc.syscall(446, rules, 0) == 0:
        found.append("no other files (Landlock)")
    if (processor := os.uname().machine) in _CALLS and sys.maxsize > 1 << 32:
        number, calls, denied = _CALLS[processor]
        # The call's number is at 0, the processor's at 4, and arguments are from 16 on.
        code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, number), _DENY, (_LOAD, 0, 0, 0)]
        code += [(_AT_LEAST, 0, 1, 0x40000000), _DENY]  # other numbers for the same calls
        for first, _, last in (each.partition("-") for each in denied.split()):
            end = int(last or first) + 1
            code += [(_AT_LEAST, 0, 2, int(first)), (_AT_LEAST, 1, 0, end), _DENY]
        for call, (argument, test, value) in calls.items():
            code += [(_EQUAL, 0, 4, call), (_LOAD, 0, 0, 16 + 8 * argument)]
            code += [(test, 0, 1, value), _DENY, _ALLOW]
        packed = b"".join(struct.pack("=HBBI", *each) for each in (*code, _ALLOW))
        text = ctypes.create_string_buffer(packed)
        program = (ctypes.c_uint64 * 2)(len(code) + 1, ctypes.addressof(text))
        if libc.prctl(22, 2, ctypes.addressof(program), 0, 0) == 0:
            found.append("no network, programs or written files (seccomp)")
    return found
