"""``localrt bench [MODEL]``: compares engines on one workload, varies an option (``--sweep``), or
measures all models (``--all``), or servers under several applications at once (``--mix``).
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from localrt.bench.gpu import lacks_gpu
from localrt.bench.mix.mix import SHIPPED, read_mix
from localrt.bench.mix.report import to_json as mix_json
from localrt.bench.mix.report import to_table as mix_table
from localrt.bench.mix.runner import run_mix
from localrt.bench.mix.servers import make_servers
from localrt.bench.page import to_html
from localrt.bench.process import ENGINES
from localrt.bench.report import facts, to_json, to_table
from localrt.bench.runner import run_bench
from localrt.bench.sweep import KNOBS, Point, parse_sweep, run_sweep, swept
from localrt.bench.workload import LONG_ANSWER, BenchOptions, Outcome, Workload
from localrt.cli.help import Examples, ProgressLine
from localrt.cli.options import (
    DEVICE_HELP,
    FORMAT_HELP,
    GPU_MEMORY_HELP,
    KV_HELP,
    RAM_HELP,
    Flag,
    add_flags,
    add_model_argument,
    number,
)
from localrt.cli.output import note, say_result
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import user_path, write_text
from localrt.common.formatting import parse_size
from localrt.common.option_names import option
from localrt.common.processes import program_path
from localrt.common.progress import note_to
from localrt.common.settings import Settings
from localrt.hub import DEMO_NAME, list_models, resolve
from localrt.models.checkpoints import open_checkpoint
from localrt.offload import hardware
from localrt.offload.hardware import Machine
from localrt.planning import chooser
from localrt.planning.measure import is_busy

EXAMPLES: Examples = (
    ("localrt bench model.gguf", "localrt and llama.cpp, in one run"),
    ("localrt bench model.gguf --ram 700MB", "streamed within 700 MB"),
    ("localrt bench model.gguf --gpu-memory 8GB --peer llama-bench=PATH", "on one GPU's memory"),
    ("localrt bench model.gguf --sweep ram=4GB,2GB,1GB", "how speed falls with the budget"),
    ("localrt bench model.gguf --sweep batch=1,2,4,8", "how it grows with answers at a time"),
    ("localrt bench --all --html page.html", "what your models do here, as a page to show"),
    ("localrt bench model.gguf --mix student", "two applications at once, for four minutes"),
)

_LONG_PROMPT = 8192
_LONG_HELP = f"also time a prompt's first token at this length (default: {_LONG_PROMPT} with a GPU)"
_SWEEP_HELP = (
    "measure the native engine with each value of one option, of "
    f"{', '.join(KNOBS).replace('_', '-')} (default: no sweep)"
)
_ALL_HELP = "measure the native engine with every model on this machine"
_HTML_HELP = "also write the table, with plots, as a page that loads nothing (default: none)"
_PEER_HELP = (
    "also measure llama.cpp's llama-bench, on the same device in its best setting there; with "
    "--mix, a running server, or llama.cpp's llama-server; may be repeated (default: none)"
)
# Flags that are passed on to `localrt serve`.
_SERVE_FLAGS = ("ram", "gpu_memory", "device", "kv_format", "format", "threads", "ctx")
_MIX_HELP = f"a mix of applications: a .toml file, or {', '.join(SHIPPED)} (default: none)"
_NAMED_HELP = "which model the mix's NAME means; may be repeated (default: MODEL for all names)"
_MIX_FLAGS: tuple[Flag, ...] = (
    ("--mix", str, "FILE|NAME", _MIX_HELP),
    ("--peer-args", str, "WORDS", "further options for every PROGRAM of --peer (default: none)"),
    ("--seconds", number, "S", "how long the mix runs (default: as the mix says)"),
    ("--out", Path, "FILE", "also write the JSON object to FILE (default: none)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser, default=None)
    flags: list[Flag] = [
        ("--engines", _engines, "LIST", "comma-separated: native, llamacpp (default: both)"),
        ("--peer", list, "NAME=PROGRAM|URL", _PEER_HELP),
        ("--prompt-tokens", int, "N", "length of the prompt (default: 512)"),
        ("--tokens", int, "N", "length of the answer (default: 128)"),
        ("--runs", int, "N", "runs of each; medians are shown (default: 5, with --mix 1)"),
        ("--long-prompt", int, "N", _LONG_HELP),
        ("--threads", int, "N", "CPU threads of every engine (default: the performance cores)"),
        ("--ctx", int, "TOKENS", "context length for every engine (default: what the run needs)"),
    ]
    add_flags(parser, flags, peer=[], prompt_tokens=512, tokens=128)
    native: list[Flag] = [
        ("--format", ("bf16", "f32"), None, FORMAT_HELP),
        ("--ram", str, "SIZE", RAM_HELP),
        ("--gpu-memory", str, "SIZE", GPU_MEMORY_HELP),
        ("--device", str, None, DEVICE_HELP),
        ("--kv-format", str, "F", KV_HELP),
        ("--sweep", str, "NAME=VALUE,VALUE", _SWEEP_HELP),
        ("--all", bool, None, _ALL_HELP),
    ]
    add_flags(parser.add_argument_group("the native engine"), native)
    output: list[Flag] = [
        ("--html", Path, "FILE", _HTML_HELP),
        ("--json", bool, None, "print one JSON object"),
    ]
    add_flags(parser.add_argument_group("output"), output)
    group = parser.add_argument_group("several applications at once")
    add_flags(group, _MIX_FLAGS)
    group.add_argument(
        "--model", dest="models", action="append", default=[], metavar="NAME=PATH", help=_NAMED_HELP
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print, after Ctrl+C the partial results; fail if no engine could run."""
    status = _run_mix(args)
    if status is not None:
        return status
    options = _options(args)
    sweep = None if args.sweep is None else parse_sweep(args.sweep)
    name = "all models"
    if not args.all:
        name, path = _resolved(DEMO_NAME if args.model is None else args.model)
        options = replace(options, path=path)
    machine = hardware.probe()
    if args.all:
        outcome, machine = _measured(partial(run_sweep, _models(options), "model"), args, machine)
    elif sweep is not None:
        points = partial(run_sweep, swept(options, *sweep), sweep[0])
        outcome, machine = _measured(points, args, machine)
    else:
        if options.uses_gpu or args.long_prompt is not None:
            options = replace(options, workload=_with_long_prompt(options, args.long_prompt))
        if lacks_gpu(options) and "native" in options.engines:
            raise OptionError(
                f"there is no GPU here for {option('gpu_memory')}: a plan, such as "
                "`localrt plan MODEL --gpu 'RTX 4060'`, has a forecast"
            )
        outcome, machine = _measured(partial(run_bench, options), args, machine)
    if outcome.interrupted and not outcome.results:
        raise KeyboardInterrupt
    record = {**facts(machine), "model": name, **to_json(outcome, options)}
    text = to_table(outcome, options, name=name, machine=machine)
    say_result(record, text, as_json=args.json)
    if args.html is not None:
        write_text(args.html, to_html(outcome, options, name=name, machine=machine))
        note(f"wrote {args.html}")
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not outcome.results:
        skipped = outcome.skipped
        failed = [skip.setting if outcome.varied else skip.engine for skip in skipped]
        reasons = "; ".join(
            f"{what}: {skip.reason}" for what, skip in zip(failed, skipped, strict=True)
        )
        misused = all(skip.kind == "OptionError" for skip in skipped)
        kind = OptionError if misused and skipped else LocalrtError
        raise kind(f"no engine could run: {reasons}")
    return 0


