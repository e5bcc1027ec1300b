"""``localrt draft train TARGET``: train a small head that guesses what a model says next.

The same command continues what was interrupted.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, fields
from pathlib import Path

from localrt.cli.help import Examples
from localrt.cli.loading import resolve_model
from localrt.cli.options import BARE_MODEL_HELP, THREADS_HELP, Flag, add_flags, add_hub_arguments
from localrt.cli.progress import ProgressLine
from localrt.drafts.head import TRAINED
from localrt.drafts.training import DraftTraining, TrainingReport, train_draft
from localrt.errors import OptionError
from localrt.formatting import format_bytes, format_count, format_seconds
from localrt.quantizing.text import read_text
from localrt.settings import Settings

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Examples = (
    ("localrt draft train org/name --text notes/", "on texts like those that it will write"),
    ("localrt run org/name --draft head", "use it"),
)

_EPILOG = """\
The model first writes text itself (--generate): continuations of --text, and conversations that it
invents. The head learns to guess that text. To use it: localrt run TARGET --draft DIR (--draft head
finds it in the default folder). Training needs torch: pip install 'localrt[quantize]'.
"""

_PLAIN_LINE_S = 60.0  # between lines where the output is no terminal

_TEXT_HELP = (
    "a UTF-8 text, or a folder of texts, that resembles what the model will read and write "
    "(default: what the model writes itself)"
)
_GENERATE_HELP = "tokens for the model to write (default: 500000); 0 learns from --text alone"
_FLAGS: tuple[Flag, ...] = (
    ("--text", Path, "PATH", _TEXT_HELP),
    ("--generate", int, "N", _GENERATE_HELP),
    ("--tokens", int, "N", "tokens to learn from (default: all, three times)"),
    ("--depth", int, "N", "blocks of the head, 1 to 5 (default: 1)"),
    ("--vocab", int, "N", "tokens that the head can guess (default: 8192)"),
    ("--length", int, "N", "tokens per sequence (default: 384)"),
    ("--batch", int, "N", "sequences per step (default: 4)"),
    ("--out", Path, "DIR", "folder for the head (default: where --draft head finds it)"),
    ("--seed", int, "N", "for all random choices (default: 0)"),
    ("--device", str, "D", "cpu or cuda (default: cpu)"),
    ("--threads", int, "N", THREADS_HELP),
    ("--keep-work", bool, None, "keep the text and its hidden states"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("action", choices=("train",), help="train a head")
    parser.add_argument("model", metavar="TARGET", help=BARE_MODEL_HELP)
    add_flags(parser, _FLAGS, device="cpu")
    add_hub_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Train, and say where the head lies and how well it guesses."""
    names = [field.name for field in fields(DraftTraining)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    training = DraftTraining(**given)  # before anything is downloaded
    text = None if args.text is None else read_text(args.text)
    if training.generate == 0 and text is None:
        raise OptionError("there is nothing to learn from: give --text, or --generate above 0")
    settings = Settings.from_environment()
    started = time.monotonic()
    with ProgressLine(plain_s=_PLAIN_LINE_S) as line:
        model = resolve_model(args, settings, line)
        base = model.path.stem if model.path.is_file() else model.path.resolve().name
        report = train_draft(
            model.path,
            args.out or settings.data_dir / TRAINED / base,
            training,
            text=text,
            keep=args.keep_work,
            progress=line,
        )
    seconds = time.monotonic() - started
    if args.json:
        record = {"model": model.name, **asdict(report), "seconds": seconds}
        print(json.dumps(record, default=str))
    else:
        print(_summary(model.name, report, seconds))
    return 0


def _summary(name: str, report: TrainingReport, seconds: float) -> str:
    agreed = ", ".join(f"{100 * share:.0f} %" for share in report.agreed)
    return (
        f"draft head for {name}: {report.path}\n"
        f"{format_bytes(report.nbytes)}, after {format_count(report.tokens)} tokens in "
        f"{format_seconds(seconds)}\n"
        f"its best guess is right for {agreed} of the tokens 1, 2, 3 ahead"
    )
