"""``localrt pull MODEL``: download a model, or its newest revision, and print its path."""

from __future__ import annotations

import argparse
from pathlib import Path

from localrt.cli.help import Examples, ProgressLine
from localrt.cli.output import say, say_json
from localrt.common.errors import LocalrtError, ModelNotFoundError
from localrt.common.formatting import format_bytes
from localrt.library import find_draft, pull
from localrt.models.weight_files import projectors_beside

EXAMPLES: Examples = (
    ("localrt pull llama3.2:3b", "a short name: the file that suits this machine"),
    ("localrt pull org/name", "a folder of safetensors"),
    ("localrt pull org/name-GGUF:Q4_K_M", "one file of a GGUF repository"),
    ("localrt pull qwen3:8b --draft", "and the head that was published to draft for it"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a short name such as llama3.2:3b, or org/name or org/name:Q4_K_M of the hub",
    )
    parser.add_argument(
        "--draft", action="store_true", help="get the head that drafts for it too, if there is one"
    )
    parser.add_argument(
        "--no-vision",
        action="store_true",
        help="leave out a GGUF model's vision encoder (mmproj, some hundred MB)",
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: main)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Download; returns the exit status. The next call continues an interrupted download."""
    with ProgressLine() as line:
        vision = not args.no_vision
        found = pull(args.model, revision=args.revision, vision=vision, progress=line)
        if found.source == "local":
            from localrt.models.checkpoints import open_checkpoint  # which imports numpy

            open_checkpoint(found.path).close()  # says what is wrong with it
        draft, head = find_draft(found), None
        if args.draft and draft is None:
            raise ModelNotFoundError(f"{found.name} is here; no head was found that drafts for it")
        if args.draft and draft is not None and not draft.here:
            head = pull(draft.name, progress=line)
    encoders = _encoder(found.path) if found.path.suffix == ".gguf" else []
    if args.json:
        result = {
            "name": found.name,
            "path": str(found.path),
            "revision": found.revision,
            "source": found.source,
            "vision": [str(encoder) for encoder in encoders],
            "downloaded_bytes": line.downloaded,
            "draft": draft and {"name": draft.name, "here": draft.here or head is not None},
        }
        say_json(result)
    else:
        done = "is here" if line.downloaded else "is up to date"
        done = "is yours, there is nothing to download" if found.source == "local" else done
        say(f"{found.name} {done}: {found.path}")
        for encoder in encoders:
            say(f"{encoder.name}, {format_bytes(encoder.stat().st_size)}, lets it see pictures")
        if head is not None:
            say(f"{head.name} drafts for it: {head.path}")
        elif draft is not None:
            say(draft.line)
    return 0


def _encoder(path: Path) -> list[Path]:
    """The files of the model's vision encoder, without those of other models beside it."""
    from localrt.models.vision.registry import vision_source  # which takes time to import

    try:
        encoder = vision_source(path)
    except LocalrtError:  # reported when a picture is sent
        return projectors_beside(path)[:1]
    if encoder is None:
        return []
    encoder.close()
    return [encoder.path]