def _options(args: argparse.Namespace) -> BenchOptions:
    """Return the options, but for the model's path; refuse what cannot be combined."""
    several = [name for name in ("sweep", "all") if getattr(args, name)]
    if len(several) > 1:
        raise OptionError(f"{option('sweep')} and {option('all')} cannot be combined")
    for name in ("engines", "peer", "long_prompt"):
        if several and getattr(args, name) not in (None, [], ("native",)):
            raise OptionError(f"{option(name)} and {option(several[0])} cannot be combined")
    if args.all and args.model is not None:
        raise OptionError(f"{option('all')} measures every model: leave out MODEL")
    peers, same = _peers(args.peer), ("threads", "format", "device", "kv_format", "ctx")
    sizes = {name: getattr(args, name) for name in ("ram", "gpu_memory")}
    sizes = {
        name: text if text is None else parse_size(text, option(name))
        for name, text in sizes.items()
    }
    return BenchOptions(
        path=Path(),
        engines=("native",) if several else args.engines or ENGINES,
        workload=Workload(args.prompt_tokens, args.tokens, 5 if args.runs is None else args.runs),
        peers=peers,
        **sizes,
        **{name: getattr(args, name) for name in same},
    )


def _measured(
    measure: Callable[..., Outcome], args: argparse.Namespace, machine: Machine
) -> tuple[Outcome, Machine]:
    """Return what ``measure`` finds, and the machine's rates."""
    busy = is_busy()
    floor = hardware.measure_memory_read(args.threads or machine.cpu.cores.threads)
    machine = replace(machine, memory_read_bytes_s=floor, gpus=hardware.gpus() or machine.gpus)
    return replace(measure(notify=note), busy=busy), machine


