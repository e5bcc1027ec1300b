"""List, find, download and delete models, on this machine and on the hub. It opens none.

The functions read the environment once (``Settings``); ``localrt.hub`` does the work.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from localrt import hub
from localrt.common.progress import ProgressCallback, note_to
from localrt.common.settings import Settings
from localrt.hub import HubRef, LocalModel, ResolvedModel, searching
from localrt.hub.cache import last_used
from localrt.hub.resolving import offer_of
from localrt.hub.searching import FoundModel, Variant
from localrt.planning import chooser
from localrt.service.arguments import check_call, check_text

if TYPE_CHECKING:
    from localrt.drafts.offers import DraftOffer


def list_models() -> list[LocalModel]:
    """Return every model that ``load`` finds without the network, by name."""
    return hub.list_models(Settings.from_environment())


def pull(
    model: str = "smollm2",
    *,
    revision: str | None = None,
    refresh: bool = True,
    vision: bool = True,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> ResolvedModel:
    """Download a model, or its newest revision; an interrupted download continues.

    Of several GGUF files it takes the largest that runs at reading speed here; a ``Progress`` of
    the stage ``"note"`` says which, and why.

    Without ``refresh`` a downloaded model stays as it is, without any request; without ``vision`` a
    GGUF model's vision tower (``mmproj``) is left out. ``progress`` is
    called with ``Progress`` in bytes, from the calling thread; any thread may set ``cancel``.

    Raises:
        ModelNotFoundError, GatedModelError, OfflineError, HubError: it cannot be had.
        StorageError: the disk is full, or cannot be written.
        CancelledError: ``cancel`` was set.
    """
    check_text("model", model)
    check_call(cancel=cancel, on_progress=progress, name="progress")
    settings = Settings.from_environment()
    return hub.resolve(
        model,
        settings=settings,
        revision=revision,
        refresh=refresh,
        vision=vision,
        choose=chooser(settings, say=note_to(progress)),
        progress=progress,
        cancel=cancel,
    )


def find_draft(model: ResolvedModel) -> DraftOffer | None:
    """Return what drafts for a model that ``pull`` returned: on this machine, in the model's
    repository, or published for it. At most one request; if it fails, nothing was found.
    """
    from localrt.drafts.offers import offered_draft  # opens models: numpy and more

    return offered_draft(model, Settings.from_environment())


def uses() -> dict[str, float]:
    """Return when each model was last loaded, by name, in seconds since the epoch."""
    return last_used(Settings.from_environment())


def search_models(words: str, *, limit: int = 20) -> list[FoundModel]:
    """Find hub models whose names have these words, the most downloaded first, in one request.

    Raises:
        OfflineError, HubError: the hub cannot be asked.
    """
    check_text("words", words)
    return searching.search_models(words, settings=Settings.from_environment(), limit=limit)


def list_variants(
    repo: str,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    device: str = "auto",
) -> list[Variant]:
    """Return what ``pull`` can download of a hub repository, with sizes, the smallest first.

    Of several GGUF files, the one recommended for these options of ``load`` says why.

    Raises:
        ModelNotFoundError, GatedModelError, OfflineError, HubError: it cannot be seen.
    """
    check_text("repo", repo)
    settings = Settings.from_environment()
    found = searching.list_variants(repo, settings=settings)
    offer = offer_of(repo, settings)
    if len(offer.sizes) < 2:
        return found
    from localrt.planning.recommending import recommend  # loads the planner: only needed here

    best = recommend(offer, settings, ram=ram, gpu_memory=gpu_memory, device=device)
    name = str(HubRef(repo, variant=best.name))
    return [replace(each, why=best.reason) if each.name == name else each for each in found]


def remove_model(name: str, *, packed_only: bool = False) -> int:
    """Delete the files of a model named as in ``list_models``; return the bytes freed.

    Its packed copies, made by localrt, are deleted too; ``packed_only`` deletes nothing else.

    Raises:
        ModelNotFoundError: no model, or no packed copy, has this name.
        OptionError: they are the user's own files, another program's, or an installed package's.
        StorageError: a file cannot be deleted.
    """
    check_text("name", name)
    return hub.remove_model(name, Settings.from_environment(), packed_only=packed_only)
