"""Summarize every text file of a folder into one JSON file.

    python summarize_folder.py FOLDER [-o summaries.json] [--model smollm2] [--sentences 2]

All files are answered in one batch: a model that is larger than memory is read once per step for
all of them. Each summary is JSON by construction (``json_schema``). Files that are too long are cut
to what the context holds. Ctrl+C keeps the summaries that are finished.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

import localrt

SUFFIXES = {".txt", ".md", ".rst", ".log"}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "summary": {"type": "string", "maxLength": 500},
    },
    "required": ["title", "summary"],
    "additionalProperties": False,
}
ASK = "Give a title and a summary of {sentences} sentences for this text, as JSON.\n\n{text}"


def cut(model: localrt.Model, text: str, tokens: int) -> str:
    """The beginning of ``text`` that has at most so many tokens."""
    ids = model.tokenize(text, add_special=False)
    return text if len(ids) <= tokens else model.detokenize(ids[:tokens])


def summarize(
    model: localrt.Model, files: list[Path], *, sentences: int = 2, tokens: int = 250
) -> dict[str, Any]:
    """A title and a summary for each file, by its name; what failed has an ``error``."""
    room = model.info.ctx - tokens - 128  # the question, and the template around it
    prompts = [
        ASK.format(
            sentences=sentences,
            text=cut(model, file.read_text(encoding="utf-8", errors="replace"), room),
        )
        for file in files
    ]
    found: dict[str, Any] = {}
    texts = [""] * len(files)
    cancel = threading.Event()
    stream = model.stream_batch(
        prompts,
        json_schema=SCHEMA,
        max_tokens=tokens,
        temperature=0,
        errors="return",
        cancel=cancel,
        on_progress=lambda step: print(f"{step.done} of {step.total} {step.unit}", file=sys.stderr),
    )
    try:
        for index, chunk in stream:
            name = files[index].name
            texts[index] += chunk.text
            if chunk.error is not None:
                found[name] = {"error": str(chunk.error)}
            elif chunk.finish_reason == "stop":
                found[name] = json.loads(texts[index])
            elif chunk.finish_reason is not None:
                found[name] = {"error": f"no room for the summary ({chunk.finish_reason})"}
    except KeyboardInterrupt:
        cancel.set()
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Summarize every text file of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("summaries.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sentences", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=250, help="of a summary at most")
    args = parser.parse_args(arguments)
    files = sorted(file for file in args.folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        print(f"no text files in {args.folder}", file=sys.stderr)
        return 1
    try:
        with localrt.load(args.model, ctx=args.ctx) as model:
            found = summarize(model, files, sentences=args.sentences, tokens=args.tokens)
    except localrt.LocalrtError as error:
        print(error, file=sys.stderr)
        return 1
    args.output.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(found)} summaries in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
