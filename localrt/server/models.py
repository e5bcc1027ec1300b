"""The models of a server: their names in requests, and which are loaded.

``OneModel`` is a model that is already loaded; ``localrt.server.pool`` has several.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from localrt.api import Model
from localrt.common.errors import OptionError
from localrt.engine.batch.chunked_prefill import PassTurns
from localrt.hub.names import client_name
from localrt.offload.account import SERVER_NBYTES
from localrt.server.errors import ApiError
from localrt.server.options import ServeOptions

_UNREAD_CHUNKS = 128  # chunks per answer, in addition to the network's buffers


class ServedModel:
    """``model`` under ``name``, with a batch that runs until ``close``; the model stays loaded.

    An answer pauses when its reader is behind, and is cancelled if that lasts. Models that share
    ``turns`` compute one after another.
    """

    def __init__(
        self, model: Model, name: str, options: ServeOptions, turns: PassTurns | None = None
    ) -> None:
        self.model = model
        self.name = name
        self.sees = model.info.sees
        self.embedding = asyncio.Lock()  # one batch at a time: they share the engine with answers
        self.live = model.live(
            most=options.max_running,
            buffer=_UNREAD_CHUNKS,
            patience_s=max(1.0, options.write_timeout_s),
            reserve_ram=SERVER_NBYTES,
            turns=turns,
        )

    def close(self) -> None:
        """Save and free the batch's caches; blocks until the running pass has ended."""
        self.live.park()
        self.live.close()

    @property
    def names(self) -> dict[str, str | None]:
        """The names that clients can use, with the adapter of each."""
        own = {
            f"{self.name}+{adapter}"
            if adapter in (self.name, self.model.name)
            else adapter: adapter
            for adapter in self.model.adapters
        }
        return {self.name: None, **own}

    def check_biases(self, tokens: Iterable[int]) -> None:
        """Raise an error unless the model has the tokens of a ``logit_bias``.

        Raises:
            OptionError: it does not have one of them.
        """
        vocab = self.model.info.vocab_size
        wrong = next((token for token in tokens if token >= vocab), None)
        if wrong is not None:
            raise OptionError(f"logit_bias names token {wrong}; the model has {vocab}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that clients may request.

    ``state`` is ``"loaded"``, ``"unloaded"``, or ``"shrunk"``: loaded, but without the memory of
    its weights. ``sees``: whether it takes pictures; None: unknown until it is loaded. ``nbytes``
    is the size of its files or weights, ``ram`` that of weights and caches in memory. ``ctx`` is
    the context in tokens. An ``adapter`` is a model that belongs to ``base``. ``unload_s`` is the
    time in seconds until it is unloaded if unused; None: it stays. ``path`` is the path of its
    files, which is not shown to clients.
    """

    name: str
    state: str = "loaded"
    sees: bool | None = None
    ctx: int | None = None
    base: str | None = None
    adapter: str | None = None
    nbytes: int | None = None
    ram: int = 0
    unload_s: float | None = None
    path: Path | None = None


class Models(ABC):
    """The models of one server. To be used in its event loop, unless a method says otherwise."""

    several: ClassVar[bool] = True
    """Whether they are loaded and unloaded."""

    @abstractmethod
    def offered(self) -> Sequence[ModelEntry]:
        """Return all models; the first is the default for requests without a name."""

    @abstractmethod
    def find(self, name: str | None, *, exact: bool = False) -> ModelEntry:
        """Return the model that a request names; None and "" mean the first.

        An unknown name means the only model, or the one with the alias ``*``, unless ``exact`` or
        the server's options say otherwise.

        Raises:
            ApiError: 404, there is no such model.
        """

    @abstractmethod
    def using(self, name: str | None) -> AbstractAsyncContextManager[ServedModel]:
        """Lend the model with this name, from ``find``; it stays loaded until the block ends.

        Raises:
            ApiError: 404, the model no longer exists.
            LocalrtError: it cannot be loaded.
        """

    @abstractmethod
    def at_work(self) -> Sequence[ServedModel]:
        """Return the models that are loaded now."""

    def open(self) -> None:  # noqa: B027  nothing to do
        """Called when the server starts."""

    def keep(self, name: str, seconds: float) -> None:  # noqa: B027  it stays in any case
        """Keep a model loaded for ``seconds`` after its last use; forever if negative."""

    def lengthen(self, name: str, ctx: int) -> None:  # noqa: B027  a single one is not loaded again
        """Let a model have a context of ``ctx`` tokens from its next request on."""

    def tend(self) -> None:  # noqa: B027  nothing to do
        """Called once a second."""

    @abstractmethod
    def close(self) -> None:
        """Free the batches' caches after running passes have ended. Any thread may call it."""


class OneModel(Models):
    """One model, which the caller closes; each of its adapters is a model too."""

    several = False

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self._model = model
        self._options = options
        self._served: ServedModel | None = None
        self.name = options.name or client_name(model.name)

    @property
    def served(self) -> ServedModel:
        """The running model.

        Raises:
            ApiError: 503, the server has not started, or has stopped.
        """
        if self._served is None:
            raise ApiError(503, "the server is stopping", code="stopping")
        return self._served

    def offered(self) -> Sequence[ModelEntry]:
        served, ctx = self.served, self._model.info.ctx
        stats = served.live.stats()
        return [
            ModelEntry(
                name=name,
                sees=served.sees,
                ctx=ctx,
                base=None if adapter is None else served.name,
                adapter=adapter,
                nbytes=self._model.info.weight_bytes,
                ram=self._model.weights_in_ram + stats.kv_bytes + stats.parked_bytes,
                path=self._model.info.path,
            )
            for name, adapter in served.names.items()
        ]

    def find(self, name: str | None, *, exact: bool = False) -> ModelEntry:
        """See ``Models``; the model's own name is accepted, too."""
        offered = self.offered()
        if not name or name == self._model.name:
            return offered[0]
        found = meant(name, [one.name for one in offered])
        if found is None:
            if exact or self._options.strict_models:
                not_here(name, offered)
            return offered[0]
        return next(one for one in offered if one.name == found)

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ServedModel]:
        yield self.served

    def at_work(self) -> Sequence[ServedModel]:
        return [] if self._served is None else [self._served]

    def open(self) -> None:
        self._served = ServedModel(self._model, self.name, self._options)

    def close(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            served.close()


def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that a client means: case and the tag ``latest``, which Ollama's
    clients add, are ignored. Other tags, and the publisher, may be missing if only one name
    matches.
    """
    known = list(names)
    if name in known:
        return name
    given = name.lower().removesuffix(":latest")
    whole = [one.lower().removesuffix(":latest") for one in known]
    bare = [one if ("/" in one) == ("/" in given) else one.rpartition("/")[2] for one in whole]
    for wanted, forms in ((given, whole), (given.rpartition("/")[2], bare)):
        for shown in (forms, [one.rpartition(":")[0] for one in forms]):
            if shown.count(wanted) == 1:
                return known[shown.index(wanted)]
    return None


def not_here(name: str, offered: Sequence[ModelEntry]) -> NoReturn:
    """Raise the error for an unknown model ``name``.

    Raises:
        ApiError: always.
    """
    here = ", ".join(repr(one.name) for one in offered)
    raise ApiError(
        404,
        f"the model {name[:200]!r} is not here: this server runs {here}",
        param="model",
        code="model_not_found",
    )
