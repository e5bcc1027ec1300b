"""Runs a server, and ends it when stdin closes, because the benchmark is done or has died.

A process of its own: its arguments are the server's command line. It prints the server's id.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from localrt import system

_GOODBYE_S = 10.0


def main() -> None:
    """Run the server; its exit status becomes this process's."""
    server = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, **system.STOPPABLE
    )
    print(server.pid, flush=True)

    def end() -> None:
        sys.stdin.read()
        try:  # Windows asks through a console, if there is one
            server.send_signal(system.STOP_SIGNAL)
            server.wait(_GOODBYE_S)
        except (OSError, subprocess.TimeoutExpired):
            server.kill()

    threading.Thread(target=end, daemon=True).start()
    os._exit(server.wait() & 255)
