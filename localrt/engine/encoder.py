"""The engine of encoders: it embeds texts, or scores pairs of them, and writes none."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor
from typing import NoReturn

from localrt.common.errors import LocalrtError, OptionError
from localrt.engine.protocol import Engine, EngineInfo, Logits
from localrt.models.encoders import TextEncoder
from localrt.models.registry import ONLY_EMBEDS
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.protocol import Check
from localrt.quant.ops.vision import VisionSteps


class EncoderEngine(Engine):
    """See ``Engine``. A pass has texts of ``pass_rows`` tokens, or a longer one."""

    def __init__(self, encoder: TextEncoder, steps: VisionSteps, info: EngineInfo) -> None:
        self.info, self._steps = info, steps
        self._encoder: TextEncoder | None = encoder
        self._turn = threading.Lock()
        self._thread: Executor | None = None

    def pass_on(self, thread: Executor) -> None:
        """Run all passes on ``thread``, which is shut down when the engine closes."""
        self._thread = thread

    def session(self, capacity: int) -> NoReturn:
        raise OptionError(ONLY_EMBEDS)

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, mix: Mix = (), check: Check | None = None
    ) -> Iterator[Logits]:
        raise OptionError(ONLY_EMBEDS)

    def kv_nbytes(self, length: int) -> int:
        return 0

    def close(self) -> None:
        """Free the weights once the pass in flight has ended."""
        with self._turn:
            self._encoder = None
        if self._thread is not None:
            self._thread.shutdown()

    @property
    def hidden_size(self) -> int:
        config = self._loaded().config
        return 1 if config.ranks else (config.layers[0].hidden, *config.dense)[-1]

    def hidden_states(
        self, texts: Sequence[Sequence[int]], *, check: Check | None = None
    ) -> Generator[tuple[int, Logits], None, None]:
        """See ``Engine``. The only row of a pair is its score."""
        first = 0
        while first < len(texts):
            rows, end = len(texts[first]), first + 1
            while end < len(texts) and rows + len(texts[end]) <= self.pass_rows:
                rows, end = rows + len(texts[end]), end + 1
            with self.background(), self._turn:
                given = texts[first:end], self._steps, check
                if self._thread is None:
                    states = self._loaded()(*given)
                else:
                    states = self._thread.submit(self._loaded(), *given).result()
            yield from enumerate(states, first)
            first = end

    def _loaded(self) -> TextEncoder:
        if self._encoder is None:
            raise LocalrtError("the model is closed: load it again")
        return self._encoder
