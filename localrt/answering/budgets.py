"""The budgets of a loaded model, which may change while it is loaded.

A streamed model gives weights back, or keeps more of them; one that was loaded whole can only free
caches that nobody uses. It knows engines and bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from localrt.engine.batch.batch import kv_room
from localrt.engine.protocol import Engine
from localrt.errors import MemoryBudgetError, OptionError
from localrt.formatting import format_bytes
from localrt.models.tokenizers.free_memory import return_free_memory
from localrt.offload.memory.process import current_rss, ram_budget
from localrt.option_names import option


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
