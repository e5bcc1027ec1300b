"""Recording as CUDA graphs do it, on the CPU: what is replayed has the addresses it had.

While something is recorded its kernels do not run. A replay repeats launches and torch's steps on
the same memory, and nothing of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localrt.quant.cuda.capture import Replay
from localrt.quant.cuda.launch import Grid, Launcher
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.stream import Between, Cut

_MADE = ("aten::empty", "aten::empty_like", "aten::empty_strided")
_WAITS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::equal")


class Tape:
    """See ``Launcher``. ``events`` are what a GPU would have been told to run, in order: names of
    programs, of torch's own steps (under ``Steps``), and ``replay``.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._steps: list[Callable[[], object]] | None = None
        self.events: list[str] = []
        self.recorded: list[int] = []  # steps of each recording
        self.replaying = False

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        """Run it, or note it."""
        if self._steps is None:
            self.events.append(program.name)
            self._launcher.launch(program, grid, threads, args)
            return
        kept = type(args).from_buffer_copy(args)
        self._steps.append(partial(self._launcher.launch, program, grid, threads, kept))

    def record(self, body: Callable[[Cut], None], pool: Any) -> Replay:
        """See ``graph.record``."""
        steps: list[Callable[[], object]] = []
        between: dict[int, Between] = {}  # by the steps before them
        self._steps = steps

        def cut(what: Between) -> None:
            steps.append(self._begin)
            between[len(steps) - 1] = what

        try:
            with _Noting(steps):
                self._steps.append(self._begin)
                body(cut)
        finally:
            self._steps = None
        self.recorded.append(len(steps) - 1 - len(between))

        def replay(check: Callable[[], None] | None = None) -> None:
            for number, step in enumerate(steps):
                if number in between:
                    self.replaying = False
                    between[number](check)
                step()
            self.replaying = False

        return replay

    def _begin(self) -> None:
        """A graph is launched."""
        self.events.append("replay")
        self.replaying = True


class _Noting(TorchDispatchMode):
    """Notes torch's steps. What they make lives as long as the recording."""

    def __init__(self, steps: list[Callable[[], object]]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name, kwargs = func.name().split(".")[0], kwargs or {}
        assert name not in _WAITS, f"{name} cannot be recorded: the host waits"
        made = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if name.endswith("_"):
            self._steps.append(partial(func, *args, **kwargs))
        elif made.untyped_storage().data_ptr() in given or name in _MADE:
            self._steps.append(lambda: made)  # a view, or room: it stays where it is
        else:
            self._steps.append(lambda: made.copy_(func(*args, **kwargs)))
        return made


class Steps(TorchDispatchMode):
    """Has a tape hear of torch's steps that are launches on a GPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.name().split(".")[0]
        silent = func.is_view or name in (*_MADE, "aten::detach", "aten::zeros")
        if not (silent or self._tape.replaying):
            self._tape.events.append(name)
        return func(*args, **(kwargs or {}))
