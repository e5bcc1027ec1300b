"""Phases of ``scripts/gpu_check``, each in a process of its own: one that crashes, or breaks the
GPU's context, loses only results that it has not sent.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.timing import Check, Result, results_of

PHASES = {
    "facts": ("facts", "check_facts"),
    "products": ("kernels", "check_products"),
    "batches": ("kernels", "check_batches"),
    "attention": ("attention", "check_attention"),
    "experts": ("grouped", "check_grouped"),
    "recurrent": ("recurrent", "check_recurrent"),
    "pictures": ("pictures", "check_pictures"),
    "towers": ("encoders", "check_encoders"),
    "models": ("models", "check_models"),
    "adapters": ("adapters", "check_adapters"),
    "heads": ("heads", "check_heads"),
}
"""Module and function. Other phases are of a model, such as dense-14B: they use check_model."""
_QUIET_S = 180  # longer than any one check takes
_GRACE_S = 10


def module_of(phase: str) -> str:
    """The module of ``benchmarks.gpu`` that a phase runs."""
    return PHASES.get(phase, ("loaded",))[0]


def found_by(phase: str, device: str) -> Iterator[Result]:
    """The results of a phase, run in this process."""
    kind, _, model = phase.partition("-")
    module, function, *more = PHASES.get(phase) or ("loaded", "check_model", model, kind)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)

    def checks() -> Iterator[Check]:
        yield from getattr(import_module(f"benchmarks.gpu.{module}"), function)(device, *more)

    yield from results_of(phase, checks)


def found_apart(
    phase: str, device: str, seconds: float, *, start: str = "spawn", quiet_s: float = _QUIET_S
) -> Generator[Result, None, None]:
    """The results of a phase, run in a process that is ended after ``seconds``.

    It has failed if it dies, or sends nothing for ``quiet_s``. ``start`` is multiprocessing's way
    to start it.
    """
    context = get_context(start)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(phase, device, theirs))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    end = time.monotonic() + seconds
    try:
        while ours.poll(min(quiet_s, left := max(0.0, end - time.monotonic()))):
            yield ours.recv()
        if quiet_s < left:
            why = f"nothing came of it for {quiet_s:g} seconds"
            yield Result(phase, False, values={"error": why})
    except EOFError:
        process.join(_GRACE_S)
        if process.exitcode:
            code = process.exitcode
            how = signal.strsignal(-code) if code < 0 else f"exit status {code}"
            yield Result(phase, False, values={"error": f"its process died: {how}"})
    finally:
        ours.close()
        process.terminate()  # it deletes its files
        process.join(_GRACE_S)
        with suppress(OSError):  # none are left
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _send(phase: str, device: str, to: Connection) -> None:
    os.setpgrp()  # so that its children end with it; a session of its own could outlive the call
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    faulthandler.register(signal.SIGTERM, chain=True)  # says where it hangs
    with to:  # this process may hang as it ends
        for result in found_by(phase, device):
            to.send(result)
