"""Loads the model of a command's arguments: from this machine, the hub, or a server.

The library is imported with the first model, and the remote client with the first server.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import localrt
from localrt.chat import ChatModel
from localrt.cli.help import ProgressLine
from localrt.cli.options import load_options
from localrt.cli.output import note
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.option_names import on_command_line, option, spelled
from localrt.common.progress import ProgressCallback, note_to
from localrt.common.settings import Settings
from localrt.hub import DEMO_NAME, ResolvedModel, list_models, resolve
from localrt.hub.listing import client_names
from localrt.planning import chooser

if TYPE_CHECKING:  # imported when a server is asked
    from localrt.client.answer import ListedModel
    from localrt.client.servers import LocalServer

_MOST_BASE_TOKENS = 512


def load(name: str, options: dict[str, Any]) -> localrt.Model:
    """Call ``localrt.load`` with a progress line."""
    with ProgressLine() as line:
        model = localrt.load(name, progress=line, **options)
    if adapters := options.get("adapters"):
        model.defaults["adapter"] = next(iter(adapters))  # this replaces the model's own adapter
    return model


def load_model(args: argparse.Namespace, *, reads_text: bool = True) -> localrt.Model:
    """Load the arguments' model on this machine; print its notes to stderr.

    Raises:
        TokenizerError: the command needs text, and the model has no tokenizer.
    """
    model = load(args.model, load_options(args))
    if reads_text:
        try:
            _ = model.tokenizer
        except LocalrtError:
            model.close()
            raise
    _print_notes(model)
    return model


def load_chat_model(args: argparse.Namespace) -> ChatModel:
    """Load the arguments' model as ``load_model`` does, or connect to the server's."""
    if args.endpoint is None:
        return load_model(args)
    model = connect_endpoint(args)
    _print_notes(model)
    return model


def limit_base(model: ChatModel, options: dict[str, Any], *, raw: bool = False) -> int:
    """Set a limit for a model without a chat template, and for a ``raw`` prompt: a text that is
    completed seldom ends by itself. Returns it, or 0 if there is none.
    """
    chats = model.info.has_chat_template and not raw
    if chats or {**model.defaults, **options}.get("max_tokens") is not None:
        return 0
    options["max_tokens"] = _MOST_BASE_TOKENS
    return _MOST_BASE_TOKENS


def cut_base(limit: int) -> str:
    """Say that an answer was cut at the limit of ``limit_base``."""
    why = "without a chat template a text seldom ends by itself; --max-tokens N changes it"
    return f"cut off after {limit} tokens: {why}"


def _print_notes(model: ChatModel) -> None:
    for line in model.info.notes:
        note(spelled(line, on_command_line))


def resolve_model(
    args: argparse.Namespace, settings: Settings, line: ProgressLine
) -> ResolvedModel:
    """Find the files of ``args.model``; download them if they are missing."""
    return resolve(
        args.model,
        settings=settings,
        revision=args.revision,
        offline=args.offline,
        choose=chooser(settings, say=note_to(line)),
        progress=line,
    )


# -- servers -------------------------------------------------------------------------------------


def choose_model(args: argparse.Namespace) -> None:
    """Check ``--endpoint`` against the other flags. Without it, give MODEL its default, and use one
    of this user's servers if it has the model. Find ``--embedding-model``, too.

    Raises:
        OptionError: the flags cannot be combined.
    """
    args.note, args.embedder = "", None
    if args.embedding_model is not None:
        how = {"ram": args.ram, "offline": args.offline}
        with ProgressLine() as line:
            args.embedder = localrt.embedder(args.embedding_model, progress=line, **how)
    if args.endpoint is None:
        if args.api_key is not None:
            raise OptionError("--api-key needs --endpoint URL")
        args.model = DEMO_NAME if args.model is None else args.model
        if not args.no_server and _is_plain(args):
            _use_running_server(args)
        return
    from localrt.client.servers import read_address

    read_address(args.endpoint, _key(args))
    values = load_options(args).items()
    given = [name for name, value in values if value not in (None, "auto", False)]
    if given:
        raise OptionError(
            f"{option(given[0])} is for models on this machine: leave it out with --endpoint"
        )


_HERE = (
    *("draft", "tree_budget", "overflow", "regex", "grammar"),
    *("raw", "suffix", "batch", "resume", "load"),
)


def _is_plain(args: argparse.Namespace) -> bool:
    """Whether a server may be used: no flag says how to load the model, or needs it here."""
    given = {**load_options(args), **{name: getattr(args, name, None) for name in _HERE}}
    return all(value in (None, "auto", False) for value in given.values())


def _use_running_server(args: argparse.Namespace) -> None:
    """If one of this user's servers has MODEL, use it, and say so in ``args.note``."""
    settings = Settings.from_environment()
    found = served_model(args.model, settings)
    if found is not None:
        server, listed = found
        args.endpoint, args.model, args.api_key = server.url, listed.name, server.key or ""
        where = f"{listed.name} of the server at {server.url}"
        args.note = f"using {where} (--no-server loads it here)"


def served_model(
    name: str, settings: Settings, servers: Sequence[LocalServer] | None = None
) -> tuple[LocalServer, ListedModel] | None:
    """Return a model of this name if one of ``servers``, by default this user's, has it.

    Skips servers that do not answer or do not list the model: they may have ended, or use other
    folders.
    """
    from localrt.client.servers import local_servers

    servers = local_servers(settings) if servers is None else servers
    if not servers:
        return None
    from localrt.client.model import models_of  # slow to import

    try:
        path: Path | None = resolve(name, settings=settings, download=False).path.resolve()
    except LocalrtError:
        path = None  # it may be a name that only the server knows
    for server in servers:
        try:
            listed = {each.name: each for each in models_of(server)}
        except LocalrtError:
            continue
        paths = server.models
        if paths is None:
            named = client_names(list_models(settings))
            paths = {each: str(model.path) for each, model in named.items()}
        for each, at in paths.items():
            if each in listed and (Path(at).resolve() == path or each == name):
                return server, listed[each]
    return None


def connect_endpoint(
    args: argparse.Namespace, progress: ProgressCallback | None = None, *, name: str | None = None
) -> ChatModel:
    """Connect to the server's model of this name, or else of the arguments."""
    from localrt.client.model import connect

    name = name or args.model or None
    model = connect(args.endpoint, name, api_key=_key(args), progress=progress)
    model.info = replace(model.info, notes=(*filter(None, [args.note]), *model.info.notes))
    return model


def endpoint_models(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the names of the server's models, with a description of each.

    Raises:
        LocalrtError: the server cannot be reached, or lists no model.
    """
    from localrt.client.model import list_remote
    from localrt.client.servers import read_address

    found = list_remote(read_address(args.endpoint, _key(args)))
    return [
        (each.name, " · ".join(filter(None, (_context(each.ctx), each.state)))) for each in found
    ]


def _context(tokens: int) -> str:
    return f"context {tokens:,}" if tokens else ""


def model_title(args: argparse.Namespace) -> str:
    """Return the name to show until the model is loaded."""
    if args.model:
        return str(args.model)
    from localrt.client.servers import read_address

    return read_address(args.endpoint).place


def _key(args: argparse.Namespace) -> str | None:
    key: str | None = args.api_key
    return Settings.from_environment().endpoint_key if key is None else key
