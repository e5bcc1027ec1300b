"""The budgets of a loaded model, which may change while it is loaded.

A streamed model gives weights back, or keeps more of them; one that was loaded whole can only free
caches that nobody uses. It knows engines and bytes.

Where a model's conversations keep their KV caches while they wait: memory, then the disk.

It joins the cache on the disk (``engine/saved_caches.py``) with what decides what goes
there and when (``engine/saved_caches.py``), by the budgets of the model that is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.files import keep_private
from localrt.common.formatting import format_bytes, parse_size
from localrt.common.free_memory import return_free_memory
from localrt.common.option_names import option
from localrt.common.settings import KV_DISK, Settings
from localrt.engine.batch.batch import kv_room
from localrt.engine.protocol import Engine, EngineSession
from localrt.engine.saved_caches import KvKeeper, PromptCache, Tier, model_key
from localrt.loading.parts import LoadedModel
from localrt.offload.memory import current_rss, ram_budget


class Budgets:
    """Of ``engine``: ``ram`` and ``gpu_memory`` in bytes as the user gave them, None: not."""

    def __init__(self, engine: Engine, *, ram: int | None, gpu_memory: int | None) -> None:
        self._engine = engine
        self.ram, self.gpu_memory = ram, gpu_memory

    def kv_room(self) -> int:
        """Bytes that are left for caches."""
        return kv_room(self._engine, ram=self.ram, gpu_memory=self.gpu_memory)

    def set_ram(self, nbytes: int, *, free: Callable[[], None]) -> None:
        """Have this process take ``nbytes`` of RAM at most; ``free`` frees what nobody uses.

        Raises:
            MemoryBudgetError: it takes more, and cannot give enough of it back.
        """
        if not self._engine.info.streamed:
            if current_rss() > nbytes:
                free()
                return_free_memory()
            taken = current_rss()
            if taken > nbytes:
                raise MemoryBudgetError(
                    f"the model was loaded whole and this process takes {format_bytes(taken)}, "
                    f"more than {format_bytes(nbytes)}: load it again with "
                    f"{option('ram', nbytes)}, which streams it"
                )
        self._engine.set_ram_budget(ram_budget(nbytes))
        if self._engine.info.streamed:
            return_free_memory()
        self.ram = nbytes

    def set_gpu_memory(self, nbytes: int) -> None:
        """Have the model take ``nbytes`` of the card's memory at most.

        Raises:
            OptionError: it runs on no card.
            MemoryBudgetError: it takes more, and cannot give enough of it back.
        """
        info = self._engine.info
        if info.device == "cpu":
            raise OptionError("the model runs on the CPU alone: it has no GPU memory")
        if info.streamed:
            self._engine.set_vram_budget(nbytes)
        elif info.weight_bytes > nbytes:
            raise MemoryBudgetError(
                f"the model was loaded whole and its weights take "
                f"{format_bytes(info.weight_bytes)} of the card, more than "
                f"{format_bytes(nbytes)}: load it again with {option('gpu_memory', nbytes)}, "
                "which streams it"
            )
        self.gpu_memory = nbytes


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

    def __init__(self, engine: Engine, prompts: PromptCache | None, budgets: Budgets) -> None:
        self._info = engine.info
        self._prompts = prompts
        on_card = engine.info.device.startswith("cuda")
        self.keeper = KvKeeper(
            room=budgets.kv_room,
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
