"""``localrt chat [MODEL]``: the terminal app, or the same chat without a screen.

Text from a pipe is one prompt, answered without the app.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

import localrt
from localrt import History
from localrt.chat import ChatModel
from localrt.cli.help import Examples
from localrt.cli.loading import choose_model, connect_endpoint, endpoint_models, model_title
from localrt.cli.options import (
    EMBEDDING_HELP,
    add_endpoint_arguments,
    add_load_arguments,
    add_model_argument,
    add_sampling_arguments,
    load_options,
    sampling_options,
)
from localrt.cli.output import note
from localrt.cli.run import answer, prompt_of
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.progress import ProgressCallback
from localrt.common.settings import Settings
from localrt.engine.options import read_options
from localrt.hub import DEMO_NAME, resolve

EXAMPLES: Examples = (
    ("localrt chat", "SmolLM2, a small model"),
    ("localrt chat org/name-GGUF:Q4_K_M", "a model of the hub, downloaded once"),
    ("localrt chat model.gguf --ram 4GB", "within 4 GB of memory"),
    ("localrt chat model.gguf -c", "go on with the last conversation"),
    ("localrt chat --endpoint http://127.0.0.1:8080/v1", "with a model behind a server"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser, default=None)
    prompt = "answer this prompt on stdout and exit (default: open a conversation)"
    plain = "plain text without a screen, for screen readers and simple terminals"
    add = parser.add_argument
    add("-s", "--system", metavar="TEXT", help="system prompt (default: none)")
    add("-p", "--prompt", metavar="TEXT", help=prompt)
    file = "a document, text file or folder to read for --prompt, again for more (default: none)"
    add("--file", action="append", default=[], metavar="PATH", help=file)
    add("--embedding-model", metavar="MODEL", help=EMBEDDING_HELP)
    resume = "continue the last conversation"
    add("-c", "--continue", dest="resume", action="store_true", help=resume)
    add("--load", metavar="PATH", type=Path, help="continue a saved chat (default: a new one)")
    add("--plain", action="store_true", help=plain)
    parser.set_defaults(json=False, stats=False)
    add_endpoint_arguments(parser)
    add_load_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Open the app; without a terminal for it, chat or answer plainly."""
    if args.resume and args.model is None and args.endpoint is None:
        args.model = last_model()
    choose_model(args)
    if args.resume and args.load is not None:
        raise OptionError("give either --continue or --load, not both")
    if args.prompt is not None or not (args.plain or sys.stdin.isatty()):
        if args.resume:
            raise OptionError(
                "--continue is for the app: for a single answer use localrt run --continue"
            )
        if args.load is not None:
            raise OptionError("--load is for the app: leave it out for a single answer")
        return answer(args, prompt_of(args, "chat"), None)
    if args.file:
        raise OptionError("--file is for a single answer (--prompt): in the app write @PATH")
    options = sampling_options(args)
    read_options(options)

    def load(progress: ProgressCallback) -> ChatModel:
        if args.endpoint is not None:
            return connect_endpoint(args, progress)
        return localrt.load(args.model, progress=progress, **load_options(args))

    def load_by_name(name: str, progress: ProgressCallback, **more: int) -> ChatModel:
        if is_remote:
            return connect_endpoint(args, progress, name=name)
        # A model of this machine: choosing it does not mean asking the network, and the command's
        # revision and template are those of another model.
        own = dict.fromkeys(("revision", "chat_template", "pre_tokenizer"))
        others = {**load_options(args), **own, "offline": True, **more}
        return localrt.load(name, progress=progress, **others)

    is_remote = args.endpoint is not None and not args.note
    more: dict[str, object] = {}
    terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    if args.plain or not terminal:
        from localrt.tui.plain import run_plain as chat  # neither imports the other's toolkit
    else:
        from localrt.tui import run_chat as chat

        more = {"load_options": load_options(args), "load_by_name": load_by_name}
        more["welcome"] = welcome if args.model == DEMO_NAME and args.endpoint is None else None
        if is_remote:
            more["list_models"] = lambda: endpoint_models(args)
    return chat(
        load,
        model_name=model_title(args),
        system=args.system,
        options=options,
        chat_path=args.load,
        resume=args.resume,
        embedder=args.embedder,
        **more,
    )


def last_model() -> str | None:
    """Return the model of the last conversation if it is on this machine; the app says where
    another goes on.
    """
    with suppress(LocalrtError), History() as history:
        for line in history.notes:  # of a damaged file, which the app does not meet any more
            note(line)
        for last in history.list(limit=1):
            settings = Settings.from_environment()
            resolve(last.model, settings=settings, offline=True, download=False)
            return last.model
    return None


def welcome() -> str:
    """What newcomers should know of the demo model; takes half a second."""
    from localrt.planning.measure import known_machine
    from localrt.planning.recommend import best_here

    settings = Settings.from_environment()
    better = best_here(settings)
    line = f"{DEMO_NAME} is small, for a first try. "
    if better is not None and better.expected is not None:
        size = format_bytes(better.expected.weights)
        runs = "runs" if known_machine(settings.cache_dir) is None else "runs well"
        line += f"{better.model.name} ({size}) {runs} on this PC: F4 and its name get it. "
    return line + "F1 lists the keys."
