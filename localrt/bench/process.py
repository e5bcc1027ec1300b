"""The engines of a benchmark, each in a child process: both ends of the pipe.

Engines run through `localrt.Model`, as for a user of the library. Each has its own process, so that
its peak memory is measured alone and a crash affects no other engine. Requests and answers are one
JSON object per line, on the child's stdin and stdout; output of libraries goes to stderr. When
stdin closes, because the parent has finished or died, the child ends at once, even in the middle of
a run. Heavy imports happen inside ``LoadedEngine``, in the child process only.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from localrt import system
from localrt.bench.sampling import Energy, joules_between, read_energy
from localrt.common.closing import Closing
from localrt.common.errors import LocalrtError
from localrt.common.option_names import on_command_line
from localrt.common.processes import helper_command
from localrt.engine.types import Metrics
from localrt.offload.memory import peak_rss

if TYPE_CHECKING:
    from localrt.service.core import Core

ENGINES = ("native", "llamacpp")

LLAMACPP_SETTINGS: Mapping[str, Mapping[str, bool]] = {
    "repacked": {"repack": True, "flash_attention": False},
    "repacked, flash attention": {"repack": True, "flash_attention": True},
    "plain": {"repack": False, "flash_attention": False},
    "plain, flash attention": {"repack": False, "flash_attention": True},
}
"""llama.cpp's settings by name; which one is fastest depends on machine and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The engine to load. ``settings`` are engine-specific, by name.

    The native engine's settings are options of ``localrt.load``; without ``draft``, there is no
    drafting.
    """

    engine: str
    path: str
    ctx: int
    threads: int | None = None
    settings: Mapping[str, Any] | None = None


class LoadedEngine:
    """A loaded model that can be timed. ``info`` are the facts of `ModelInfo`, as plain values.

    Raises:
        LocalrtError: the engine is not installed, or cannot run this model.
    """

    def __init__(self, launch: Launch) -> None:
        from localrt.api import Model

        self._core = core = (
            _load_native(launch) if launch.engine == "native" else llamacpp_core(launch)
        )
        self._model = model = Model(core)
        # File names only: results may be shared.
        path = model.info.path
        self.info: Mapping[str, Any] = {**asdict(model.info), "name": path.name, "path": path.name}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""
        return self._model.tokenize(text, add_special=False)

    def generate(self, prompt: list[int], tokens: int, on_first: Callable[[], None]) -> Metrics:
        """Generate exactly ``tokens`` greedy tokens after ``prompt``; return their metrics.

        ``on_first`` is called once, after the first token, when decoding begins.
        """
        stream = self._model.stream(
            token_ids=prompt, max_tokens=tokens, ignore_eos=True, temperature=0
        )
        last = next(stream)
        on_first()
        for last in stream:  # noqa: B007 - used after the loop
            pass
        last.metrics.peak_vram_bytes = self._peak_vram()
        return last.metrics

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> dict[str, object]:
        """Answer prompts together, with exactly ``tokens`` greedy tokens each.

        Times are medians over the answers. Prefill lasts until every answer has its first token;
        the decode rate is that of all answers together from then on.
        """
        stream = self._model.stream_batch(
            token_ids=prompts,
            batch_size=len(prompts),
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0,
        )
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        arrivals: list[tuple[float, int]] = []
        started = time.perf_counter()
        for index, chunk in stream:
            last[index] = now = time.perf_counter() - started
            first[index] = first[index] or now
            arrivals.append((now, len(chunk.token_ids)))
        read, ended = max(first), max(last)
        decoded = sum(count for at, count in arrivals if at > read)
        pauses = [(b - a) / (tokens - 1) for a, b in zip(first, last, strict=True)]
        return {
            "prompt_tokens": len(prompts[0]),
            "completion_tokens": tokens,
            "ttft_s": median(first),
            "tpot_s": median(pauses),
            "prefill_tok_s": sum(map(len, prompts)) / read,
            "decode_tok_s": decoded / (ended - read) if decoded else None,
            "peak_ram_bytes": peak_rss(),
            "peak_vram_bytes": self._peak_vram(),
        }

    def free(self) -> None:
        """Free memory left by earlier prompts, so that it does not count for later ones."""
        self._core.free_idle()

    def _peak_vram(self) -> int | None:
        """Return the most bytes that localrt has allocated on its GPU, without CUDA's own."""
        info = self._model.info
        if info.engine != "native" or not info.device.startswith("cuda"):
            return None
        from localrt.quant.cuda.driver import device_of

        return int(device_of(info.device).peak_nbytes)

    def busy_shares(self, prompt: list[int]) -> dict[str, float]:
        """Return the busy share of each resource, measured after ``prompt``."""
        from localrt.bench.gpu import busy_shares

        return busy_shares(self._model, prompt)


def _load_native(launch: Launch) -> Core:
    from localrt.loading.options import LoadOptions
    from localrt.service.core import open_core

    own = {"draft": "off", **(launch.settings or {})}
    named: dict[str, Any] = {"model": launch.path, "ctx": launch.ctx, "threads": launch.threads}
    return open_core(LoadOptions(engine="native", **named, **own))


def llamacpp_core(launch: Launch) -> Core:
    """Load a model as ``localrt.load`` does, but with llama.cpp's settings."""
    from localrt.chat_format.chat_template import PlainTemplate
    from localrt.engine.llamacpp.engine import LlamaCppEngine
    from localrt.engine.llamacpp.model import LlamaCppModel, LlamaCppSettings
    from localrt.loading.load import LoadedModel
    from localrt.service.core import Core

    path, own = Path(launch.path), dict(launch.settings or {})
    model = LlamaCppModel.load(
        path,
        ctx=launch.ctx,
        threads=launch.threads,
        device="cpu" if own.pop("device", "cpu") == "cpu" else "auto",  # its build may have none
        gpu_memory=own.pop("gpu_memory", None),
        settings=LlamaCppSettings(**own),
    )
    engine = LlamaCppEngine(model)
    parts = LoadedModel(
        path=path,
        engine=engine,
        tokenizer=engine.tokenizer(),
        template=PlainTemplate(),
        defaults={},
        eos_ids=frozenset(),
        ctx=launch.ctx,
        notes=(),
    )
    return Core(path.name, parts)


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

    def busy_shares(self, prompt: list[int]) -> dict[str, float]:
        """Return the busy share of each resource."""
        return self._engine.busy_shares(prompt)


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
