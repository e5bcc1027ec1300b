"""``localrt show MODEL``: describes a model, where its files are, and how to run it.

It reads the headers of the model's files, no weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

from localrt.chat_format.chat_template import load_template
from localrt.chat_format.template_syntax import TemplateSyntax
from localrt.cli.help import Examples, ProgressLine
from localrt.cli.output import say_result
from localrt.common.errors import LocalrtError, ModelNotFoundError
from localrt.common.formatting import format_bytes, format_count, join_lines, one_line
from localrt.common.progress import note_to
from localrt.common.settings import Settings
from localrt.drafts.discovery import DraftOffer, head_to_pull, own_draft
from localrt.engine.sampling import sampling_defaults
from localrt.hub import HubRef, LocalModel, ResolvedModel, list_models, resolve
from localrt.hub.listing import expand_name
from localrt.hub.names import looks_like_path, parse_hub_ref, shown_path
from localrt.hub.other_programs import Extras
from localrt.hub.searching import Variant
from localrt.library import list_variants
from localrt.loading.format_names import quantization_name
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.registry import ENCODERS
from localrt.models.vision.cost import SIDE, PictureCost, picture_cost
from localrt.models.weight_files import files_nbytes
from localrt.planning import chooser

EXAMPLES: Examples = (
    ("localrt show llama3.2:3b", "size, context, template, parameters, licence"),
    ("localrt show model.gguf --json", "the same for programs"),
)
_PLACES = {"yours": "your files", "package": "an installed package"}
_SYSTEM = 300  # characters of a system prompt
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
    ``checked`` says what a confined process checked at the first opening, when and under what.
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
    checked: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help="any MODEL; `localrt list` prints those on this machine"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what is known; returns the exit status. No model is downloaded."""
    settings = Settings.from_environment()
    try:
        with ProgressLine() as line:
            choose = chooser(settings, say=note_to(line))
            found = resolve(args.model, settings=settings, download=False, choose=choose)
    except ModelNotFoundError:
        name = expand_name(args.model, settings)
        if parse_hub_ref(name) != HubRef(name) or looks_like_path(name) or settings.offline:
            raise
        variants = list_variants(name)
        return _print(args, _offer_record(name, variants), _offer_lines(args.model, variants))
    listed = next((m for m in list_models(settings) if m.name == found.listed_name), None)
    model = describe_model(found, listed, own_draft(found.path, settings))
    return _print(args, asdict(model), _lines(model))


def _print(
    args: argparse.Namespace, record: dict[str, object], lines: list[tuple[str, str]]
) -> int:
    width = max(len(label) for label, _ in lines)
    text = join_lines(f"{label.ljust(width)}  {text}" for label, text in lines)
    say_result(record, text, as_json=args.json)
    return 0


def _lines(model: ModelDescription) -> list[tuple[str, str]]:
    abilities = f", knows {' and '.join(model.abilities)}" if model.abilities else ""
    parameters = ", ".join(f"{name} {_value(value)}" for name, value in model.parameters.items())
    packed = [shown_path(path) for path in model.packed]
    size = f"{format_bytes(model.bytes)}, {model.quantization}".rstrip(", ")
    lines = [
        ("name", model.name),
        ("title", model.title),
        ("family", f"{model.architecture}, {format_count(model.weights)} parameters"),
        ("size", size),
        *(("note", note) for note in model.notes),
        ("where", f"{_PLACES.get(model.place, model.place)}: {shown_path(model.path)}"),
        ("context", f"{model.context} tokens" if model.context else ""),
        ("template", f"{model.template}{abilities}"),
        ("pictures", _pictures(model)),
        ("system", one_line(model.system or "", _SYSTEM)),
        ("parameters", parameters),
        ("checked", model.checked),
        ("adapters", ", ".join(shown_path(path) for path in model.adapters)),
        ("licence", one_line(model.license, 100)),
        (
            "packed copy",
            f"{format_bytes(model.packed_bytes)}: {', '.join(packed)}" if packed else "",
        ),
    ]
    return [(label, text) for label, text in lines if text]


def _pictures(model: ModelDescription) -> str:
    if not model.vision_bytes:
        return ""
    size, room = format_bytes(model.vision_bytes), format_bytes(model.picture_bytes)
    return (
        f"some {model.picture_tokens} tokens for {SIDE} x {SIDE} pixels, {room} while one is read; "
        f"the vision tower has {size}"
    )


def _value(value: object) -> str:
    return " ".join(map(repr, value)) if isinstance(value, list | tuple) else str(value)


def _offer_record(name: str, variants: Sequence[Variant]) -> dict[str, object]:
    return {"name": name, "here": False, "variants": [asdict(each) for each in variants]}


def _offer_lines(name: str, variants: Sequence[Variant]) -> list[tuple[str, str]]:
    """Return lines on the hub's files of a model, and which of several to use."""
    models = [each for each in variants if not each.drafts]
    files = ", ".join(f"{each.label} {format_bytes(each.bytes)}" for each in models)
    lines = [
        ("name", name),
        ("where", f"not on this machine: `localrt pull {name}` downloads it"),
        ("files", files),
    ]
    lines += [("recommended", f"{each.name}: {each.why}") for each in variants if each.why]
    return lines + [("draft", head_to_pull(each.name).line) for each in variants if each.drafts][:1]


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
            checked=found.checked,
        )


def _vision(path: Path, extras: Extras) -> tuple[PictureCost | None, list[str]]:
    """What a picture costs, and why pictures cannot be used."""
    try:
        return picture_cost(path, extras.projectors), []
    except LocalrtError as error:
        return None, [f"pictures are refused: {error}"]


def _template(checkpoint: Checkpoint, extras: Extras) -> tuple[str, tuple[str, ...]]:
    if checkpoint.architecture in ENCODERS:
        return "none: the model embeds or ranks texts and writes none", ()
    try:
        own = load_template(checkpoint)
        if own is not None:
            own.render([{"role": "user", "content": "Hello"}])
    except LocalrtError as error:
        return f"its own cannot be used: {error}", ()
    if own is not None:
        abilities = _abilities(own.tool_source)
        unknown = "tools" in abilities and TemplateSyntax.of(own).unknown
        note = "; it writes tool calls in an unknown syntax: they stay text" if unknown else ""
        return f"its own{note}", abilities
    where = "; Ollama's is in Go's language, give one in Jinja2" if extras.go_template else ""
    return f"none: chats are in a plain format{where}", ()


def _abilities(source: str) -> tuple[str, ...]:
    thinking = any(each in source for each in _THINKING)
    return ("tools",) * ("tools" in source) + ("thinking",) * thinking


def _license(checkpoint: Checkpoint, extras: Extras) -> str:
    text = _metadata(checkpoint, "general.license") or (extras.license or "").strip()
    return text.partition("\n")[0].strip()


def _metadata(checkpoint: Checkpoint, key: str) -> str:
    if checkpoint.kind != "gguf" or isinstance(checkpoint, StoreCheckpoint):
        return ""
    value = checkpoint.metadata.get(key)
    return value if isinstance(value, str) else ""
