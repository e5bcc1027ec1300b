"""Runs one engine in a child process of the benchmark: both ends of the pipe.

Each engine has its own process, so that its peak memory is measured alone and a crash affects no
other engine. Requests and answers are one JSON object per line, on the child's stdin and stdout;
output of libraries goes to stderr. When stdin closes, because the parent has finished or died, the
child ends at once, even in the middle of a run.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TextIO

from localrt import system
from localrt.bench.engines import Launch, LoadedEngine
from localrt.bench.sampling import Energy, joules_between, read_energy
from localrt.common.closing import Closing
from localrt.common.errors import LocalrtError
from localrt.common.option_names import on_command_line
from localrt.common.processes import helper_command

ENGINE = helper_command(__name__)
"""The command line of a child that measures an engine."""


class ChildError(LocalrtError):
    """A child refused or failed. ``kind`` is the class of the child's error, or ``"died"``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ChildProcess(Closing):
    """A running child. As a context manager, it always ends the child."""

    def __init__(self, command: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # The child has its own session: Ctrl+C reaches only the parent, which then ends its
        # children.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            **system.OWN_GROUP,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, do: str, **values: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            ChildError: the child refused or failed, or died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            if not system.is_broken_pipe(error):
                raise
            line = ""
        if not line:
            raise ChildError("died", self._last_words())
        message = json.loads(line)
        if "error" in message:
            raise ChildError(message["error"], message["message"])
        return message["answer"]

    def close(self) -> None:
        """Kill the child without waiting for its work, and free its resources."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # a request was never read
                    stream.close()
        self._stderr.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        if code == -9:
            return "the process was killed: most likely it ran out of memory"
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"the process died with code {code}" + (f": {lines[-1].strip()}" if lines else "")


# -- in the child ----------------------------------------------------------------------------------


def main() -> None:
    """Run an engine for the parent process."""
    serve(ChildHandlers())


class ChildHandlers:
    """Request handlers of the child, one method per request; ``load`` must come first."""

    _loaded: LoadedEngine | None = None

    @property
    def _engine(self) -> LoadedEngine:
        if self._loaded is None:
            raise LocalrtError("no engine is loaded")
        return self._loaded

    def load(self, launch: dict[str, Any]) -> dict[str, Any]:
        """Load the engine of a `Launch`, given as its fields; return the engine's info."""
        self._loaded = LoadedEngine(Launch(**launch))
        return dict(self._loaded.info)

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text)

    def generate(self, prompt: list[int], tokens: int) -> dict[str, object]:
        """Generate; return the `Metrics`, plus the bytes read from disk and the machine's joules
        while decoding.
        """
        counts, energies = [system.disk_bytes_read()], list[Energy]()

        def on_first() -> None:
            counts.append(system.disk_bytes_read())
            energies.append(read_energy())

        metrics = self._engine.generate(prompt, tokens, on_first).to_dict()
        counts.append(system.disk_bytes_read())
        metrics["decode_joules"] = joules_between(energies[0], read_energy())
        started, first, ended = counts
        if started is None or first is None or ended is None:  # unknown on this system
            return {**metrics, "decode_read_bytes": None}
        if metrics["ssd_read_bytes"] is None:
            metrics["ssd_read_bytes"] = ended - started
        return {**metrics, "decode_read_bytes": ended - first}

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> dict[str, object]:
        """Answer prompts that share passes; return times and rates under the names of `Metrics`."""
        return self._engine.generate_batch(prompts, tokens)

    def free(self) -> None:
        """Free memory left by earlier prompts, so that it does not count for later ones."""
        self._engine.free()

    def gpu_use(self, prompt: list[int]) -> dict[str, object]:
        """Return the fields of a ``GpuUse``."""
        return self._engine.gpu_use(prompt)

    def trace(self) -> list[dict[str, Any]]:
        """Return the pipeline's tasks since the first call, in seconds."""
        return list(self._engine.trace_events())


def serve(requests: object) -> None:
    """Answer the parent's requests on stdin and stdout with the methods of ``requests``.

    In a request, ``do`` names the method; the other keys are its arguments.
    """
    stdin = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that output of libraries cannot corrupt the protocol
    # Windows' libraries look at stdin as they are loaded, and would wait for who reads it.
    with pathlib.Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for request in _until_closed(stdin):
        do = request.pop("do")
        try:
            message = {"answer": getattr(requests, do)(**request)}
        except (LocalrtError, MemoryError) as error:
            text = str(error)
            if isinstance(error, LocalrtError):
                text = error.told(on_command_line)
            message = {"error": type(error).__name__, "message": text}
        answers.write(json.dumps(message, default=str) + "\n")
        answers.flush()


def _until_closed(stdin: TextIO) -> Iterator[dict[str, Any]]:
    """Yield requests in order. A thread reads them, to notice at once when the parent has ended."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stdin:
            lines.put(line)
        os._exit(0)  # nothing needs cleaning up, and an engine may be busy for minutes

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())
