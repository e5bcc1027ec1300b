"""Renders chat templates in the process of ``jinja_sandbox.py``, one for all of this program.

No template can hold up the interpreter here: when one takes too long or too much memory, its
process ends, and the next request starts another. A packaged program that has no helpers
(``localrt/common/processes.py``) renders in its own process, without limits. It does not know
messages or models.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from localrt import system
from localrt.common.errors import TemplateError
from localrt.common.forks import free_in_child
from localrt.common.processes import confined_process, has_helpers, helper_command
from localrt.offload.memory import HELPERS

_MAX_SOURCE = 250_000  # characters
_PATIENCE_S = 5.0  # where the process cannot limit itself
_PATIENCE_PER_BYTE_S = 1e-5
_NBYTES = 1 << 30  # of memory, likewise
_ANSWER_NBYTES = 32 << 20  # in addition to a multiple of the request's size
_TOO_MUCH = "it takes too long or too much memory"


class SandboxedTemplate:
    """A template ready to render; ``name`` is its name in errors.

    Raises:
        TemplateError: it is not valid Jinja2, or too long.
    """

    def __init__(self, source: str, name: str) -> None:
        self._source = source
        self._name = name
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the {name} is longer than {_MAX_SOURCE} characters")
        found = _RENDERER.ask(source, None)
        if (reason := found.get("invalid")) is not None:
            raise TemplateError(f"the {name} is not valid Jinja2: {reason or _TOO_MUCH}")
        if "text" not in found:
            raise TemplateError(f"the {name} cannot be compiled: {found['refused']}")

    def render(self, variables: Mapping[str, object]) -> str:
        """Render the template with ``variables``, which are passed as JSON.

        Raises:
            TemplateError: the template refused them, failed, or takes too long or too much
                memory; quotes it on one line.
        """
        found = _RENDERER.ask(self._source, variables)
        if "text" not in found:
            raise TemplateError(f"the {self._name} refused the messages: {found['refused']}")
        return found["text"]


class _Renderer:
    """The rendering process, started by the first request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = free_in_child(threading.Lock())
        self._process: subprocess.Popen[bytes] | None = None
        self._watched = False
        self._owner = 0  # the process that started it: a fork inherits its parent's pipes

    def ask(self, source: str, variables: Mapping[str, Any] | None) -> dict[str, str]:
        """See ``jinja_sandbox.answer``; also ``refused`` if the process had to be killed."""
        try:
            request = {"source": source, "variables": variables}
            line = json.dumps(request, default=_plain).encode("ascii") + b"\n"
        except RecursionError:
            return {"refused": "a value is nested too deeply"}
        except ValueError as error:
            return {"refused": str(error)}
        with self._lock:
            process = self._running()
            if process is not None:
                answer = self._answer(process, line)
                if answer is None:
                    self._end(process)
                    return {"refused": _TOO_MUCH}
                found: dict[str, str] = answer
                return found
        # A packaged program without helpers chooses its own templates.
        from localrt.chat_format.jinja_sandbox import answer as answer_here

        return answer_here(source, json.loads(line)["variables"], len(line))

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end(self._process)

    def _answer(self, process: subprocess.Popen[bytes], line: bytes) -> Any:
        """Send a request and return the answer; None if the process has ended or was killed."""
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        seconds = _PATIENCE_S + _PATIENCE_PER_BYTE_S * len(line)
        patience = threading.Timer(seconds, lambda: _kill(process))
        if self._watched:
            patience.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(_ANSWER_NBYTES + 32 * len(line))
            return json.loads(answer.decode("utf-8", "surrogatepass"))
        except (OSError, ValueError):
            return None
        finally:
            patience.cancel()

    def _running(self) -> subprocess.Popen[bytes] | None:
        """The process, started if there is none; None if it cannot be started."""
        if self._process is not None and self._owner != os.getpid():
            self._process = None  # it belongs to the parent
        if self._process is not None and self._process.poll() is not None:
            self._end(self._process)
        if self._process is None and (command := _command()):
            try:
                self._process = confined_process(command)
            except OSError:
                return None
            self._owner = os.getpid()
            self._watched = system.limit_helper(self._process, _NBYTES)
            HELPERS.add(self._process.pid)
            if self._answer(self._process, _HELLO) is None:  # the executable is not Python
                self._end(self._process)
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process and close its pipes."""
        self._process = None
        HELPERS.discard(process.pid)
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            with suppress(OSError):  # nobody reads what was written
                pipe.close()


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)
_HELLO = b'{"source": "", "variables": null}\n'


def _command() -> list[str]:
    """The command of the process, which has only Jinja2; empty if none can be started."""
    found = [find_spec(name) for name in ("jinja2", "markupsafe")]
    origins = [spec.origin for spec in found if spec is not None and spec.origin is not None]
    if not has_helpers() or len(origins) < len(found):
        return []
    folders = list(dict.fromkeys(Path(origin).parents[1] for origin in origins))
    return helper_command("localrt.chat_format.jinja_sandbox", folders=folders)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):  # it has already ended
        process.kill()


def _plain(value: object) -> Any:
    """Convert a value that JSON lacks to the nearest one that it has."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence | Set) else str(value)
