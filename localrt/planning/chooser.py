"""What chooses among a repository's GGUF files for ``hub.resolve``, and says so.

The planner is imported with the first choice: most names leave none.
"""

from __future__ import annotations

from collections.abc import Callable

from localrt.common.formatting import format_bytes
from localrt.common.settings import Settings
from localrt.hub.resolving import Chooser, Offer


def chooser(
    settings: Settings,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    device: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Chooser:
    """Takes the largest file that runs at reading speed within these options of ``load``.

    ``say`` gets a line, before a download begins: which file, its size, and why.
    """

    def choose(offer: Offer) -> str:
        from localrt.planning.recommending import recommend

        found = recommend(offer, settings, ram=ram, gpu_memory=gpu_memory, device=device)
        if say is not None:
            size = format_bytes(offer.sizes[found.name])
            say(f"{offer.repo}:{found.name}, {size}: {found.reason}")
        return found.name

    return choose
