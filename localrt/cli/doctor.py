"""``localrt doctor``: shows this machine, what is installed, the folders, and what is missing.

``--quick`` shows only what needs no measuring. Otherwise memory and disk are measured and the GPU
is queried, which takes a few seconds. Neither imports torch or any other heavy package.
``--report`` writes a file for an issue with nothing private in it: numbers, versions, and names of
packages, models and variables. Names of the user and the machine are replaced wherever they occur.
"""

from __future__ import annotations

import argparse
import getpass
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from localrt import system
from localrt.cli.help import Examples
from localrt.cli.output import say, say_result
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.extras import install, install_for_gpu
from localrt.common.files import read_text, write_text
from localrt.common.formatting import format_bytes, indented
from localrt.common.option_names import option
from localrt.common.processes import is_packaged
from localrt.common.settings import CRASH_REPORT, Settings
from localrt.common.version import __version__
from localrt.hub import DEMO_NAME, list_models, resolve
from localrt.offload import hardware
from localrt.offload.hardware import DiskSpeed
from localrt.quant.cpu.abi import best_isa
from localrt.quant.cuda.gpu_cache import entry_of, known_rates
from localrt.quant.cuda.programs import NO_COMPILER, has_compiler, kept_kernels

FILE = "localrt-report.txt"
_HEAD = "A report of localrt doctor"
_VARIABLES = ("LOCALRT_", "HF_", "XDG_", "CUDA_", "TERM", "COLORTERM", "LANG", "LC_")
# The folder of a file of code, up to the package that it is of.
_PLACE = re.compile(r'File "(?:.*[/\\](?:site-packages|python3\.\d+|localrt)[/\\])?([^"]*)"')


def shareable(report: dict[str, Any]) -> dict[str, Any]:
    """Return doctor's report without paths, and without advice, which names them."""
    folders = [{**folder, "path": "-"} for folder in report["folders"]]
    demo = report["demo_model"] and "here"
    return {**report, "folders": folders, "demo_model": demo, "advice": []}


def write_report(path: Path, lines: Iterable[str]) -> str:
    """Write a report with these lines and what belongs to them; return what to tell the user.

    Raises:
        OptionError: another file is there.
        StorageError: it cannot be written.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        if file.read(len(_HEAD)) != _HEAD.encode():
            raise OptionError(f"{path} is there already: give {option('report')} another name")
    settings = Settings.from_environment()
    text = "\n".join([_HEAD, "", *lines, *_more(settings), ""])
    for name in _private_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    write_text(path, text, private=True)
    return (
        f"{path.absolute()} has what this machine is, versions of packages, names and sizes of "
        "models, which variables are set, and where the app last crashed. It has no folders, names "
        "of users or machines, keys, values of variables or conversations. Read it before you send "
        "it"
    )


def _more(settings: Settings) -> Iterator[str]:
    yield "\nVersions"
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        for name in [re.split(r"[^\w.-]", each)[0] for each in requires("localrt") or ()]:
            with suppress(PackageNotFoundError):
                yield f"  {name} {version(name)}"
    yield "\nModels"
    for model in list_models(settings):
        name = model.path.name if model.place == "yours" else model.name
        yield f"  {Path(name).name if Path(name).is_absolute() else name}, {model.kind}, " + (
            f"{model.quantization or 'unquantized'}, {format_bytes(model.bytes)}, {model.place}"
        )
    yield "\nVariables that are set"
    yield f"  {' '.join(sorted(name for name in os.environ if name.startswith(_VARIABLES)))}"
    with suppress(LocalrtError, OSError):
        lines = read_text(settings.data_dir / CRASH_REPORT).splitlines()
        # Without lines of code: they may be of a file of the user's own.
        crash = "\n".join(line for line in lines if not line.startswith("    "))
        yield f"\nThe app's last crash\n{_PLACE.sub(_code_place, crash)}"


def _code_place(match: re.Match[str]) -> str:
    """``File "localrt/tui/app.py"``; nothing of a file that is no package's."""
    known = match[0] != f'File "{match[1]}"'
    return f'File "{match[1] if known else "..."}"'


def _private_names() -> Iterator[str]:
    """The user's folder, name and machine, longest first."""
    names = {str(system.home_folder()), platform.node(), platform.node().partition(".")[0]}
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    yield from sorted((name for name in names if len(name) > 1), key=len, reverse=True)


EXAMPLES: Examples = (
    ("localrt doctor", ""),
    ("localrt doctor --quick", "without measuring"),
    ("localrt doctor --report", "a file for an issue"),
)

