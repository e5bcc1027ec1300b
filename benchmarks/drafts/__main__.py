"""What drafts bring: answers with and without them, by turns, prompt by prompt.

    python -m benchmarks.drafts MODEL --draft HEAD [--draft SMALL ...] [--code FILE] [--chat FILE]
        [--edits] [--ram 850MB] [--prompts 20] [--tokens 128] [--runs 5] [--json FILE]

A row is a kind of prompts and a budget of memory. FILE is JSONL, of which --prompts are taken from
beginning to end: a ``prompt`` is continued as it is, the first of ``turns`` is a message of a chat.
``--edits`` asks for changes to functions of Python's library, as a coding agent does. Each
contestant has a process of its own, greedy, and keeps what its tuner has learned, as in use; what
earlier answers said is forgotten, since the runs repeat them. Every answer is compared with plain
decoding, token by token. The first run warms up.

Besides, with drafts of a fixed size: tokens a pass of trees of 8 and 64 nodes, and the seconds of a
draft's level against those of a plain step.
"""

from __future__ import annotations

import bisect
import calendar
import colorsys
import difflib
import fnmatch
import inspect
import json
import shlex
import statistics
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import (
    Record,
    load,
    machine_of,
    markdown_table,
    save_row,
    setting,
    versions_of,
)
from localrt.bench.process import ChildProcess, child_command

