"""``localrt serve [MODEL]``: serves one model, or all on this machine, over HTTP until Ctrl+C.

The port is opened before the model is loaded, so that a port in use is reported at once. The log
goes to stderr, one line for each request; with ``--json`` lines are JSON, on stdout. A program that
starts a server of its own gives ``--parent``, and reads one line of JSON or ``--ready-file``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

import localrt
from localrt.cli.help import Examples
from localrt.cli.loading import load_model
from localrt.cli.options import (
    BARE_MODEL_HELP,
    Flag,
    add_flags,
    add_load_arguments,
    add_sampling_arguments,
    load_options,
    sampling_options,
)
from localrt.cli.output import note, say, say_json
from localrt.client.servers import LocalServer, announced
from localrt.common.errors import OptionError
from localrt.common.files import parse_json, write_text
from localrt.common.formatting import parse_duration, parse_size
from localrt.common.option_names import on_command_line, option, spelled
from localrt.common.processes import is_alive, process_name
from localrt.common.progress import NOTE, Progress
from localrt.common.settings import SERVE_KEY, Settings
from localrt.engine.options import read_options
from localrt.hub import list_models
from localrt.hub.listing import client_names
from localrt.server.options import ServeOptions, is_loopback

if TYPE_CHECKING:  # the extra may be missing
    from localrt.server.guard import LogLine
    from localrt.server.models import Models
    from localrt.server.pool import ModelPool

EXAMPLES: Examples = (
    ("localrt serve", "all models of this machine, at http://127.0.0.1:8080/v1"),
    ("localrt serve model.gguf", "one model"),
    ("LOCALRT_API_KEY=secret localrt serve model.gguf --host 0.0.0.0", "for the network"),
)


_HOST_HELP = "address to listen on (default: 127.0.0.1); 0.0.0.0 lets other machines in"
_CORS_HELP = (
    "let web pages of this origin send requests, like https://example.org, or all (*); "
    "may be repeated (default: none)"
)
_KEY_HELP = (
    f"key that requests must send (default: ${SERVE_KEY}, a better place for it; unset: no key)"
)
_RUNNING_HELP = "most answers at a time; they share passes (default: 16)"
_CONNECTIONS_HELP = (
    "most requests that are open at a time (default: 1000); more get 503, but /health answers"
)
_KEEP_HELP = (
    "without MODEL: how long a model keeps its memory after its last answer, like 30s, 10m or 2h "
    "(default: 5m); 0 gives it back at once, -1 never"
)
_STRICT_HELP = (
    "refuse requests for models that are not here (default: one model answers to any name, of "
    "several the one of `localrt alias '*' MODEL`)"
)
_CONVERSATIONS_HELP = (
    "with a key, let other machines read and write your conversations, on the page and by HTTP "
    "(default: on this machine's own address alone)"
)
_PARENT_HELP = "end with this process, and print the address as JSON (default: none)"
_UNSET = ServeOptions()
# Flags for a single model.
_ALONE = ("name", "adapter", "chat_template", "pre_tokenizer", "revision")
_FLAGS: tuple[Flag, ...] = (
    ("--host", str, None, _HOST_HELP),
    ("--port", int, None, "port (default: 8080); 0: a free one, told as a line of JSON on stdout"),
    ("--name", str, None, "what requests call MODEL (default: its own name)"),
    ("--keep-alive", str, "TIME", _KEEP_HELP),
    ("--api-key", str, "KEY", _KEY_HELP),
    ("--cors", list, "ORIGIN", _CORS_HELP),
    ("--max-running", int, "N", _RUNNING_HELP),
    ("--max-queued", int, "N", "most answers that wait for their turn (default: 64)"),
    ("--max-connections", int, "N", _CONNECTIONS_HELP),
    ("--max-body", str, "SIZE", "largest request (default: 8MiB)"),
    ("--strict-models", bool, None, _STRICT_HELP),
    ("--allow-pull", bool, None, "let clients download models of the hub (Ollama's /api/pull)"),
    ("--conversations", bool, None, _CONVERSATIONS_HELP),
    ("--drain", float, "S", "when stopping, seconds for answers to finish (default: 20)"),
    ("--parent", int, "PID", _PARENT_HELP),
    ("--ready-file", str, "FILE", "write that line to FILE, removed at the end (default: none)"),
    ("--json", bool, None, "log to stdout as JSON"),
    ("--quiet", bool, None, "do not log requests"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    every = f"{BARE_MODEL_HELP} (default: all models of this machine)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=every)
    group = parser.add_argument_group("server")
    names = ("host", "port", "max_running", "max_queued", "max_connections")
    kept = {name: getattr(_UNSET, name) for name in names}
    shown = {"max_body": "8MiB", "drain": _UNSET.drain_s, "keep_alive": "5m"}
    add_flags(group, _FLAGS, **kept, **shown, cors=[])
    add_load_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Listen, load, serve, and let answers finish."""
    from localrt.server.running import open_socket  # once the extra is known to be there

    options = _options(args)
    defaults = sampling_options(args)
    read_options(defaults)
    if args.model is None:
        _check_all(args)
    with closing(open_socket(options)) as bound:
        _prepare_companion(args)
        if not is_loopback(options.host) and options.api_key is None:
            note(
                f"anyone who can reach {options.host} may use the models: set a key in ${SERVE_KEY}"
            )
        if args.model is None:
            _serve(args, options, bound, _pool(args, options, defaults), None)
            return 0
        from localrt.server.models import OneModel

        with load_model(args, reads_text=False) as model:
            _set_defaults(model, defaults)
            served = OneModel(model, options)
            _serve(args, options, bound, served, {served.name: str(model.info.path)})
    return 0


