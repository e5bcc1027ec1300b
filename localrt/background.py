"""Loading a model in the background: its progress, its result, and a way to cancel it.

It only knows ``localrt.load``, and imports it in the loading thread, so a window opens first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.common.errors import CancelledError, OptionError
from localrt.common.progress import Progress

if TYPE_CHECKING:
    from localrt.api import Model

Callback = Callable[["Loading"], None]


def load_in_background(model: str | Path = "smollm2", **options: Any) -> Loading:
    """``load`` in a thread of its own, with the same options but ``progress`` and ``cancel``.

    Returns at once; ``result`` raises errors of the model or the options.
    """
    for name in ("progress", "cancel"):
        if name in options:
            raise OptionError(f"{name} is the handle's own: leave it out")
    return Loading(model, options)


class Loading:
    """A model that is being loaded. Thread-safe."""

    def __init__(self, model: str | Path, options: dict[str, Any]) -> None:
        self.name = str(model)
        self._progress: Progress | None = None
        self._cancel = threading.Event()
        self._callbacks: list[Callback] = []
        self._lock = threading.Lock()
        self._future: Future[Model] = Future()
        threading.Thread(
            target=self._run, args=(model, options), name="localrt-load", daemon=True
        ).start()

    def __repr__(self) -> str:
        """Name the model and the state of its loading."""
        step = self._progress
        state = "ended" if self.done else "loading" if step is None else step.stage
        return f"<localrt.Loading {self.name!r}: {state}>"

    @property
    def progress(self) -> Progress | None:
        """The latest step; None before the first."""
        return self._progress

    @property
    def done(self) -> bool:
        """Whether it has ended: loaded, failed or cancelled."""
        return self._future.done()

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` has been called."""
        return self._cancel.is_set()

    def result(self, timeout: float | None = None) -> Model:
        """Return the model, once it is loaded.

        Raises:
            TimeoutError: it takes longer than ``timeout`` seconds.
            CancelledError: it was cancelled.
            LocalrtError: loading failed.
        """
        return self._future.result(timeout)

    async def aresult(self) -> Model:
        """Like ``result``, for asyncio. Cancelling the task does not stop the loading."""
        import asyncio  # imported late: it takes six megabytes

        return await asyncio.shield(asyncio.wrap_future(self._future))

    def cancel(self) -> None:
        """Stop loading; close the model if it is already loaded."""
        with self._lock:
            self._cancel.set()
            loaded = self._future.done() and self._future.exception() is None
        if loaded:
            self._future.result().close()

    def add_callback(self, callback: Callback) -> None:
        """Call ``callback(self)`` for every step, and once more at the end.

        The loading thread calls it (or this thread, at once, if loading has ended): a window passes
        it on to its own thread, by a signal or a queue. Exceptions that it raises are ignored.
        """
        with self._lock:
            ended = self._future.done()
            if not ended:
                self._callbacks.append(callback)
        if ended:
            self._call(callback)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self, name: str | Path, options: dict[str, Any]) -> None:
        from localrt.api import load

        model: Model | None = None
        error: BaseException | None = None
        try:
            model = load(name, progress=self._step, cancel=self._cancel, **options)
        except BaseException as caught:  # noqa: BLE001  it is raised where it is waited for
            error = caught
        with self._lock:
            if model is not None and self._cancel.is_set():
                error = CancelledError("loading was cancelled")
            if error is not None:
                self._future.set_exception(error)
            elif model is not None:
                self._future.set_result(model)
            callbacks, self._callbacks = self._callbacks, []
        if error is not None and model is not None:
            model.close()
        for callback in callbacks:
            self._call(callback)

    def _step(self, progress: Progress) -> None:
        self._progress = progress
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callback) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001  loading does not depend on who looks on
            pass
