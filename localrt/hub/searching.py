"""Searches the hub for models by words, and lists the files of a model that localrt can run.

Each call sends one request. huggingface_hub is imported only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localrt.common.errors import LocalrtError, OfflineError
from localrt.common.formatting import one_line
from localrt.common.settings import Settings
from localrt.hub.files import gguf_variants, name_words, safetensors_model_files, variant_name
from localrt.hub.names import HubRef, find_known
from localrt.models.weight_files import is_draft_file

_TIMEOUT_S = 10.0
_OFFER_TIMEOUT_S = 3.0  # nobody waits for an offer
_KINDS = ("gguf", "safetensors")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A hub repository. ``kinds`` are the file formats in it that localrt reads.

    ``updated`` is a date like ``2026-02-17``, or empty. ``gated``: the user must first accept its
    licence on the hub.
    """

    name: str
    downloads: int
    likes: int
    kinds: tuple[str, ...]
    gated: bool
    updated: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of a repository's model: ``name`` is what ``pull`` and ``load`` take.

    ``label`` is its quantization, or ``"safetensors"``; ``bytes`` is the download size. ``why``
    says why this GGUF file is recommended; it is empty for the others. ``drafts``: it is a head
    that drafts for the model.
    """

    name: str
    label: str
    bytes: int
    why: str = ""
    drafts: bool = False


def search_models(
    words: str, *, settings: Settings, limit: int = 20, timeout_s: float = _TIMEOUT_S
) -> list[FoundModel]:
    """Return models whose names contain these words, the most downloaded first.

    A short name, like ``qwen3:8b``, stands for its repository.

    Raises:
        OfflineError: offline mode is on, or the hub cannot be reached.
        HubError: the hub refused the request, or the server is not a model hub.
    """
    from localrt.hub.download import ask_hub, hub_errors

    _check_online(settings)
    known = find_known(words)
    words = words.strip() if known is None else known.repo
    asked = {"search": words, "sort": "downloads", "direction": -1, "limit": 2 * limit}
    with hub_errors("the search", settings):
        found = ask_hub("models", settings, timeout_s, _found_models, **asked)
    return [model for model in found if model.kinds][:limit]  # others are not for localrt


def _found_models(entries: list[dict[str, Any]]) -> list[FoundModel]:
    return [_found_model(each) for each in entries if isinstance(each.get("id"), str)]


def _found_model(entry: dict[str, Any]) -> FoundModel:
    tags = entry.get("tags") or ()
    return FoundModel(
        name=one_line(entry["id"], 120),
        downloads=int(entry.get("downloads") or 0),
        likes=int(entry.get("likes") or 0),
        kinds=tuple(kind for kind in _KINDS if kind in tags),
        gated=bool(entry.get("gated")),
        updated=str(entry.get("lastModified") or entry.get("createdAt") or "")[:10],
    )


def published_head(model: str, *, settings: Settings) -> str:
    """Return the most downloaded repository of a draft head with the name of ``model``, a hub
    model; empty if none is found, or the hub does not answer soon.
    """
    words = name_words(model)
    kind = "assistant" if words[:2] == ["gemma", "4"] else "eagle3"
    try:
        found = search_models(
            " ".join([*words, kind]), settings=settings, timeout_s=_OFFER_TIMEOUT_S
        )
    except LocalrtError:
        return ""
    own = "".join(words)
    heads = (each.name for each in found if is_draft_file(each.name) and not each.gated)
    return next((name for name in heads if own in "".join(name_words(name))), "")


def list_variants(repo: str, *, settings: Settings) -> list[Variant]:
    """Return the variants of a repository's model: its safetensors and each GGUF quantization.

    Raises:
        HubError: or a subclass of it, as for a download.
    """
    from localrt.hub.download import list_repo

    _check_online(settings)
    remote = list_repo(repo, None, settings)
    found = []
    names = safetensors_model_files(remote.files)
    if names:
        size = sum(remote.files[name].size for name in names)
        found.append(Variant(repo, "safetensors", size))
    variants = gguf_variants(remote.files)
    for variant in variants:
        size = sum(remote.files[name].size for name in variant.files)
        name = str(HubRef(repo, variant=variant_name(variant, variants)))
        found.append(Variant(name, variant.label, size, drafts=variant.drafts))
    return sorted(found, key=lambda each: each.bytes)


def _check_online(settings: Settings) -> None:
    if settings.offline:
        raise OfflineError(
            "offline mode is on: switch it off (LOCALRT_OFFLINE, HF_HUB_OFFLINE) to ask the hub"
        )