def _serve(
    args: argparse.Namespace,
    options: ServeOptions,
    bound: socket,
    models: Models,
    paths: dict[str, str] | None,
) -> None:
    """Serve ``models``; other commands find the server by its ``paths`` while it runs."""
    from localrt.server.running import serve

    with ExitStack() as stack:

        def ready(url: str) -> None:
            server = LocalServer(f"{url}/v1", os.getpid(), options.api_key, paths)
            stack.enter_context(announced(server, Settings.from_environment()))
            names = [model.name for model in models.offered()]
            host, port = bound.getsockname()[:2]
            told = {
                **{"event": "ready", "url": f"{url}/v1", "host": host, "port": port},
                **{"pid": os.getpid(), "model": names[0] if paths else None, "models": names},
            }
            if args.ready_file is not None:
                file = Path(args.ready_file)
                stack.callback(_remove_ready_file, file, os.getpid())
                write_text(file, json.dumps(told))
            if args.json or args.parent is not None or not args.port:
                say_json(told)
            if not args.json and args.parent is None:
                count = f"{len(names)} model{'s' * (len(names) != 1)} of this machine"
                shown = names[0] if paths else count
                line = f"{shown} at {url}/v1, the chat page at {url}/ (Ctrl+C stops)"
                say(line, file=sys.stderr)

        log = None if args.quiet else _log_json if args.json else _log
        tell = partial(_say, args)
        serve(models, options, bound=bound, log=log, note=tell, on_ready=ready)


def _prepare_companion(args: argparse.Namespace) -> None:
    """Watch ``--parent``, and remove a ``--ready-file`` that a crash left.

    Raises:
        OptionError: there is no folder for the file, the file is another, or no such process.
    """
    if args.ready_file is not None:
        file = Path(args.ready_file)
        if not file.parent.is_dir():
            raise OptionError(f"{option('ready_file')} must be in a folder that exists, is {file}")
        if os.path.lexists(file) and not _remove_ready_file(file):
            raise OptionError(f"{option('ready_file')}: {file} is another file: give another name")
    if args.parent is not None:
        name = process_name(args.parent)
        if name is None:
            raise OptionError(f"{option('parent')} must be a process's id: none has {args.parent}")
        threading.Thread(target=_end_with, args=(name,), daemon=True).start()


