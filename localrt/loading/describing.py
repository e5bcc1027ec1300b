"""What is known of a model on this machine without loading it: ``localrt show``.

It opens the model's files and reads their headers. No weight is read, and nothing is planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from localrt.chat_format.templates.chat_template import load_template
from localrt.chat_format.templates.go_template import to_jinja
from localrt.common.errors import LocalrtError, TemplateError
from localrt.engine.sampling import sampling_defaults
from localrt.hub import LocalModel, ResolvedModel
from localrt.hub.other_programs import Extras
from localrt.loading.quantization_name import quantization_name
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint

_THINKING = ("enable_thinking", "reasoning_effort", "<think>", "<|channel|>", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """``place`` and ``packed`` are those of ``LocalModel``. ``template`` says where the chat
    template is from, ``abilities`` what it knows of: ``"tools"``, ``"thinking"``. ``parameters``
    are defaults of its answers, ``context`` is what it was trained for, in tokens. ``notes`` say
    what quantized weights are held as.
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
    parameters: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[Path, ...] = ()
    license: str = ""
    packed: tuple[Path, ...] = ()
    packed_bytes: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        paths = {"path": str(self.path), "adapters": [str(each) for each in self.adapters]}
        packed = [str(each) for each in self.packed]
        lists = {"abilities": list(self.abilities), "notes": list(self.notes)}
        return {**asdict(self), **paths, "packed": packed, **lists}


def describe_model(found: ResolvedModel, listed: LocalModel | None) -> ModelDescription:
    """Of what ``resolve`` found; ``listed`` is its entry of ``list_models``.

    Raises:
        LocalrtError: its files cannot be read.
    """
    extras = found.extras or Extras()
    with closing(open_checkpoint(found.path)) as checkpoint:
        template, abilities = _template(checkpoint, extras)
        config = checkpoint.config
        context = config.get("max_position_embeddings")
        return ModelDescription(
            name=found.listed_name,
            path=found.path.absolute(),
            place="yours" if listed is None else listed.place,
            kind=checkpoint.kind if not isinstance(checkpoint, StoreCheckpoint) else "store",
            architecture=checkpoint.architecture,
            title=_metadata(checkpoint, "general.name"),
            weights=sum(prod(info.shape) for info in checkpoint.tensors.values()),
            bytes=_size(found.path) if listed is None else listed.bytes,
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
            notes=tuple(checkpoint.notes),
        )


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


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    return sum(each.stat().st_size for each in files)
