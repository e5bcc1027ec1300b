"""List, find, download, plan and delete models, on this machine and on the hub. It loads none.

The functions read the environment once (``Settings``); ``localrt.hub`` does the work.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrt import hub
from localrt.common.errors import OptionError, known_arguments
from localrt.common.option_names import option
from localrt.common.progress import ProgressCallback, note_to
from localrt.common.settings import Settings
from localrt.hub import HubRef, LocalModel, ResolvedModel, searching
from localrt.hub.cache import last_used
from localrt.hub.resolving import offer_of
from localrt.hub.searching import FoundModel, Variant
from localrt.planning import chooser
from localrt.service.arguments import check_call, check_text

if TYPE_CHECKING:
    from localrt.drafts.discovery import DraftOffer
    from localrt.planning.plan import Plan
    from localrt.quant.ops.kv_formats import KvFormat


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
    GGUF model's vision encoder (``mmproj``) is left out. ``progress`` is
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
    from localrt.drafts.discovery import offered_draft  # opens models: numpy and more

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
    from localrt.planning.recommend import recommend  # loads the planner: only needed here

    best = recommend(offer, settings, ram=ram, gpu_memory=gpu_memory, device=device)
    name = str(HubRef(repo, variant=best.name))
    return [replace(each, why=best.reason) if each.name == name else each for each in found]


@known_arguments
def plan(
    model: str | Path,
    *,
    ctx: int | None = None,
    format: str | None = None,
    kv_format: KvFormat = "bf16",
    batch: int = 1,
    kv_on_ssd: bool = False,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    gpu: str | None = None,
    link: str | None = None,
    ssd: str | None = None,
    pc: str | None = None,
    ram_speed: str | None = None,
    cores: int | None = None,
    advise: bool = True,
    remeasure: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
) -> Plan:
    """Plan ``model`` for this machine, or for one that is described.

    Nothing is loaded; only the config of a hub model that is not on this machine is downloaded. A
    machine that was never measured is measured first, which takes seconds: call it from a thread.

    Args:
        model: as ``load`` takes it, or a ``config.json`` (or its folder) without weights.
        ctx: context in tokens; None is 4096, or the model's own if that is less.
        format: plan as if packed in this format, such as ``"int4-g32"``.
        kv_format: how keys and values are kept.
        batch: sequences at once.
        kv_on_ssd: let keys and values that do not fit be read from the disk.
        ram, gpu_memory: sizes to use, such as ``"32GB"``; None: what this machine has.
        gpu: a GPU by name, or ``virtual:8GB@12GB/s,...``.
        link, ssd: rates such as ``"12GB/s"``.
        pc: a whole PC, ``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"`` or a preset's name such as
            ``"gaming-pc"``, instead of this machine; missing parts are assumed typical.
        ram_speed: the RAM's speed, ``"DDR5-5600"`` or a rate such as ``"60GB/s"``.
        cores: the number of processor cores.
        advise: plan variations too, to say what would help and how smaller weights compare; takes
            about twice as long in all.
        remeasure: measure this machine again.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.

    Raises:
        MemoryBudgetError: it does not fit even when streamed; the message says what would fit.
        LocalrtError: no such model, or an option that cannot be used.
    """
    # These import the planner, and the readers of models.
    from localrt.drafts.discovery import own_draft
    from localrt.planning.measure import Hardware
    from localrt.planning.plan import plan_model
    from localrt.quant.ops.kv_formats import parse_kv_format

    for name, value in (("ctx", 1 if ctx is None else ctx), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{option(name)} must be an integer of at least 1, is {value!r}")
    settings = Settings.from_environment()
    hardware = Hardware(
        ram=ram,
        gpu_memory=gpu_memory,
        gpu=gpu,
        link=link,
        ssd=ssd,
        pc=pc,
        ram_speed=ram_speed,
        cores=cores,
    )

    def draft_of(path: Path, streamed: bool) -> tuple[str, str] | None:
        """What ``auto`` drafts with: on the CPU, and for streamed weights a head or a small model
        of the family too.
        """
        draft = own_draft(path, settings, streamed=streamed)
        return None if draft is None else (draft.name, draft.line)

    return plan_model(
        str(model),
        hardware,
        draft_of,
        ctx=ctx,
        format=format,
        kv_format=parse_kv_format(kv_format),
        batch=batch,
        kv_on_ssd=kv_on_ssd,
        advise=advise,
        remeasure=remeasure,
        revision=revision,
        offline=offline,
    )


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
