"""``localrt bench --mix``: servers under several applications at once."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path

from localrt.bench.mix.mix import SHIPPED, read_mix
from localrt.bench.mix.report import to_json, to_table
from localrt.bench.mix.runner import run_mix
from localrt.bench.mix.servers import make_servers
from localrt.cli.bench_reports import notify, resolved, write_page
from localrt.cli.options import Flag, add_flags, number
from localrt.common.errors import OptionError
from localrt.common.files import write_text
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.hub import resolve_adapter
from localrt.offload import hardware

# Flags that are passed on to `localrt serve`.
_SERVE_FLAGS = ("ram", "gpu_memory", "device", "kv_format", "format", "threads", "ctx")
_MIX_HELP = f"a mix of applications: a .toml file, or {', '.join(SHIPPED)} (default: none)"
_PEER_HELP = (
    "also measure a running server, or llama.cpp's llama-server; may be repeated (default: none)"
)
_NAMED_HELP = "which model the mix's NAME means; may be repeated (default: MODEL for all names)"
_FLAGS: tuple[Flag, ...] = (
    ("--mix", str, "FILE|NAME", _MIX_HELP),
    ("--peer", list, "URL|NAME=PROGRAM", _PEER_HELP),
    ("--peer-args", str, "WORDS", "further options for every PROGRAM of --peer (default: none)"),
    ("--seconds", number, "S", "how long the mix runs (default: as the mix says)"),
    ("--out", Path, "FILE", "also write the JSON object to FILE (default: none)"),
)


def add_mix_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of mixes."""
    group = parser.add_argument_group("several applications")
    add_flags(group, _FLAGS, peer=[])
    group.add_argument(
        "--model", dest="models", action="append", default=[], metavar="NAME=PATH", help=_NAMED_HELP
    )


def run_mix_command(args: argparse.Namespace) -> int | None:
    """Check everything, run the mix on every server, print; None if the arguments name no mix.

    The status is 1 if no server could run it.
    """
    if args.mix is None:
        if any((args.models, args.peer, args.peer_args, args.seconds is not None, args.out)):
            raise OptionError("--model, --peer, --peer-args, --seconds and --out need --mix")
        return None
    for name in ("sweep", "card", "compare", "trace", "long_prompt"):
        if getattr(args, name) is not None:
            raise OptionError(f"{option('mix')} and {option(name)} cannot be combined")
    named = dict(text.partition("=")[::2] for text in args.models)
    if "" in named or "" in named.values():
        raise OptionError("--model takes NAME=PATH")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise OptionError(f"--out {args.out}: there is no such folder")
    runs = 1 if args.runs is None else args.runs
    if runs < 1:
        raise OptionError(f"{option('runs')} must be at least 1, is {runs}")
    mix = read_mix(args.mix, models=named, every=args.model, seconds=args.seconds)
    settings = Settings.from_environment()
    paths = {name: resolved(model)[1] for name, model in mix.models.items()}
    apps = [
        replace(app, adapter=app.adapter and str(resolve_adapter(app.adapter, settings=settings)))
        for app in mix.apps
    ]
    mix = replace(mix, apps=tuple(apps))
    servers = make_servers(
        mix,
        paths,
        args.peer,
        options={name: getattr(args, name) for name in _SERVE_FLAGS if getattr(args, name)},
        arguments=shlex.split(args.peer_args or ""),
        key=settings.endpoint_key,
    )
    outcome = run_mix(mix, servers, runs, notify)
    if outcome.interrupted and not outcome.runs:
        raise KeyboardInterrupt
    report = to_json(outcome, mix, hardware.probe())
    if args.out is not None:  # first: whoever reads what is printed may stop
        write_text(args.out, json.dumps(report) + "\n")
    print(json.dumps(report) if args.json else to_table(report))
    write_page(args, report)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return 0 if outcome.runs else 1