PLAIN = "off"
_TREES = (8, 64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure row by row, save, print; 1 if an answer differs."""
    parser = make_parser(__doc__, results="drafts")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--draft", action="append", default=[], help="a head, a model, mtp, ngram")
    parser.add_argument("--code", type=Path, metavar="FILE", help="prompts to continue")
    parser.add_argument("--chat", type=Path, metavar="FILE", help="messages to answer")
    parser.add_argument("--edits", action="store_true", help="functions to change")
    parser.add_argument("--ram", action="append", default=[], help="also within this budget")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    kinds = {"code": args.code, "chat": args.chat}
    prompts = {
        kind: _prompts(file, args.prompts) for kind, file in kinds.items() if file is not None
    }
    if args.edits:
        prompts["edits"] = edits(args.prompts)
    if not prompts or not args.draft:
        parser.error("give --draft, and --code, --chat or --edits")
    about = setting(cited_command("drafts", arguments), "numpy")
    record = load(args.json, rows=[]) if args.json else {"rows": []}
    names = [f"{kind}{within}" for within in _budgets(args.ram) for kind in prompts]
    names = list(dict.fromkeys([*(row["name"] for row in record["rows"]), *names]))
    for within, ram in _budgets(args.ram).items():
        for kind, asked in prompts.items():
            found = measure(find_model(args.model), args.draft, ram, asked, args.tokens, args.runs)
            row = {"name": f"{kind}{within}", "prompts": len(asked), "runs": args.runs, **found}
            record = save_row(args.json, record, row, names, **about)
            print(f"{row['name']} is done", flush=True)
    print(drafts_table(record))
    return 0 if all(row["same_tokens"] for row in record["rows"]) else 1


def _budgets(rams: Sequence[str]) -> dict[str, str | None]:
    return {"": None, **{f" within {ram}": ram for ram in rams}}


def _prompts(file: Path, most: int) -> list[Record]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    found = [
        {"prompt": row["prompt"], "raw": True} if "prompt" in row else {"prompt": row["turns"][0]}
        for row in rows
    ]
    return _spread(found, most)


def _spread(found: list[Record], most: int) -> list[Record]:
    """``most`` of them, from beginning to end: files list one kind of prompt after the other."""
    count = min(most, len(found))
    return [found[number * len(found) // count] for number in range(count)]


def edits(most: int) -> list[Record]:
    """Functions of Python's library, each to be given back with a small change."""
    found = []
    for module in (textwrap, shlex, fnmatch, bisect, calendar, colorsys, difflib, statistics):
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            source = textwrap.dedent(inspect.getsource(function)) if own else ""
            if 12 <= source.count("\n") <= 40:
                asked = f"Rename the function to `{name}_again` and give back all of it:\n\n"
                found.append({"prompt": f"{asked}```python\n{source}```"})
    return _spread(found, most)


def measure(
    model: Path,
    drafts: Sequence[str],
    ram: str | None,
    prompts: Sequence[Record],
    tokens: int,
    runs: int,
) -> Record:
    """Every draft's speeds over those of plain decoding, prompt by prompt."""
    names = [PLAIN, *drafts]
    samples: dict[str, list[list[Record]]] = {name: [[] for _ in prompts] for name in names}
    children = {}
    try:
        for name in names:
            children[name] = ChildProcess(child_command("benchmarks.drafts.child"))
            job = {"model": str(model), "draft": name, "ram": ram, "tokens": tokens}
            children[name].ask("load", job=job)
        for run in range(runs + 1):
            for number, prompt in enumerate(prompts):
                for name in names:
                    found = children[name].ask("answer", **prompt)
                    if run:
                        samples[name][number].append(found)
        fixed = {
            name: {
                size: [children[name].ask("answer", **p, size=size) for p in prompts]
                for size in _TREES
            }
            for name in drafts
        }
        levels = {name: children[name].ask("level") for name in drafts}
    finally:
        for child in children.values():
            child.close()
    same = all(
        one["tokens"] == samples[PLAIN][number][0]["tokens"]
        for each in samples.values()
        for number, found in enumerate(each)
        for one in found
    )
    return {
        "same_tokens": same,
        "contestants": [
            {"draft": Path(name).name, **_summary(samples[PLAIN], samples[name])}
            | {"trees": {str(size): _tokens_a_pass(found) for size, found in
                         fixed.get(name, {}).items()}}
            | levels.get(name, {})
            for name in names
        ],
    }  # fmt: skip


def _summary(plain: list[list[Record]], ours: list[list[Record]]) -> Record:
    """Medians over runs of a prompt, then over prompts; the ratios of one run's two."""
    ratios = [
        statistics.median(b["tok_s"] / a["tok_s"] for a, b in zip(one, other, strict=True))
        for one, other in zip(plain, ours, strict=True)
    ]
    last = [found[-1] for found in ours]
    return {
        "tok_s": statistics.median(statistics.median(r["tok_s"] for r in runs) for runs in ours),
        "ratio": statistics.median(ratios),
        "worst": min(ratios),
        "best": max(ratios),
        "tokens_a_pass": _tokens_a_pass(last),
        "said": last[-1]["said"],
    }


def _tokens_a_pass(found: Sequence[Mapping[str, Any]]) -> float:
    return statistics.mean(one["each"] for one in found)


def drafts_table(record: Mapping[str, Any]) -> str:
    """Speeds against plain decoding, tokens a pass of trees, and a level's share of a step."""

    def rows() -> Iterator[list[str]]:
        for row in record["rows"]:
            for one in row["contestants"]:
                trees = [
                    f"{one['trees'][str(size)]:.1f}" if one["trees"] else "" for size in _TREES
                ]
                share = f"{one['share']:.0%}" if "share" in one else ""
                yield [
                    row["name"], one["draft"], f"{one['tok_s']:.1f}", f"{one['ratio']:.2f}x",
                    f"{one['worst']:.2f}x", f"{one['tokens_a_pass']:.1f}", *trees, share,
                ]  # fmt: skip

    headers = ["prompts", "draft", "tok/s", "of plain", "slowest prompt", "tokens a pass"]
    headers += [*(f"of {size} nodes" for size in _TREES), "a level, of a pass"]
    return (
        f"{markdown_table(headers, rows())}\n\n`{record['command']}`, medians, on "
        f"{machine_of(record)}. {versions_of(record)}."
    )


if __name__ == "__main__":
    sys.exit(main())
