"""What operating systems do differently, behind one set of functions; a file a system.

Nothing else in the package uses what only some systems have (``tests/test_system.py`` looks).

A *descriptor* is what ``os.open`` returns. Offsets and sizes are in bytes.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from localrt.system.windows import (
        OWN_GROUP,
        STOP_SIGNALS,
        allocate,
        ask_to_stop,
        drop_cached,
        is_broken_pipe,
        join,
        map_zeros,
        open_file,
        open_temporary,
        quote,
        read_at,
        sync_folder,
        use_utf8_in_pipes,
        write_at,
    )
else:
    from localrt.system.posix import (
        OWN_GROUP,
        STOP_SIGNALS,
        allocate,
        ask_to_stop,
        drop_cached,
        is_broken_pipe,
        join,
        map_zeros,
        open_file,
        open_temporary,
        quote,
        read_at,
        sync_folder,
        use_utf8_in_pipes,
        write_at,
    )

__all__ = [
    "OWN_GROUP",
    "STOP_SIGNALS",
    "allocate",
    "ask_to_stop",
    "drop_cached",
    "is_broken_pipe",
    "join",
    "map_zeros",
    "open_file",
    "open_temporary",
    "quote",
    "read_at",
    "sync_folder",
    "use_utf8_in_pipes",
    "write_at",
]
