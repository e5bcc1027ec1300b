"""``localrt bench [MODEL]``: compares engines on one workload, or with ``--mix`` servers under
several applications at once. Reports are in ``bench_reports.py``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

from localrt.bench.engines import ENGINES
from localrt.bench.gpu import forecast, wants_forecast
from localrt.bench.mix.mix import SHIPPED, read_mix
from localrt.bench.mix.report import to_json as mix_json
from localrt.bench.mix.report import to_table as mix_table
from localrt.bench.mix.runner import run_mix
from localrt.bench.mix.servers import make_servers
from localrt.bench.report import facts, to_json, to_table, write_trace
from localrt.bench.runner import run_bench
from localrt.bench.workload import LONG_ANSWER, BenchOptions, Outcome, Workload
from localrt.cli.bench_reports import add_report_arguments, notify, resolved, run_report, write_page
from localrt.cli.help import Examples
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
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import user_path, write_text
from localrt.common.formatting import parse_size
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.hub import DEMO_NAME, resolve_adapter
from localrt.models.checkpoints import open_checkpoint
from localrt.offload import hardware
from localrt.planning.measure import is_busy

EXAMPLES: Examples = (
    ("localrt bench model.gguf", "localrt and llama.cpp, in one run"),
    ("localrt bench model.gguf --ram 700MB", "streamed within 700 MB"),
    ("localrt bench model.gguf --gpu-memory 8GB --peer llama-bench=PATH", "on one GPU's memory"),
    ("localrt bench model.gguf --ram 1GB --engines native --runs 3", "quick"),
    ("localrt bench model.gguf --sweep sweep.json --vary 'threads=1,2 batch=1,4'", "combinations"),
    ("localrt bench model.gguf --mix student", "two applications at once, for four minutes"),
    ("localrt bench --card --html card.html", "what this PC runs, as a page"),
)

_ENGINES_HELP = "comma-separated: native, llamacpp (default: both)"
_LONG_PROMPT = 8192
_LONG_HELP = f"also time a prompt's first token at this length (default: {_LONG_PROMPT} with a GPU)"
# Flags that are passed on to `localrt serve`.
_SERVE_FLAGS = ("ram", "gpu_memory", "device", "kv_format", "format", "threads", "ctx")
_MIX_HELP = f"a mix of applications: a .toml file, or {', '.join(SHIPPED)} (default: none)"
_PEER_HELP = (
    "also measure llama.cpp's llama-bench, on the same device in its best setting there; with "
    "--mix, a running server, or llama.cpp's llama-server; may be repeated (default: none)"
)
_NAMED_HELP = "which model the mix's NAME means; may be repeated (default: MODEL for all names)"
_MIX_FLAGS: tuple[Flag, ...] = (
    ("--mix", str, "FILE|NAME", _MIX_HELP),
    ("--peer", list, "URL|NAME=PROGRAM", _PEER_HELP),
    ("--peer-args", str, "WORDS", "further options for every PROGRAM of --peer (default: none)"),
    ("--seconds", number, "S", "how long the mix runs (default: as the mix says)"),
    ("--out", Path, "FILE", "also write the JSON object to FILE (default: none)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser, default=None)
    flags: list[Flag] = [
        ("--engines", _engines, "LIST", _ENGINES_HELP),
        ("--prompt-tokens", int, "N", "length of the prompt (default: 512)"),
        ("--tokens", int, "N", "length of the answer (default: 128)"),
        ("--runs", int, "N", "runs of each; medians are shown (default: 5, with --mix 1)"),
        ("--long-prompt", int, "N", _LONG_HELP),
        ("--threads", int, "N", "CPU threads of every engine (default: the performance cores)"),
        ("--ctx", int, "TOKENS", "context length for every engine (default: what the run needs)"),
    ]
    engines = ("native", "llamacpp")
    add_flags(parser, flags, engines=engines, prompt_tokens=512, tokens=128)
    native: list[Flag] = [
        ("--format", ("bf16", "f32"), None, FORMAT_HELP),
        ("--ram", str, "SIZE", RAM_HELP),
        ("--gpu-memory", str, "SIZE", GPU_MEMORY_HELP),
        ("--device", str, None, DEVICE_HELP),
        ("--kv-format", str, "F", KV_HELP),
        (
            "--trace",
            Path,
            "FILE",
            "write the pipeline's tasks to FILE, for Perfetto (default: none)",
        ),
    ]
    add_flags(parser.add_argument_group("the native engine"), native)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_report_arguments(parser)
    group = parser.add_argument_group("peers, and several applications")
    add_flags(group, _MIX_FLAGS, peer=[])
    group.add_argument(
        "--model", dest="models", action="append", default=[], metavar="NAME=PATH", help=_NAMED_HELP
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print, after Ctrl+C the partial results; fail if no engine could run."""
    status = _run_mix(args)
    if status is not None:
        return status
    args.model = DEMO_NAME if args.model is None else args.model
    args.runs = 5 if args.runs is None else args.runs
    sizes = {name: getattr(args, name) for name in ("ram", "gpu_memory")}
    sizes = {
        name: text if text is None else parse_size(text, option(name))
        for name, text in sizes.items()
    }
    report = run_report(args, sizes)
    if report is not None:
        return report
    peers, same = _peers(args.peer), ("engines", "threads", "format", "device", "kv_format", "ctx")
    settings = Settings.from_environment()
    name, path = resolved(args.model)
    workload = Workload(args.prompt_tokens, args.tokens, args.runs)
    options = BenchOptions(
        path=path,
        workload=workload,
        trace=args.trace is not None,
        peers=peers,
        **sizes,
        **{name: getattr(args, name) for name in same},
    )
    if options.uses_gpu or args.long_prompt is not None:
        options = replace(options, workload=_with_long_prompt(options, args.long_prompt))
    machine, busy = hardware.probe(), False
    if wants_forecast(options) and "native" in options.engines:
        if options.trace or options.peers:
            what = "--trace records" if options.trace else "--peer makes"
            raise OptionError(f"{what} a run, but without a GPU --gpu-memory only plans")
        notify("no GPU here: this is a plan for a known GPU, and nothing runs")
        outcome = forecast(options, settings)
    else:
        busy = is_busy()
        floor = hardware.measure_memory_read(args.threads or machine.cpu.cores.threads)
        machine = replace(machine, memory_read_bytes_s=floor, gpus=hardware.gpus() or machine.gpus)
        outcome = run_bench(options, notify=notify)
    if outcome.interrupted and not outcome.results:
        raise KeyboardInterrupt
    if args.json:
        of = {**facts(machine), "model": name}
        print(json.dumps({**of, **to_json(outcome, options), "busy": busy}))
    else:
        print(to_table(outcome, options, name=name, machine=machine))
        if busy:
            print("\nMeasured while busy: other programs use the CPU, so these rates are too low.")
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not outcome.results:
        reasons = "; ".join(f"{skip.engine}: {skip.reason}" for skip in outcome.skipped)
        misused = all(skip.kind == "OptionError" for skip in outcome.skipped)
        kind = OptionError if misused and outcome.skipped else LocalrtError
        raise kind(f"no engine could run: {reasons}")
    if args.trace is not None:
        _write_trace(args.trace, outcome, name)
    return 0


