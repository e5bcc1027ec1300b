"""Work in the gaps of a pass: a draft goes on while the target waits for its weights.

A pass says when it waits, through the check that it is given; in between the draft's thread stands
still, at the next place where it looks: between two of its layers. So the two hardly ever compute
at the same time. The thread begins and ends with its pass, whatever happens in either. It knows no
model: a pass is whoever calls the check, and work is a function.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from localrt.common.errors import CancelledError
from localrt.speculative.source import Check, Outcome

# Called in the thread with the check and the outcome of ``DraftSource.ahead``.
Work = Callable[[Check, Outcome], None]


class GapWork:
    """The check of one pass, and ``work`` beside it; None where there is nothing to do.

    A context: leaving it ends the thread. ``check`` is the caller's own, called in both threads.
    ``clock`` gives seconds.
    """

    def __init__(
        self,
        check: Check,
        work: Work | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._check = check
        self._work = work
        self._clock = clock
        self._gap = threading.Event()  # the pass waits, or has ended
        self._over = False
        self._true: Sequence[int] | None = None
        self._closed: float | None = None  # when the gap ended during which a layer began
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0  # the pass did, for weights
        self.shared_s = 0.0  # work went on although the pass did as well, at most
        self.error: BaseException | None = None  # of the work, but for cancelling

    # -- the pass --------------------------------------------------------------------------------

    def __call__(self) -> None:
        """The caller's check."""
        self._check()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The pass waits, and nothing of it computes."""
        began = self._clock()
        self._gap.set()
        try:
            yield
        finally:
            self._gap.clear()
            self._closed = now = self._clock()
            self.waited_s += now - began

    def ended(self, true: Sequence[int]) -> None:
        """The pass has ended: these tokens come next, as far as can be told."""
        self._true = true
        self._over = True
        self._gap.set()

    def __enter__(self) -> GapWork:
        if self._work is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._work,), name="localrt-draft", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self._gap.set()
        if self._thread is not None:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self, work: Work) -> None:
        try:
            self._between()
            work(self._between, lambda: self._true)
        except CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the pass's thread is told
            self.error = error

    def _between(self) -> None:
        """Stand still until there is a gap; give up when the pass is over and came to nothing."""
        if not self._gap.is_set():
            closed, self._closed = self._closed, None
            if closed is not None:
                self.shared_s += self._clock() - closed
            self._gap.wait()
        self._check()
        if self._over and self._true is None:
            raise CancelledError("the pass was given up")
