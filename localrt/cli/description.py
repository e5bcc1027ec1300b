"""Describes a model on this machine without loading it, for ``localrt show``.

It reads the headers of the model's files, no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

from localrt.chat_format.templates.chat_template import load_template
from localrt.chat_format.templates.go_template import to_jinja
from localrt.common.errors import LocalrtError, TemplateError
from localrt.drafts.discovery import DraftOffer
from localrt.engine.sampling import sampling_defaults
from localrt.hub import LocalModel, ResolvedModel
from localrt.hub.other_programs import Extras
from localrt.loading.format_names import quantization_name
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.vision.cost import PictureCost, picture_cost
from localrt.models.weight_files import files_nbytes

_THINKING = ("enable_thinking", "reasoning_effort", "<think>", "<|channel|>", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """``place`` and ``packed`` are those of ``LocalModel``. ``template`` says where the chat
    template is from; ``abilities`` are what it supports: ``"tools"``, ``"thinking"``.
    ``parameters`` are the model's generation defaults, ``context`` is its trained length in
    tokens. ``notes`` say how quantized weights are stored in memory, and what drafts for it.
    ``draft`` is the draft that ``auto`` uses if the weights are in memory; empty if there is none.
    ``vision_bytes`` is the size of the vision encoder, 0 without one; ``picture_tokens`` are about
    those of a picture of 896 x 896 pixels, ``picture_bytes`` the memory while it is read.
    """

    name: str
    path: Path
    place: str
    kind: str
    architecture: str
    title: str = ""
    weights: int = 0
    bytes: int = 0
    quantization: str = ""
    context: int | None = None
    template: str = ""
    abilities: tuple[str, ...] = ()
    system: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    adapters: tuple[Path, ...] = ()
    license: str = ""
    packed: tuple[Path, ...] = ()
    packed_bytes: int = 0
    notes: tuple[str, ...] = ()
    draft: str = ""
    vision_bytes: int = 0
    picture_tokens: int = 0
    picture_bytes: int = 0

    def to_dict(self) -> dict[str, object]:
        """The fields, as JSON has them."""
        paths = {"path": str(self.path), "adapters": [str(each) for each in self.adapters]}
        packed = [str(each) for each in self.packed]
        lists = {"abilities": list(self.abilities), "notes": list(self.notes)}
        return {**asdict(self), **paths, "packed": packed, **lists}


def describe_model(
    found: ResolvedModel, listed: LocalModel | None, draft: DraftOffer | None
) -> ModelDescription:
    """Describe what ``resolve`` found; ``listed`` is its entry in ``list_models``, ``draft`` its
    ``own_draft``.

    Raises:
        LocalrtError: its files cannot be read.
    """
    extras = found.extras or Extras()
    with closing(open_checkpoint(found.path)) as checkpoint:
        template, abilities = _template(checkpoint, extras)
        config = checkpoint.config
        picture, blind = _vision(found.path, extras)
        context = config.get("max_position_embeddings")
        return ModelDescription(
            name=found.listed_name,
            path=found.path.absolute(),
            place="yours" if listed is None else listed.place,
            kind=checkpoint.kind if not isinstance(checkpoint, StoreCheckpoint) else "store",
            architecture=checkpoint.architecture,
            title=_metadata(checkpoint, "general.name"),
            weights=sum(prod(info.shape) for info in checkpoint.tensors.values()),
            bytes=files_nbytes(found.path) if listed is None else listed.bytes,
            quantization=(listed and listed.quantization) or quantization_name(checkpoint),
            context=context if isinstance(context, int) else None,
            template=template,
            abilities=abilities,
            system=extras.system,
            parameters={
                **sampling_defaults(checkpoint.generation_config),
                **extras.options,
                **({} if extras.ctx is None else {"ctx": extras.ctx}),
            },
            adapters=extras.adapters,
            license=_license(checkpoint, extras),
            packed=() if listed is None else listed.packed,
            packed_bytes=0 if listed is None else listed.packed_bytes,
            notes=(*checkpoint.notes, *blind, *([] if draft is None else [draft.line])),
            draft="" if draft is None else draft.name,
            vision_bytes=0 if picture is None else picture.encoder_bytes,
            picture_tokens=0 if picture is None else picture.tokens,
            picture_bytes=0 if picture is None else picture.room_bytes,
        )


def _vision(path: Path, extras: Extras) -> tuple[PictureCost | None, list[str]]:
    """What a picture costs, and why pictures cannot be used."""
    try:
        return picture_cost(path, extras.projectors), []
    except LocalrtError as error:
        return None, [f"pictures are refused: {error}"]


def _template(checkpoint: Checkpoint, extras: Extras) -> tuple[str, tuple[str, ...]]:
    try:
        own = load_template(checkpoint)
    except LocalrtError as error:
        return f"its own cannot be used: {error}", ()
    if own is not None:
        return "its own", _abilities(own.tool_source)
    if extras.go_template is None:
        return "none: chats are in a plain format", ()
    try:
        to_jinja(extras.go_template)
    except TemplateError as error:
        return f"Ollama's cannot be used ({error}): chats are in a plain format", ()
    return "Ollama's", _abilities(extras.go_template)


def _abilities(source: str) -> tuple[str, ...]:
    tools = "tools" in source or ".Tools" in source
    thinking = any(each in source for each in _THINKING) or ".Think" in source
    return ("tools",) * tools + ("thinking",) * thinking


def _license(checkpoint: Checkpoint, extras: Extras) -> str:
    text = _metadata(checkpoint, "general.license") or (extras.license or "").strip()
    return text.partition("\n")[0].strip()


def _metadata(checkpoint: Checkpoint, key: str) -> str:
    if checkpoint.kind != "gguf" or isinstance(checkpoint, StoreCheckpoint):
        return ""
    value = checkpoint.metadata.get(key)
    return value if isinstance(value, str) else ""
