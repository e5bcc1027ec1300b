"""Where a model's conversations keep their KV caches while they wait: memory, then the disk.

It joins the cache on the disk (``engine/prompt_cache.py``) with who decides what goes there and
when (``engine/waiting.py``), by the budgets of the model that is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from localrt.engine.parking.keeper import KvKeeper, Tier
from localrt.engine.parking.prompt_cache import PromptCache, model_key
from localrt.engine.protocol import EngineSession
from localrt.errors import MemoryBudgetError
from localrt.loading.parts import LoadedModel
from localrt.settings import Settings

__all__ = ["Parking", "prompt_cache"]


def prompt_cache(parts: LoadedModel, settings: Settings) -> PromptCache | None:
    """Where KV caches of this model's conversations wait."""
    from localrt.formatting import parse_size

    if settings.kv_disk.lower() in ("0", "off"):
        return None
    info = parts.engine.info
    key = model_key(parts.path, info.engine, info.format)
    return PromptCache(settings.cache_dir / "kv" / key, limit=parse_size(settings.kv_disk))


class Parking:
    """``budgets`` gives those of RAM and of the card in bytes, as they are now. Thread-safe."""

    def __init__(
        self,
        parts: LoadedModel,
        prompts: PromptCache | None,
        budgets: Callable[[], tuple[int | None, int | None]],
    ) -> None:
        self._engine = parts.engine
        self._prompts = prompts
        self._budgets = budgets
        on_card = parts.engine.info.device.startswith("cuda")
        self.keeper = KvKeeper(
            room=self.room, price=self._price, tiers=("ram", "disk") if on_card else ("disk",)
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

    def room(self) -> int:
        """Bytes that are left for caches."""
        from localrt.engine.batch.batch import kv_room

        ram, gpu_memory = self._budgets()
        return kv_room(self._engine, ram=ram, gpu_memory=gpu_memory)

    def close(self) -> None:
        """Forget who waits; what is on the disk stays."""
        self.keeper.close()
        self._prompts = None

    def _price(self, nbytes: int) -> float:
        """What holding so many bytes costs: where weights are streamed, a share of every pass."""
        info = self._engine.info
        return nbytes / (nbytes + info.weight_bytes) if info.streamed else 0.0