_PACKAGES = (
    ("cuda-bindings", "gpu", "NVIDIA GPUs"),
    ("torch", "torch", "computing in bf16 or f32, and long prompts of bf16 weights on a GPU"),
    ("llama-cpp-python", "llamacpp", "the llamacpp engine: more architectures, bench's baseline"),
    ("torch", "quantize", "quantizing with calibration"),
    ("ray", "ray", "batches on many machines"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--quick", action="store_true", help="answer at once: measure nothing, ask no driver"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--report",
        type=Path,
        nargs="?",
        const=Path(FILE),
        metavar="FILE",
        help=f"write a file for an issue, with nothing private in it (default: {FILE}, here)",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the report; always return 0, as missing parts are not a failure."""
    report = _examine(quick=args.quick)
    if args.report is not None:
        say(write_report(args.report, _lines(shareable(report))))
    else:
        say_result(report, "\n".join(_lines(report)), as_json=args.json)
    return 0


def _examine(*, quick: bool) -> dict[str, object]:
    settings = Settings.from_environment()
    machine = hardware.probe()
    notes: list[str] = []
    if not quick:
        machine = replace(machine, gpus=hardware.gpus() or machine.gpus)
        from localrt.planning.measure import machine_here

        rates, note = machine_here(settings)  # as plans have them
        notes += [note] if note else []
        if rates.sources["kernels"] != "typical":
            disk = DiskSpeed(rates.ssd_bytes_s, rates.sources["ssd_bytes_s"])
            machine = replace(machine, memory_read_bytes_s=rates.ram_bytes_s, disk=disk)
    versions = {name: _version(name) for name, _, _ in _PACKAGES}
    folders = [
        _folder("models", settings.hub_cache),
        _folder("cache", settings.cache_dir),
        _folder("chats", settings.data_dir),
        _folder("settings", settings.config_dir),
    ]
    demo = _demo_model(settings)
    isa = best_isa()
    notes += [f"{folder['path']} is not writable" for folder in folders if not folder["writable"]]
    return {
        "localrt": __version__,
        "quick": quick,
        "machine": machine.to_dict(),
        "kernels": isa and f"compiled, {isa}",
        "gpu": _gpu_state(settings.cache_dir, machine.gpus[0].name) if machine.gpus else None,
        "packages": [
            {"name": name, "version": versions[name], "extra": extra, "use": use}
            for name, extra, use in _PACKAGES
        ],
        "folders": folders,
        "demo_model": str(demo) if demo else None,
        "advice": [
            *notes,
            *_advice(versions, demo=demo, gpu=bool(machine.gpus), isa=isa),
            *(_other_gpu_advice(machine.other_gpus[0].name) if machine.other_gpus else ()),
        ],
    }


def _gpu_state(cache: Path, name: str) -> dict[str, object]:
    """Say what was compiled for and measured on the first GPU; loading a model does both."""
    kept, rates = entry_of(cache, name), known_rates(cache, name)
    key = kept.get("key")
    return {
        "compiled_kernels": kept_kernels(cache),
        "measured_with": key if isinstance(key, list) else [],
        "rates": rates and rates.to_dict(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _folder(what: str, path: Path) -> dict[str, object]:
    """A folder that may not exist yet counts as writable when it can be made."""
    existing = next((place for place in (path, *path.parents) if place.exists()), path)
    try:
        free = shutil.disk_usage(existing).free
    except OSError:
        free = None
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    return {"what": what, "path": str(path), "writable": writable, "free_bytes": free}


def _demo_model(settings: Settings) -> Path | None:
    try:
        return resolve(DEMO_NAME, settings=settings, download=False).path
    except LocalrtError:
        return None


def _advice(
    versions: dict[str, str | None], *, demo: Path | None, gpu: bool, isa: str | None
) -> Iterator[str]:
    """Return advice, the most helpful first."""
    if demo is None:
        yield "the demo model is not here: localrt pull smollm2"
    torch = versions["torch"]
    if isa is None:
        yield (
            "the CPU kernels were not built, and torch, which is used instead, is several times "
            "slower: install a C++ compiler (apt install g++), then localrt again"
        )
        if torch is None:
            yield "without them the native engine needs torch: pip install 'torch>=2.11'"
    if gpu and versions["cuda-bindings"] is None:
        yield f"there is a GPU: to use it, {install('gpu')}"
    elif gpu and not has_compiler():
        yield NO_COMPILER
    if is_packaged():
        yield f"for the packages that are missing, {install('all')}"
        return
    missing = {extra for name, extra, _ in _PACKAGES if versions[name] is None}
    uses = {
        "gpu": "the GPU" if gpu else None,
        "llamacpp": "more architectures, and bench's baseline",
        "quantize": "quantizing with calibration",
    }
    for extra, use in uses.items():
        if extra in missing and use is not None:
            yield f"for {use}: {install(extra)}"


def _other_gpu_advice(name: str) -> Iterator[str]:
    """Say how llama.cpp computes on the GPU ``name``, which our kernels cannot use."""
    found = find_spec("llama_cpp")
    folder = Path(found.origin).parent / "lib" if found and found.origin else Path()
    backends = ("vulkan", "metal", "hip", "sycl")
    if found and any(f"ggml-{each}" in path.name for path in folder.glob("*") for each in backends):
        yield f"on {name}: llama.cpp, by --engine llamacpp with GGUF files"
    else:
        yield f"on {name}: llama.cpp, once it is built for it: {install_for_gpu()}"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    """Return the report for people."""
    machine = report["machine"]
    cpu, memory, disk = machine["cpu"], machine["memory"], machine["disk"]
    ram = f"{format_bytes(memory['total'])}, {format_bytes(memory['available'])} available"
    if memory["limit"]:
        ram += " (limited by a control group)"
    if rate := machine["memory_read_bytes_s"]:
        ram += f", reads {format_bytes(rate)}/s"
    rows = [
        ["localrt", report["localrt"]],
        ["python", f"{machine['python']} on {machine['system']}"],
        ["CPU", f"{cpu['name']}, {cpu['physical_cores']} cores"],
        ["threads", _threads_text(cpu["cores"])],
        ["features", " ".join(cpu["features"]) or "none that the kernels use"],
        ["RAM", ram],
    ]
    if disk:
        rows.append(["disk", f"reads {format_bytes(disk['read_bytes_s'])}/s ({disk['method']})"])
    gpus = [_gpu_text(gpu) for gpu in machine["gpus"]]
    gpus += [f"{_gpu_text(gpu)} (llama.cpp only)" for gpu in machine["other_gpus"]]
    rows += [["GPU", text] for text in gpus or ["none found"]]
    if report["gpu"]:
        rows += _gpu_rows(report["gpu"])
    rows.append(["kernels", report["kernels"] or "none: see below"])
    yield from indented(rows)
    yield "\nPackages, by the extra that installs them (in a checkout: scripts/setup EXTRA)"
    yield from indented(
        [
            [p["extra"], p["name"], p["version"] or "not installed", p["use"]]
            for p in report["packages"]
        ]
    )
    yield "\nFolders"
    folders = [[f["what"], f["path"], _folder_text(f)] for f in report["folders"]]
    yield from indented([*folders, ["demo model", report["demo_model"] or "not here"]])
    if report["advice"]:
        yield "\nTo do"
        yield from (f"  {line}" for line in report["advice"])
    if report["quick"]:
        yield "\nWithout --quick, memory, disk and GPU are measured too."


def _threads_text(cores: dict[str, int]) -> str:
    """Return which cores compute by default."""
    both = bool(cores["efficiency"])
    text = f"{cores['threads']} of {cores['performance']} {'performance ' if both else ''}cores"
    if cores["threads"] < cores["performance"]:
        text += " (limited by a control group)"
    return f"{text}; {cores['efficiency']} efficiency cores unused" if both else text


def _gpu_text(gpu: dict[str, Any]) -> str:
    total = gpu["memory_bytes"] and format_bytes(gpu["memory_bytes"])
    free = gpu["free_bytes"] and f"{format_bytes(gpu['free_bytes'])} free"
    driver = gpu["driver"] and f"driver {gpu['driver']}"
    return ", ".join(part for part in (gpu["name"], total, free, driver) if part)


def _gpu_rows(gpu: dict[str, Any]) -> Iterator[list[str]]:
    """Return at most two rows: kernels, rates."""
    with_ = ", ".join(part for part in gpu["measured_with"] if part.startswith(("driver", "NV")))
    text = f"{gpu['compiled_kernels']} compiled"
    yield ["GPU kernels", f"{text} ({with_})" if with_ else text]
    if rates := gpu["rates"]:
        link, memory = rates["to_gpu_bytes_s"], rates["memory_bytes_s"]
        yield [
            "GPU rates",
            f"memory {format_bytes(memory)}/s, link {format_bytes(link)}/s, "
            f"products in {', '.join(rates['products'])}",
        ]


def _folder_text(folder: dict[str, Any]) -> str:
    if not folder["writable"]:
        return "not writable"
    free = folder["free_bytes"]
    return "writable" if free is None else f"writable, {format_bytes(free)} free"
