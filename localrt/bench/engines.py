"""The engines that a benchmark child can load, behind one small protocol.

``native`` and ``llamacpp`` run through `localrt.api.Model`, so what is measured is what a user of
the library gets. Heavy imports happen inside `load_engine`, in the child alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from localrt.engine.types import Metrics
from localrt.errors import OptionError

if TYPE_CHECKING:
    from localrt.api import Model

__all__ = ["ENGINES", "BenchEngine", "Launch", "load_engine"]

ENGINES = ("native", "llamacpp", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Which engine to load, and how. ``settings`` are the engine's own, by name."""

    engine: str
    path: str
    ctx: int
    threads: int | None = None
    format: str | None = None
    settings: Mapping[str, Any] | None = None


class BenchEngine(Protocol):
    """A loaded model that can be timed."""

    @property
    def info(self) -> Mapping[str, Any]:
        """What runs, as plain values; ``format`` names the setting where there is no other."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens."""

    def generate(self, prompt: list[int], tokens: int) -> Metrics:
        """Exactly ``tokens`` greedy tokens after ``prompt``, and what they cost."""


def load_engine(launch: Launch) -> BenchEngine:
    """Load the engine that ``launch`` names.

    Raises:
        LocalrtError: it is not installed, or cannot run this model.
    """
    if launch.engine == "native":
        from localrt.api import load

        return _LocalrtEngine(
            load(
                launch.path,
                engine="native",
                format=launch.format,
                ctx=launch.ctx,
                threads=launch.threads,
                draft="off",
            )
        )
    if launch.engine == "llamacpp":
        return _LocalrtEngine(_load_llamacpp(launch))
    if launch.engine == "transformers":
        from localrt.bench.transformers_engine import TransformersEngine

        return TransformersEngine.load(Path(launch.path), threads=launch.threads)
    raise OptionError(f"unknown engine {launch.engine!r}: known are {', '.join(ENGINES)}")


class _LocalrtEngine:
    def __init__(self, model: Model) -> None:
        self._model = model
        # File names only: results are made to be passed on.
        path = model.info.path
        self.info: Mapping[str, Any] = {**asdict(model.info), "name": path.name, "path": path.name}

    def encode(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False)

    def generate(self, prompt: list[int], tokens: int) -> Metrics:
        chunk = self._model.generate(
            token_ids=prompt, max_tokens=tokens, ignore_eos=True, temperature=0
        )
        return chunk.metrics


def _load_llamacpp(launch: Launch) -> Model:
    """Like ``localrt.load``, with llama.cpp's own settings, which that does not offer."""
    from localrt.api import Model
    from localrt.engine.llamacpp import LlamaCppEngine, LlamaCppSettings, LlamaCppTokenizer
    from localrt.loading import LoadedModel
    from localrt.models.chat_template import PlainTemplate

    path = Path(launch.path)
    engine = LlamaCppEngine.load(
        path,
        ctx=launch.ctx,
        threads=launch.threads,
        device="cpu",
        settings=LlamaCppSettings(**launch.settings or {}),
    )
    parts = LoadedModel(
        path=path,
        engine=engine,
        tokenizer=LlamaCppTokenizer(engine),
        template=PlainTemplate(),
        defaults={},
        eos_ids=frozenset(),
        ctx=launch.ctx,
        notes=(),
    )
    return Model(path.name, parts, {})
