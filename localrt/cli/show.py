"""``localrt show MODEL``: describes a model, where its files are, and how to run it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from localrt.cli.description import ModelDescription, describe_model
from localrt.cli.help import Examples, ProgressLine
from localrt.common.errors import ModelNotFoundError
from localrt.common.formatting import format_bytes, format_count, one_line
from localrt.common.progress import note_to
from localrt.common.settings import Settings
from localrt.drafts.discovery import head_to_pull, own_draft
from localrt.hub import HubRef, list_models, resolve
from localrt.hub.known_models import KNOWN_MODELS, KnownModel
from localrt.hub.listing import expand_name
from localrt.hub.names import looks_like_path, parse_hub_ref, shown_path
from localrt.hub.searching import Variant
from localrt.library import list_variants
from localrt.models.vision.cost import SIDE
from localrt.planning import chooser

EXAMPLES: Examples = (
    ("localrt show llama3.2:3b", "size, context, template, parameters, licence"),
    ("localrt show model.gguf --json", "the same for programs"),
)
_PLACES = {"yours": "your files", "package": "an installed package"}
_SYSTEM = 300  # characters of a system prompt


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
        known = next((each for each in KNOWN_MODELS if each.repo == name), None)
        if known is not None:
            return _print(args, _known_record(known), _known_lines(known))
        if parse_hub_ref(name) != HubRef(name) or looks_like_path(name) or settings.offline:
            raise
        variants = list_variants(name)
        return _print(args, _offer_record(name, variants), _offer_lines(args.model, variants))
    listed = next((m for m in list_models(settings) if m.name == found.listed_name), None)
    model = describe_model(found, listed, own_draft(found.path, settings))
    return _print(args, model.to_dict(), _lines(model))


def _print(
    args: argparse.Namespace, record: dict[str, object], lines: list[tuple[str, str]]
) -> int:
    if args.json:
        print(json.dumps(record))
        return 0
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label.ljust(width)}  {text}")
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


def _known_record(known: KnownModel) -> dict[str, object]:
    here = {"name": known.name, "repo": known.repo, "page": known.page, "here": False}
    return {**here, "parameters": known.parameters, "config": dict(known.config())}


def _known_lines(known: KnownModel) -> list[tuple[str, str]]:
    return [
        ("name", known.name),
        ("family", f"{known.config()['model_type']}, {known.parameters:g} B parameters"),
        ("where", f"not on this machine: `localrt pull {known.name}` downloads {known.repo}"),
        ("context", f"{known.config()['max_position_embeddings']} tokens"),
        ("source", known.page),
    ]


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
