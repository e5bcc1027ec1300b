"""The parent's end of a benchmark child: start it, ask it, and be sure that it ends.

Each engine gets a process of its own, so that its peak memory is its own and a crash is only its
own. It does not know what is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localrt.closing import Closing
from localrt.errors import LocalrtError

__all__ = ["ChildError", "ChildProcess", "child_command"]


class ChildError(LocalrtError):
    """A child refused or failed. ``kind`` is the error's class there, or ``"died"``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def child_command(module: str = "localrt.bench.child", python: str = sys.executable) -> list[str]:
    """The command that runs ``main`` of ``module`` with this localrt, installed or a checkout."""
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main()"
    return [python, "-c", start, root]


class ChildProcess(Closing):
    """A running child. As a context manager it is gone at the end, whatever happened."""

    def __init__(self, command: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # In a session of its own: Ctrl+C reaches the parent alone, which then ends the children.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, do: str, **values: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            ChildError: the child could not do it, or died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildError("died", self._last_words())
        message = json.loads(line)
        if "error" in message:
            raise ChildError(message["error"], message["message"])
        return message["answer"]

    def close(self) -> None:
        """End the child and free what it holds. Never waits for its work."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # a request that was never read
                    pass
        self._stderr.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        if code == -9:
            return "the process was killed: most likely it ran out of memory"
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"the process died with code {code}" + (f": {lines[-1].strip()}" if lines else "")