def _models(options: BenchOptions) -> list[Point]:
    """Return every model on this machine."""
    models = list_models(Settings.from_environment())
    if not models:
        raise LocalrtError(f"no model is on this machine yet: localrt pull {DEMO_NAME}")
    # File names only: results may be shared.
    names = [each.path.name if each.place == "yours" else each.name for each in models]
    return [
        (name, replace(options, path=each.path)) for name, each in zip(names, models, strict=True)
    ]


def _run_mix(args: argparse.Namespace) -> int | None:
    """Check everything, run the mix on every server, print; None if the arguments name no mix.

    The status is 1 if no server could run it.
    """
    if args.mix is None:
        if any((args.models, args.peer_args, args.seconds is not None, args.out)):
            raise OptionError("--model, --peer-args, --seconds and --out need --mix")
        return None
    for name in ("sweep", "all", "long_prompt", "html", "engines"):
        if getattr(args, name):
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
    paths = {name: _resolved(model)[1] for name, model in mix.models.items()}
    servers = make_servers(
        mix,
        paths,
        args.peer,
        options={name: getattr(args, name) for name in _SERVE_FLAGS if getattr(args, name)},
        arguments=shlex.split(args.peer_args or ""),
        key=settings.endpoint_key,
    )
    outcome = run_mix(mix, servers, runs, note)
    if outcome.interrupted and not outcome.runs:
        raise KeyboardInterrupt
    report = mix_json(outcome, mix, hardware.probe())
    if args.out is not None:  # first: whoever reads what is printed may stop
        write_text(args.out, json.dumps(report) + "\n")
    say_result(report, mix_table(report), as_json=args.json)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return 0 if outcome.runs else 1


def _peers(texts: Sequence[str]) -> dict[str, Path]:
    """Return the programs of ``--peer`` by name; whether they run is seen when they do."""
    found: dict[str, Path] = {}
    for text in texts:
        name, _, program = text.partition("=")
        if not name or not program or name in (*ENGINES, *found):
            raise OptionError(f"--peer {text!r:.80}: without --mix, give llama-bench=PROGRAM")
        found[name] = user_path(program_path(program) or program).absolute()
    return found


def _with_long_prompt(options: BenchOptions, asked: int | None) -> Workload:
    """Add the long prompt's length: the given one, or the default limited to the context."""
    work = options.workload
    if asked is not None:
        return replace(work, long_prompt_tokens=asked)
    with closing(open_checkpoint(options.path)) as checkpoint:
        trained = cast("int | None", checkpoint.config.get("max_position_embeddings"))
    room = min(int(trained or _LONG_PROMPT), options.ctx or _LONG_PROMPT + LONG_ANSWER)
    length = min(_LONG_PROMPT, room - LONG_ANSWER)
    return replace(work, long_prompt_tokens=length if length > work.prompt_tokens else 0)


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in ENGINES]
    if unknown or not names:
        what = f"unknown engine {unknown[0]!r}" if unknown else "no engine"
        raise argparse.ArgumentTypeError(f"{what}: choose from {', '.join(ENGINES)}")
    return names


def _resolved(model: str) -> tuple[str, Path]:
    """Find the model, downloading it if needed: child processes get a path."""
    settings = Settings.from_environment()
    with ProgressLine() as line:
        choose = chooser(settings, say=note_to(line))
        found = resolve(model, settings=settings, choose=choose, progress=line)
    open_checkpoint(found.path).close()  # what no engine can read is told once
    # File names only: results may be shared.
    return (found.path.name if Path(found.name).exists() else found.name), found.path
