"""Whole files of GGUF's types beside llama.cpp and ik_llama.cpp, by turns: one model in each type.

    python -m benchmarks.kernels.files MODEL [--types IQ4_XS,Q3_K_S] [--ik PROGRAM] [--files FOLDER]

llama.cpp quantizes MODEL, a GGUF file, to each type, once; embedding and head get the types that it
gives them. PROGRAM is ik_llama.cpp's ``llama-bench``. Types that are measured already are not
measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import find_model, listed, make_parser
from benchmarks.common.contest import hold_contest
from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from benchmarks.common.record import load, save_row, setting
from localrt.errors import LocalrtError, MissingExtraError
from localrt.formatting import format_bytes, format_rate
from localrt.settings import Settings

__all__ = ["types_table"]

PACKAGES = ("llama-cpp-python", "numpy")
PROMPT, TOKENS, RUNS = 512, 64, 5
_TYPES = {  # llama.cpp's numbers; others need its importance matrix
    "IQ4_XS": 30,
    "IQ4_NL": 25,
    "Q3_K_S": 11,
    "Q2_K": 10,
    "IQ3_S": 26,
    "IQ3_XXS": 23,
    "IQ2_S": 28,
}
_PEERS = ("llama.cpp", "ik_llama.cpp")


def typed_file(source: Path, name: str, folder: Path) -> Path:
    """MODEL in a type, made if it is not there.

    Raises:
        LocalrtError: llama.cpp is not there, or does not make it.
    """
    out = folder / f"{source.stem}-{name}.gguf"
    if out.exists():
        return out
    try:
        import llama_cpp
    except ImportError as error:
        raise MissingExtraError(f"llama-cpp-python cannot be imported: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = _TYPES[name], True
    aside = out.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(aside).encode(), params):
        raise LocalrtError(f"llama.cpp does not quantize {source.name} to {name}")
    aside.rename(out)
    return out


def types_table(record: Mapping[str, Any]) -> str:
    """Tokens a second, and how many times a peer's."""
    lines = []
    for row in record["rows"]:
        found = row["results"]
        for key in ("decode", "prompt"):
            times = [found.get(f"times_{peer}", {}).get(key) for peer in _PEERS]
            lines.append(
                [
                    f"{row['name']}, {format_bytes(found['file'])}",
                    key if key == "decode" else f"prompt of {PROMPT}",
                    format_rate(found["medians"]["localrt"][key]),
                    *("" if one is None else f"{one:.2f}x" for one in times),
                ]
            )
    headers = ["type", "", "tok/s", *(f"times {peer}" for peer in _PEERS)]
    place = f"{machine_of(record)}. {versions_of(record)}."
    return f"{markdown_table(headers, lines)}\n\n`{record['command']}`. {place}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, type by type."""
    parser = make_parser(__doc__, results="types")
    parser.add_argument("model", help="a GGUF file, or a benchmark model's name")
    parser.add_argument("--types", type=listed(_TYPES), default=list(_TYPES))
    parser.add_argument("--ik", type=Path, metavar="PROGRAM", help="ik_llama.cpp's llama-bench")
    parser.add_argument("--files", type=Path, help="where the files are kept")
    parser.add_argument("--make", action="store_true", help="make the files, and measure nothing")
    args = parser.parse_args(arguments)
    folder = args.files or Settings.from_environment().cache_dir / "bench"
    record = load(args.json, rows=[])
    words = [
        f"python -m benchmarks.kernels.files {args.model}",
        *(["--ik llama-bench"] if args.ik else []),
    ]
    where = setting(" ".join(words), *PACKAGES)  # without the types that it measures this time
    try:
        source = find_model(args.model)
        measured = () if args.make else [row["name"] for row in record["rows"]]
        for name in args.types:
            path = typed_file(source, name, folder)
            if args.make or name in measured:
                continue
            print(name, flush=True)
            found = hold_contest(path, PROMPT, TOKENS, RUNS, args.ik)
            made = {"name": name, "results": {"file": path.stat().st_size, **found}}
            record = save_row(args.json, record, made, list(_TYPES), **where)
            print({key: found[key] for key in found if key != "samples"}, flush=True)
    except LocalrtError as error:
        print(f"files: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