def _remove_ready_file(file: Path, pid: int | None = None) -> bool:
    """Remove a ready file, of the process ``pid`` if given; return whether it was one."""
    try:
        told = parse_json(file.read_text("utf-8"))
        found = told["event"] == "ready" and pid in (None, told["pid"])
    except (OSError, ValueError, LookupError, TypeError):
        return False
    if found:
        file.unlink(missing_ok=True)
    return found


def _end_with(parent: str) -> None:
    while is_alive(parent):
        time.sleep(0.5)
    signal.raise_signal(signal.SIGTERM)  # handled as if it came from outside


def _pool(
    args: argparse.Namespace, options: ServeOptions, defaults: dict[str, object]
) -> ModelPool:
    """Return the pool of all models on this machine."""
    from localrt.server.pool import LocalFile, ModelPool

    settings = Settings.from_environment()
    given = load_options(args) | {"offline": True}
    ram, gpu_memory = (
        None if size is None else parse_size(size, option(name))
        for name, size in (("ram", args.ram), ("gpu_memory", args.gpu_memory))
    )

    def load(
        name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int, **longer: int
    ) -> localrt.Model:
        own = {"shrinkable": shrinkable, "cancel": cancel, "progress": say_note, **longer}
        if on_gpu and gpu_memory is not None:
            own["gpu_memory"] = max(1, gpu_memory - on_gpu)
        model = localrt.load(name, **{**given, **own})
        _set_defaults(model, defaults)
        return model

    def files() -> list[LocalFile]:
        named, used = client_names(list_models(settings)), localrt.uses()
        return [
            LocalFile(
                *(name, model.name, model.bytes, model.path, model.aliases),
                used=used.get(model.name, 0.0),
            )
            for name, model in named.items()
        ]

    def say(text: str) -> None:
        _say(args, text, event="models")

    def say_note(progress: Progress) -> None:
        if progress.stage == NOTE:
            say(spelled(progress.detail, on_command_line))

    return ModelPool(load, files, options, ram=ram, on_change=say)


def _set_defaults(model: localrt.Model, defaults: dict[str, Any]) -> None:
    if model.info.writes:
        model.chat().set(**defaults)  # what it cannot do is refused here, not in each answer
    model.defaults.update(defaults)


def _check_all(args: argparse.Namespace) -> None:
    """Check that the flags make sense for all models.

    Raises:
        OptionError: a flag is for a single model.
    """
    for name in _ALONE:
        if getattr(args, name):
            raise OptionError(f"{option(name)} is for one model: give MODEL, or leave it out")


def _options(args: argparse.Namespace) -> ServeOptions:
    return ServeOptions(
        host=args.host,
        port=args.port,
        name=args.name,
        api_key=Settings.from_environment().serve_key if args.api_key is None else args.api_key,
        origins=tuple(args.cors),
        max_running=args.max_running,
        max_queued=args.max_queued,
        max_connections=args.max_connections,
        max_body=parse_size(args.max_body, option("max_body")),
        drain_s=args.drain,
        keep_alive_s=parse_duration(args.keep_alive, option("keep_alive")),
        strict_models=args.strict_models,
        allow_pull=args.allow_pull,
        conversations=args.conversations,
    )


def _log(line: LogLine) -> None:
    if (line.method, line.status) == ("GET", 200) and line.path.startswith("/v1/conversations/"):
        return  # a page looks for news every few seconds
    now = time.strftime("%H:%M:%S")
    text = f"{now} {line.client} {line.method} {line.path} {line.status} {line.seconds:.2f} s"
    say(text, file=sys.stderr)


def _log_json(line: LogLine) -> None:
    record = {**asdict(line), "seconds": round(line.seconds, 4)}
    say_json({"event": "request", "time": round(time.time(), 3), **record})


def _say(args: argparse.Namespace, text: str, *, event: str = "note") -> None:
    if args.json:
        say_json({"event": event, "time": round(time.time(), 3), "text": text})
    elif not args.quiet:
        say(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)
