"""Plans where each unit of a model should be on a machine, and forecasts how fast that will be.

Everything here is arithmetic on numbers of bytes and operations: no weight is read, and torch is
never imported. It knows rates, placements and schedules, but not the code that executes a placement
(``offload/pipeline``).

Start with ``plan.py``, the result of ``localrt.plan`` and its pages, and with
``search.make_forecast``, which turns a ``PlanRequest`` into a ``Forecast`` (``forecast.py``).
``models.py`` finds a model by its name and gets its sizes. ``machine.py`` holds a machine's rates,
``costs.py`` turns them into seconds; ``measure.py`` measures rates, ``describe_pc.py`` reads them
from words. ``solve.py`` places units for a few choices of rings, and ``simulate.py`` replays
the best placement's schedule as ``offload/ring.py`` runs it. ``recommend.py`` has what uses no
replay: files to choose from, what a PC runs well, and one-line previews.
"""

from __future__ import annotations

from collections.abc import Callable

from localrt.common.formatting import format_bytes
from localrt.common.settings import Settings
from localrt.hub.resolving import Chooser, FileChoice


def chooser(
    settings: Settings,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    device: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Chooser:
    """Return a ``choose`` for ``hub.resolve``: it picks a repository's best file for these options.

    Before a download, ``say`` is called with a line: the file, its size, and the reason.
    """

    def choose(offer: FileChoice) -> str:
        # The planner is imported on first use, because most names need no choice.
        from localrt.planning.recommend import recommend

        found = recommend(offer, settings, ram=ram, gpu_memory=gpu_memory, device=device)
        if say is not None:
            size = format_bytes(offer.sizes[found.name])
            say(f"{offer.repo}:{found.name}, {size}: {found.reason}")
        return found.name

    return choose
