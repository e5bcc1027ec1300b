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

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # of BPF
_ALLOW, _DENY = (_RETURN, 0, 0, 0x7FFF0000), (_RETURN, 0, 0, 0x50001)  # EPERM
_LACKING, _NEWER = (_RETURN, 0, 0, 0x50026), 470  # ENOSYS, for which a libc uses an older call
_ALL, _WRITE = 0xFFFFFFFF, 0o3103  # bits of an argument; those of `open` that are not for reading
_PROCESSORS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # and their numbers in Linux
# The calls that are allowed, on each of these processors. All others are not.
_CALLS = (
    ("0-1 3 8 17 19-20 295 327", "57 62-67 69 286"),  # read, write, seek in, close what is open
    # Which files there are, and what they are.
    ("4-6 21 78-79 89 137-138 217 262 267 269 332 439", "17 43-44 48 61 78-80 291 439"),
    ("9-12 25-28 324 462", "214-216 222 226-227 232-233 283 462"),  # its own memory
    ("13-15 127 131 219", "128 132 134-136 139"),  # what it does when it gets a signal
    ("7 23-24 35 202 230 270-271", "72-73 98 101 115 124"),  # wait for a file, a lock, a time
    ("36 38 96 100 201 228-229", "102-103 113-114 153 169"),  # clocks, and a timer that ends it
    ("39 63 99 102 104 107-108 110 186", "160 172-179"),  # who it is, and the machine
    ("97-98 160 204 309 318", "123 163-165 168 278"),  # its limits, cores, and random numbers
    ("218 273 334", "96 99 293"),  # what a libc notes of a thread
    ("32-33 292 60 231", "23-24 93-94"),  # further numbers for what is open; end
)
# Calls that are allowed if these bits of an argument, by its index, have one of these values.
_CHECKED = (
    ((2, None), 1, _WRITE, "0"),  # files are opened to be read,
    ((257, 56), 2, _WRITE, "0"),
    ((302, 261), 0, _ALL, "0"),  # limits are its own,
    ((16, 29), 1, _ALL, "0x5401 0x5413 0x5450-0x5451 0x802C542A"),  # terminals are looked at,
    ((72, 25), 1, _ALL, "0-4 1030"),  # and what is open gets no owner, lock or lease
)


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

    It may read the interpreter and files in or below ``readable``, write to what is open, and use
    its own memory. Call it before there are threads.
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
    if (processor := os.uname().machine) in _PROCESSORS and sys.maxsize > 1 << 32:
        column = [*_PROCESSORS].index(processor)
        # The call's number is at 0, the processor's at 4, and arguments are from 16 on.
        code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _PROCESSORS[processor]), _DENY, (_LOAD, 0, 0, 0)]
        for calls in _CALLS:
            code += _allowed(calls[column])
        for numbers, argument, bits, values in _CHECKED:
            if (call := numbers[column]) is not None:
                test = [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, bits), *_allowed(values)]
                code += [(_EQUAL, 0, len(test) + 1, call), *test, _DENY]
        code += [(_AT_LEAST, 0, 1, _NEWER), _LACKING, _DENY]
        packed = b"".join(struct.pack("=HBBI", *each) for each in code)
        text = ctypes.create_string_buffer(packed)
        program = (ctypes.c_uint64 * 2)(len(code), ctypes.addressof(text))
        if libc.prctl(22, 2, ctypes.addressof(program), 0, 0) == 0:
            found.append("no network, programs or written files (seccomp)")
    return found


def _allowed(ranges: str) -> list[tuple[int, int, int, int]]:
    """Instructions that allow the call if what was loaded is in one of these ranges."""
    code = []
    for first, _, last in (each.partition("-") for each in ranges.split()):
        end = int(last or first, 0) + 1
        code += [(_AT_LEAST, 0, 2, int(first, 0)), (_AT_LEAST, 1, 0, end), _ALLOW]
    return code
