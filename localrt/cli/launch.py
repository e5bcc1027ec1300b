"""``localrt launch [PROGRAM] [-- ARGUMENTS]``: starts a coding agent, an editor or a chat front end
with a model of this machine.

It uses a running server, or starts one that ends with the program. The user's settings files stay
as they are. ``localrt.client.programs`` has the settings of each program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeAlias
from urllib.parse import urlsplit

from localrt import system
from localrt.cli.help import Examples
from localrt.cli.loading import served_model
from localrt.cli.options import BARE_MODEL_HELP, Flag, add_flags
from localrt.cli.output import note, say, say_lines, say_result
from localrt.client.answer import ListedModel
from localrt.client.model import load_at, models_of
from localrt.client.programs import PROGRAMS, ClientProgram, Start, find_program, start_of
from localrt.client.servers import LocalServer, local_servers
from localrt.common.errors import LocalrtError, ModelNotFoundError, OptionError
from localrt.common.files import write_text
from localrt.common.formatting import as_line, table
from localrt.common.processes import localrt_command, program_path
from localrt.common.settings import Settings
from localrt.hub import list_models, resolve
from localrt.hub.names import client_name

EXAMPLES: Examples = (
    ("localrt launch", "the programs, and which of them are installed"),
    ("localrt launch claude", "Claude Code with a model of this machine"),
    ("localrt launch codex --model qwen2.5-coder:7b", "with this model"),
    ('localrt launch opencode -- run "What is this?"', "arguments of the program"),
    ("localrt launch aider --print", "start nothing, print lines for a shell"),
)
_CTX_HELP = "context of a server that is started (default: the model's, or what memory holds)"
_FLAGS: tuple[Flag, ...] = (
    ("--model", str, "MODEL", f"{BARE_MODEL_HELP} (default: the best one here)"),
    ("--ctx", int, "TOKENS", _CTX_HELP),
    ("--print", bool, None, "print the settings and the command, and start nothing"),
    ("--json", bool, None, "print the list of programs as JSON"),
)
_ROOM = 4096  # tokens for a first turn, besides what the program sends by itself

# A running server (None: one is started), its model or the one to load, and why it was chosen.
_Choice: TypeAlias = tuple[LocalServer | None, ListedModel, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    names = ", ".join(each.name for each in PROGRAMS)
    parser.add_argument("program", nargs="?", metavar="PROGRAM", help=f"{names} (default: a list)")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="its own, after --")
    add_flags(parser, _FLAGS)


def run(args: argparse.Namespace) -> int:
    """Start the program; return its exit status."""
    if args.program is None:
        if args.model or args.ctx or args.print:
            raise OptionError(
                "--model, --ctx and --print need a PROGRAM (`localrt launch` lists them)"
            )
        return _list(args.json)
    if args.json:
        raise OptionError("--json prints the list of programs: leave out either it or PROGRAM")
    program = find_program(args.program)
    path = program_path(program.command)
    if path is None and not args.print:
        raise LocalrtError(f"{program.title} is not installed: {program.install}")
    settings = Settings.from_environment()
    server, model, why = _choose(args, program, settings)
    serve = ["serve", model.name, *([] if args.ctx is None else ["--ctx", str(args.ctx)])]

    def start(server: LocalServer, folder: str, key: str | None) -> Start:
        ctx = min(filter(None, (args.ctx, model.ctx)), default=0)
        if not ctx and "$ctx" in str(program):
            raise OptionError(f"the context of {model.name} is not known: give --ctx TOKENS")
        made = start_of(program, server.url, model.name, ctx=ctx, key=key, folder=Path(folder))
        made.command.extend(args.arguments)
        return made

    if args.print:
        if model.name != as_line(model.name):
            raise LocalrtError(
                f"{model.name} has characters in its name that a shell must not be given: rename it"
            )
        say(f"# {model.name}: {why}")
        if server is None or model.state != "loaded":
            model = replace(model, ctx=_fitting(model, settings))
        if server is None:
            port = program.port or 8080
            say(f"{system.join(['localrt', *serve, '--port', str(port)])} &")
            server = LocalServer(f"http://127.0.0.1:{port}/v1", 0, settings.serve_key)
            model = replace(model, name=client_name(model.name))
        folder = str(settings.data_dir / "launch" / program.name)  # private, unlike /tmp
        say_lines(start(server, folder, server.key and "KEY").shell())
        return 0
    note(f"{model.name}: {why}")
    with ExitStack() as stack:
        if server is None:
            server = stack.enter_context(_started(serve, program.port, settings))
            model = models_of(server)[0]
        elif model.state != "loaded":  # its context is not known before
            model = load_at(server, model.name)
        least = program.tokens + _ROOM
        if 0 < model.ctx < least:
            has = f"{model.name} has a context of {model.ctx:,} tokens"
            note(f"{has}, {program.title} needs {least:,}: give --ctx {least}, or another --model")
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="localrt-"))
        made = start(server, folder, server.key)
        if made.file is not None:
            write_text(made.file, made.settings, private=True)
        return _run_in_foreground([path or "", *made.command[1:]], made)


def _list(as_json: bool) -> int:
    rows = [(each, program_path(each.command)) for each in PROGRAMS]
    names = ("name", "title", "install")
    found = [{n: getattr(each, n) for n in names} | {"path": path} for each, path in rows]
    shown = [(p.name, p.title, path or f"not installed: {p.install}") for p, path in rows]
    text = table(shown, ("NAME", "PROGRAM", "WHERE"), "")
    say_result({"programs": found}, text, as_json=as_json)
    return 0


# -- which model -----------------------------------------------------------------------------------


def _choose(args: argparse.Namespace, program: ClientProgram, settings: Settings) -> _Choice:
    """Return the model of ``--model``, else one that a server has loaded, else the best one here.

    Raises:
        ModelNotFoundError: there is no ``--model``, and no model here suits the program.
    """
    least = args.ctx or program.tokens + _ROOM
    found = local_servers(settings)
    servers = [s for s in found if not program.port or urlsplit(s.url).port == program.port]
    chosen: _Choice = (None, ListedModel(args.model or "", 0), "the model that you gave")
    if args.model is None:
        for server in servers:
            with suppress(LocalrtError):
                for each in models_of(server):
                    suits = (each.tools or not program.tools) and each.ctx >= least
                    if each.state == "loaded" and suits:
                        return server, each, f"loaded by the server at {server.url}"
        chosen = _best(program, settings, least)
    else:
        from localrt.server.about import facts_of  # slow to import

        with suppress(LocalrtError, OSError):  # it may not be here yet
            path = resolve(args.model, settings=settings, download=False).path
            chosen = (None, replace(chosen[1], ctx=facts_of(path).ctx or 0), chosen[2])
    served = served_model(chosen[1].name, settings, servers)
    if served is None or 0 < served[1].ctx < (args.ctx or 0):
        return chosen
    server, each = served
    each = replace(each, ctx=each.ctx or chosen[1].ctx)
    return server, each, f"{chosen[2]}, of the server at {server.url}"


def _fitting(model: ListedModel, settings: Settings) -> int:
    """The context that a model will have once it is loaded, as far as the planner can tell."""
    from localrt.planning.models import find_model
    from localrt.planning.recommend import fitting_context

    with suppress(LocalrtError, OSError):
        return fitting_context(find_model(model.name, settings, offline=True), settings)
    return model.ctx


def _best(program: ClientProgram, settings: Settings, least: int) -> _Choice:
    """Return the largest model here that suits and is fast enough, else the fastest that suits."""
    from localrt.planning.forecast import READING_TOK_S
    from localrt.planning.recommend import preview  # slow to import
    from localrt.server.about import facts_of

    calls = "calls tools and " if program.tools else ""
    needs = {"completion", "tools"} if calls else {"completion"}
    slower: list[tuple[tuple[bool, float], _Choice]] = []
    for model in sorted(list_models(settings), key=lambda each: -each.bytes):
        with suppress(LocalrtError, OSError):
            facts = facts_of(model.path)
            if not needs <= set(facts.capabilities) or (facts.ctx or least) < least:
                continue
            seen = preview(model.path, ctx=least, settings=settings)
            why = f"{calls}has room for the {least:,} tokens that {program.title} needs, {seen}"
            rank = seen.fits, seen.tok_s or 0.0
            if not seen.problem:
                slower.append((rank, (None, ListedModel(model.name, facts.ctx or 0), why)))
            if seen.fits and rank[1] >= READING_TOK_S:
                return slower[-1][1]
    if slower:
        return max(slower, key=lambda each: each[0])[1]
    raise ModelNotFoundError(
        f"no model here {calls}has room for the {least:,} tokens that {program.title} needs: give "
        "--model NAME, which is downloaded once (`localrt plan` says what runs well here)"
    )


# -- the server, and the program -------------------------------------------------------------------


@contextmanager
def _started(serve: list[str], port: int, settings: Settings) -> Iterator[LocalServer]:
    """A server that runs until the block ends, or this process does.

    Raises:
        LocalrtError: it did not start; it has printed why.
    """
    own = ["--port", str(port), "--parent", str(os.getpid()), "--quiet", "--drain", "1"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **system.OWN_GROUP}
    with subprocess.Popen(localrt_command(*serve, *own), text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise LocalrtError("the server did not start: see the line above")
            yield LocalServer(json.loads(line)["url"], process.pid, settings.serve_key)
        finally:
            process.send_signal(system.STOP_SIGNAL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _run_in_foreground(command: list[str], start: Start) -> int:
    """Run the program, which has the terminal and gets Ctrl+C; return its status as shells do."""
    process: subprocess.Popen[bytes] | None = None
    ends = False

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal ends
        # The terminal sends Ctrl+C to the program too, which may go on.
        ends |= number in (signal.SIGTERM, *system.LOGOUT_SIGNALS)
        if ends and process is not None:
            process.terminate()

    numbers = {*system.STOP_SIGNALS, *system.LOGOUT_SIGNALS}
    heard = [each for each in numbers if signal.getsignal(each) != signal.SIG_IGN]  # as of nohup
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        process = subprocess.Popen(command, env={**os.environ, **start.variables})
        if ends:  # the signal came while it was started
            process.terminate()
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
