"""Names what drafts for a model: what ``auto`` finds on this machine, or what can be downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localrt.common.settings import Settings
from localrt.drafts.discovery import MTP, find_family_draft, find_head
from localrt.drafts.heads.files import prediction_notes
from localrt.hub import ResolvedModel
from localrt.hub.searching import published_head
from localrt.models.weight_files import is_draft_file


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """``name`` is for the option ``draft``, or if it is not ``here``, on this machine, for
    ``pull``. ``line`` says so to the user.
    """

    name: str
    line: str
    here: bool


def own_draft(model: Path, settings: Settings, *, streamed: bool = False) -> DraftOffer | None:
    """Return what ``auto`` drafts with for the model at ``model``, from headers alone.

    It is the MTP block of a model in memory, a head on this machine, or for ``streamed`` weights a
    small model of the family.
    """
    for note in () if streamed else prediction_notes(model):
        return DraftOffer(MTP, note, here=True)
    name = find_head(model, settings)
    if name is None and streamed and (family := find_family_draft(model, settings)):
        name = family.name
    return None if name is None else DraftOffer(name, f"{name} drafts for it", here=True)


def offered_draft(found: ResolvedModel, settings: Settings) -> DraftOffer | None:
    """Return what drafts for a model that was pulled: here, in its repository, or published for it.

    Only if it is neither here nor in the repository, the hub is asked, by one request.
    """
    if is_draft_file(found.name):
        return None
    own = own_draft(found.path, settings)
    if own is not None or found.source != "hub":
        return own
    name = found.head or published_head(found.name, settings=settings)
    return head_to_pull(name) if name else None


def head_to_pull(name: str) -> DraftOffer:
    """Return the offer of a head that is on the hub."""
    line = f"a head that drafts for it can be had with `localrt pull {name}`"
    return DraftOffer(name, line, here=False)
