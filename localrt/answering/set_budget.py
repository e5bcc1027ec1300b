"""Budgets that change while a model is loaded.

A streamed model gives weights back, or keeps more of them; one that was loaded whole can only free
caches that nobody uses. It knows engines and bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from localrt.engine.protocol import Engine
from localrt.errors import MemoryBudgetError, OptionError
from localrt.formatting import format_bytes
from localrt.offload.memory.process import current_rss, ram_budget

__all__ = ["change_gpu_memory", "change_ram"]


def change_ram(engine: Engine, nbytes: int, *, free: Callable[[], None]) -> None:
    """Have this process take ``nbytes`` of RAM at most; ``free`` frees what nobody uses.

    Raises:
        MemoryBudgetError: it takes more, and cannot give enough of it back.
    """
    from localrt.models.tokenizers.free_memory import return_free_memory

    if engine.info.streamed:
        engine.set_ram_budget(ram_budget(nbytes))
        return_free_memory()
        return
    if current_rss() > nbytes:
        free()
        return_free_memory()
    taken = current_rss()
    if taken > nbytes:
        raise MemoryBudgetError(
            f"the model was loaded whole and this process takes {format_bytes(taken)}, more than "
            f"{format_bytes(nbytes)}: load it again with ram={nbytes}, which streams it"
        )


def change_gpu_memory(engine: Engine, nbytes: int) -> None:
    """Have the model take ``nbytes`` of the card's memory at most.

    Raises:
        OptionError: it runs on no card.
        MemoryBudgetError: it takes more, and cannot give enough of it back.
    """
    if engine.info.device == "cpu":
        raise OptionError("the model runs on the CPU alone: it has no GPU memory")
    if engine.info.streamed:
        engine.set_vram_budget(nbytes)
        return
    if engine.info.weight_bytes > nbytes:
        raise MemoryBudgetError(
            f"the model was loaded whole and its weights take "
            f"{format_bytes(engine.info.weight_bytes)} of the card, more than "
            f"{format_bytes(nbytes)}: load it again with gpu_memory={nbytes}, which streams it"
        )
