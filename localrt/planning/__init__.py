"""Forecasts models before they are loaded: ``localrt.plan``, previews, the table of what runs.

``models.py`` finds the model by its name, ``recommending.py`` chooses among a repository's files,
``plan.py`` and ``preview.py`` ask the planner (``offload/planner``), which knows no names and no
hub. Start with ``plan.py``.
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
    """Return a ``choose`` for ``hub.resolve``: it picks a repository's best file for these options.

    Before a download, ``say`` gets a line: which file, its size, and why.
    """

    def choose(offer: Offer) -> str:
        # The planner is imported at the first choice, because most names need none.
        from localrt.planning.recommending import recommend

        found = recommend(offer, settings, ram=ram, gpu_memory=gpu_memory, device=device)
        if say is not None:
            size = format_bytes(offer.sizes[found.name])
            say(f"{offer.repo}:{found.name}, {size}: {found.reason}")
        return found.name

    return choose