def _run_mix(args: argparse.Namespace) -> int | None:
    """Check everything, run the mix on every server, print; None if the arguments name no mix.

    The status is 1 if no server could run it.
    """
    if args.mix is None:
        if any((args.models, args.peer_args, args.seconds is not None, args.out)):
            raise OptionError("--model, --peer-args, --seconds and --out need --mix")
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
    report = mix_json(outcome, mix, hardware.probe())
    if args.out is not None:  # first: whoever reads what is printed may stop
        write_text(args.out, json.dumps(report) + "\n")
    print(json.dumps(report) if args.json else mix_table(report))
    write_page(args, report)
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
        found[name] = user_path(shutil.which(program) or program).absolute()
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


def _write_trace(path: Path, outcome: Outcome, name: str) -> None:
    """Write the native engine's tasks; fail if it has none, as for a resident model."""
    for result in outcome.results:
        if result.trace:
            write_trace(path, result.trace, process=f"localrt {name}")
            notify(f"wrote {len(result.trace)} tasks to {path}: open it at ui.perfetto.dev")
            return
    raise LocalrtError(
        f"{path} was not written: only a model that does not fit has a pipeline to trace; "
        "give a smaller --ram or --gpu-memory"
    )


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in ENGINES]
    if unknown or not names:
        what = f"unknown engine {unknown[0]!r}" if unknown else "no engine"
        raise argparse.ArgumentTypeError(f"{what}: choose from {', '.join(ENGINES)}")
    return names
