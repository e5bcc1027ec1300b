"""What operating systems do differently, behind one set of functions; one file per system.

Nothing else in the package uses what only some systems have (``tests/test_system.py`` looks).

A *descriptor* is what ``os.open`` returns. Offsets and sizes are in bytes.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from localrt.system.windows import *  # noqa: F403
else:
    from localrt.system.posix import *  # noqa: F403
