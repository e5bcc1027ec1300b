"""``localrt serve [MODEL]``: the model behind OpenAI's HTTP protocol, until Ctrl+C.

The port is taken before the model is loaded, so that one in use is known at once. The log goes to
stderr, one line for each request; with ``--json`` lines are JSON, on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from localrt.cli.help import Examples
from localrt.cli.loading import load_model
from localrt.cli.options import (
    Flag,
    add_flags,
    add_load_arguments,
    add_model_argument,
    add_sampling_arguments,
    sampling_options,
)
from localrt.engine.options import read_options
from localrt.errors import MissingExtraError
from localrt.formatting import parse_size
from localrt.serve.options import ServeOptions, is_loopback
from localrt.settings import SERVE_KEY, Settings

if TYPE_CHECKING:  # the extra may be missing
    from localrt.serve.guard import LogLine

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Examples = (
    ("localrt serve model.gguf", "http://127.0.0.1:8080/v1, for this machine"),
    ("LOCALRT_API_KEY=secret localrt serve model.gguf --host 0.0.0.0", "for the network"),
)


_HOST_HELP = "address to listen on (default: 127.0.0.1); 0.0.0.0 lets other machines in"
_CORS_HELP = (
    "let web pages of this origin send requests, like https://example.org, or all (*); "
    "may be repeated"
)
_CONNECTIONS_HELP = (
    "most open connections (default: 1000, or fewer where the system allows few open files); "
    "for more the longest idle are closed"
)
_FLAGS: tuple[Flag, ...] = (
    ("--host", str, None, _HOST_HELP),
    ("--port", int, None, "port (default: 8080); 0 takes a free one"),
    ("--name", str, None, "the model's name in requests (default: its own name)"),
    ("--api-key", str, "KEY", f"key that requests must send; better set it in ${SERVE_KEY}"),
    ("--cors", list, "ORIGIN", _CORS_HELP),
    ("--max-running", int, "N", "most answers at a time; they share passes (default: 16)"),
    ("--max-queued", int, "N", "most answers that wait for their turn (default: 64)"),
    ("--max-connections", int, "N", _CONNECTIONS_HELP),
    ("--max-body", str, "SIZE", "largest request (default: 8MiB)"),
    ("--drain", float, "S", "when stopping, seconds for answers to finish (default: 20)"),
    ("--json", bool, None, "log to stdout as JSON"),
    ("--quiet", bool, None, "do not log requests"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    unset = ServeOptions()
    names = ("host", "port", "max_running", "max_queued", "max_connections")
    kept = {name: getattr(unset, name) for name in names}
    add_flags(group, _FLAGS, **kept, cors=[], max_body="8MiB", drain=unset.drain_s)
    add_load_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Listen, load, serve, and let answers finish."""
    _check_extra()
    from localrt.serve.server import open_socket, serve  # once the extra is known to be there

    options = _options(args)
    defaults = sampling_options(args)
    read_options(defaults)
    with closing(open_socket(options)) as bound:
        if not is_loopback(options.host) and options.api_key is None:
            print(
                f"localrt: anyone who can reach {options.host} may use the model: "
                f"set a key in ${SERVE_KEY}",
                file=sys.stderr,
            )
        with load_model(args) as model:
            model.chat().set(**defaults)  # what it cannot do is refused here, not in each answer
            model.defaults.update(defaults)
            name = options.name or model.name

            def ready(url: str) -> None:
                if args.json:
                    _print_json(event="ready", model=name, url=f"{url}/v1")
                else:
                    print(f"{name} at {url}/v1 (Ctrl+C stops)", file=sys.stderr, flush=True)

            log = None if args.quiet else _log_json if args.json else _log
            serve(model, options, bound=bound, log=log, on_ready=ready)
    return 0


def _check_extra() -> None:
    try:
        import fastjsonschema  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"serve needs {error.name}: install it with pip install 'localrt[server]'"
        ) from error


def _options(args: argparse.Namespace) -> ServeOptions:
    return ServeOptions(
        host=args.host,
        port=args.port,
        name=args.name,
        api_key=args.api_key or Settings.from_environment().serve_key,
        origins=tuple(args.cors),
        max_running=args.max_running,
        max_queued=args.max_queued,
        max_connections=args.max_connections,
        max_body=parse_size(args.max_body),
        drain_s=args.drain,
    )


def _log(line: LogLine) -> None:
    now = time.strftime("%H:%M:%S")
    text = f"{now} {line.client} {line.method} {line.path} {line.status} {line.seconds:.2f} s"
    print(text, file=sys.stderr, flush=True)


def _log_json(line: LogLine) -> None:
    record = {**asdict(line), "seconds": round(line.seconds, 4)}
    _print_json(event="request", time=round(time.time(), 3), **record)


def _print_json(**record: object) -> None:
    print(json.dumps(record), flush=True)
