"""Finds drafts for a target on this machine, from names and file headers, or on the hub.

A head's name contains its target's. Two models are of one family if their vocabularies have the
same hash. Nothing is downloaded or loaded; the hub is only asked whether a name exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.common.errors import LocalrtError
from localrt.common.files import parse_json
from localrt.common.settings import Settings
from localrt.drafts.heads.files import prediction_notes
from localrt.hub import ResolvedModel
from localrt.hub.files import gguf_variants, name_words
from localrt.hub.listing import list_models
from localrt.hub.searching import published_head
from localrt.models.checkpoints.gguf.file import GgufFile
from localrt.models.checkpoints.opening import is_head
from localrt.models.checkpoints.store.checkpoint import GGUF_TEXT_NAME
from localrt.models.registry import ARCHITECTURES
from localrt.models.weight_files import is_draft_file

if TYPE_CHECKING:
    from localrt.loading.load import LoadedModel

MTP = "mtp"
"""The draft name for the MTP block in the model's own files."""
MOST_SHARE = 0.5
"""The largest useful size of a draft, as a share of its target's bytes."""
_LEAST_NAME = 4  # fewest characters of a target's name for matching heads


@dataclass(frozen=True, slots=True)
class FamilyDraft:
    """A possible draft model. ``name`` is for ``resolve``; ``nbytes`` is the size of its files."""

    name: str
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """A draft for a model. ``name`` is for the option ``draft`` if it is on this machine
    (``here``), else for ``pull``. ``line`` tells the user.
    """

    name: str
    line: str
    here: bool


def own_head(model: Path, settings: Settings, *, streamed: bool = False) -> DraftOffer | None:
    """Return the MTP block of a model in memory, or else a head on this machine."""
    for note in () if streamed else prediction_notes(model):
        return DraftOffer(MTP, note, here=True)
    return _here(find_head(model, settings))


def own_draft(model: Path, settings: Settings, *, streamed: bool = False) -> DraftOffer | None:
    """Return the draft that ``auto`` uses for the model at ``model``, from file headers alone: a
    head, or for ``streamed`` weights a small model of the family.
    """
    head = own_head(model, settings, streamed=streamed)
    if head is None and streamed and (family := find_family_draft(model, settings)):
        return _here(family.name)
    return head


def _here(name: str | None) -> DraftOffer | None:
    return None if name is None else DraftOffer(name, f"{name} drafts for it", here=True)


def offered_draft(model: ResolvedModel, settings: Settings) -> DraftOffer | None:
    """Return a draft for a pulled model: on this machine, in its repository, or published
    elsewhere.

    The hub is asked, by one request, only if there is none on the machine or in the repository.
    """
    if is_draft_file(model.name):
        return None
    own = own_draft(model.path, settings)
    if own is not None or model.source != "hub":
        return own
    name = model.head or published_head(model.name, settings=settings)
    return head_to_pull(name) if name else None


def head_to_pull(name: str) -> DraftOffer:
    """Return the offer of a head that is on the hub."""
    line = f"a head that drafts for it can be had with `localrt pull {name}`"
    return DraftOffer(name, line, here=False)


def find_family_draft(target: Path, settings: Settings) -> FamilyDraft | None:
    """Find the smallest model with the target's vocabulary, preferably of its architecture.

    ``target`` is a GGUF file or a folder. Files that cannot be read are skipped.
    """
    own = _vocabulary(target)
    if own is None:
        return None
    architecture, digest = own
    relatives = [
        (each[0] != architecture, draft.nbytes, draft)
        for draft in _small_models(target, settings, MOST_SHARE * _nbytes(target))
        if (each := _vocabulary(draft.path)) and each[0] in ARCHITECTURES and each[1] == digest
    ]
    return min(relatives, key=lambda each: each[:2])[2] if relatives else None


def find_head(target: Path, settings: Settings) -> str | None:
    """Find a head whose name contains the target's, next to the target or in any model folder.

    Returns its name for ``resolve``. Whether it fits the target is checked when it is loaded.
    """
    listed = _listed(settings)
    names = [target.name, *(m.name for m in listed if m.path == target)]
    own = {letters for name in names if len(letters := _letters(name)) >= _LEAST_NAME}
    beside = target.parent.iterdir() if target.parent.is_dir() else ()
    heads = [FamilyDraft(str(path), path, 0) for path in sorted(beside)] + listed
    for head in heads:
        name = _letters(Path(head.name).name)
        if any(each in name and each != name for each in own) and is_head(head.path):
            return head.name
    return None


def _letters(name: str) -> str:
    return "".join(name_words(name))


def _listed(settings: Settings) -> list[FamilyDraft]:
    try:
        return [FamilyDraft(m.name, m.path, m.bytes) for m in list_models(settings)]
    except OSError:  # an unreadable folder, or a file deleted in the meantime
        return []


def _small_models(target: Path, settings: Settings, most: float) -> Iterator[FamilyDraft]:
    """Yield other models on this machine of at most ``most`` bytes, each once."""
    seen = {target.resolve()}
    for draft in [*_listed(settings), *_beside(target)]:
        if is_draft_file(draft.path.name):
            continue  # not a model
        if draft.nbytes <= most and draft.path.resolve() not in seen:
            seen.add(draft.path.resolve())
            yield draft


def _beside(target: Path) -> Iterator[FamilyDraft]:
    """Yield the GGUF models in the target's folder if the target is a file."""
    if not target.is_file():
        return
    try:
        names = [entry.name for entry in target.parent.iterdir()]
    except OSError:
        return
    for variant in gguf_variants(names):
        files = [target.parent / name for name in variant.files]
        yield FamilyDraft(str(files[0]), files[0], sum(_size(file) for file in files))


def _nbytes(model: Path) -> int:
    if model.is_dir():
        return sum(_size(file) for file in model.iterdir())
    whole = next((v for v in _beside(model) if v.path == model), None)
    return _size(model) if whole is None else whole.nbytes


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # a broken link
        return 0


def _vocabulary(model: Path) -> tuple[str, bytes] | None:
    """Return a model's architecture and the hash of its vocabulary; None if it lacks either."""
    try:
        text = model if model.is_file() else model / GGUF_TEXT_NAME
        if text.is_file():
            with closing(GgufFile(text)) as file:
                pairs = file.metadata
                return pairs["general.architecture"], pairs.digest("tokenizer.ggml.tokens")
        config = parse_json((model / "config.json").read_text(encoding="utf-8"))
        digest = sha256((model / "tokenizer.json").read_bytes()).digest()
        return str(config["architectures"][0]), digest
    except (LocalrtError, OSError, ValueError, LookupError, TypeError):
        return None


def family_draft(target: LoadedModel) -> str | None:
    """Return the name of a small local model of the target's family, to draft with by default.

    None unless weights are streamed: with a resident model, users would not expect a second model
    in memory, and on a CPU its drafts cost about as much as they save. None where a GPU has a part
    of the weights: it would take memory from them.
    """
    info = target.engine.info
    if not info.streamed or info.device != "cpu":
        return None
    found = find_family_draft(target.path, Settings.from_environment())
    return None if found is None else found.name
