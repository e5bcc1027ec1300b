"""``localrt ps``: the models that servers of this user have loaded now."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from localrt.cli.help import Examples
from localrt.cli.output import say, say_json, say_lines
from localrt.client.answer import ListedModel
from localrt.client.servers import local_servers
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_bytes, format_seconds, table
from localrt.common.settings import Settings

EXAMPLES: Examples = (("localrt ps", "what is loaded, its memory, and until when"),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask each server, and print what it has loaded."""
    found: list[tuple[str, ListedModel]] = []
    servers = local_servers(Settings.from_environment())
    for server in servers:
        from localrt.client.model import models_of  # slow to import

        try:
            listed = models_of(server)
        except LocalrtError:
            continue  # it is starting, or has just stopped
        found += [(server.url, model) for model in listed if model.state != "unloaded"]
    if args.json:
        models = [{**asdict(model), "server": url} for url, model in found]
        say_json({"servers": [s.url for s in servers], "models": models})
    elif not servers:
        say("No server is running. Start one: localrt serve")
    elif not found:
        say(f"No model is loaded. {servers[0].url} loads one when it is asked for")
    else:
        rows = [
            (m.name, m.state, format_bytes(m.ram), str(m.ctx or "-"), _until(m.unload_s), url)
            for url, m in found
        ]
        head = ("MODEL", "STATE", "MEMORY", "CONTEXT", "UNLOADED IN", "SERVER")
        say_lines(table(rows, head, "llrrl"))
    return 0


def _until(seconds: float | None) -> str:
    return "stays" if seconds is None else format_seconds(seconds)
