"""Where a model's conversations keep their KV caches while they wait: memory, then the disk.

It joins the cache on the disk (``engine/saved_caches.py``) with what decides what goes
there and when (``engine/saved_caches.py``), by the budgets of the model that is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from localrt.common.errors import MemoryBudgetError
from localrt.common.files import keep_private
from localrt.common.formatting import parse_size
from localrt.common.settings import KV_DISK, Settings
from localrt.engine.batch.batch import kv_room
from localrt.engine.protocol import Engine, EngineSession
from localrt.engine.saved_caches import KvKeeper, PromptCache, Tier, model_key
from localrt.loading.parts import LoadedModel


def prompt_cache(parts: LoadedModel, settings: Settings) -> PromptCache | None:
    """Where KV caches of this model's conversations wait."""
    if settings.kv_disk.lower() in ("0", "off") or not parts.fingerprint:
        return None
    info = parts.engine.info
    key = model_key(parts.path, parts.fingerprint, info.engine, info.format)
    folder = settings.cache_dir / "kv"
    keep_private(folder)
    return PromptCache(folder / key, limit=parse_size(settings.kv_disk, KV_DISK))


class Parking:
    """Of the model with ``engine``; without ``prompts`` nothing is saved. Thread-safe."""

    def __init__(self, engine: Engine, prompts: PromptCache | None) -> None:
        self._info = engine.info
        self._prompts = prompts
        on_card = engine.info.device.startswith("cuda")
        self.keeper = KvKeeper(
            room=partial(kv_room, engine),
            price=self._price,
            tiers=("ram", "disk") if on_card else ("disk",),
        )

    def save(self, session: EngineSession | None, to: Tier) -> int:
        """Save the session's KV cache, or with None those kept in RAM; the bytes, 0 where nothing
        could be saved.

        Raises:
            StorageError: the disk is full or fails.
        """
        if self._prompts is None:
            return 0
        if session is None:
            return self._prompts.settle() if to == "disk" else 0
        return self._prompts.save(session) if to == "disk" else self._prompts.hold(session)

    def restore(self, session: EngineSession, prompt: Sequence[int]) -> None:
        """Give ``session`` what the disk has of ``prompt``, where that is more than it holds."""
        if self._prompts is None:
            return
        began = time.perf_counter()
        try:
            got = self._prompts.restore(session, prompt)
        except MemoryBudgetError:
            return  # computed anew, as far as there is room
        if got:
            self.keeper.restored(session.nbytes, time.perf_counter() - began)

    def close(self) -> None:
        """Forget who waits; what is on the disk stays."""
        self.keeper.close()
        self._prompts = None

    def _price(self, nbytes: int) -> float:
        """What holding so many bytes costs: where weights are streamed, a share of every pass."""
        info = self._info
        return nbytes / (nbytes + info.weight_bytes) if info.streamed else 0.0
