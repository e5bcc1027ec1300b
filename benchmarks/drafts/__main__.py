"""The speedup by drafts: answers with and without them, interleaved, prompt by prompt.

    python -m benchmarks.drafts MODEL --draft HEAD [--draft SMALL ...] [--code FILE] [--chat FILE]
        [--edits] [--ram 850MB] [--prompts 20] [--tokens 128] [--runs 5] [--json FILE]

A row is a kind of prompts and a memory budget. FILE is JSONL, from which --prompts lines are taken,
evenly spread: a ``prompt`` is continued as it is, the first of ``turns`` is a chat message.
``--edits`` asks for changes to functions of Python's library, as a coding agent does. Each
contestant is a separate process that decodes greedily and keeps its tuner's state, as in use;
earlier answers are forgotten, since the runs repeat them. Every answer is compared with plain
decoding, token by token. The first run warms up.

Also measured: tokens per pass with trees of a fixed size, 8 and 64 nodes.
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
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import Record, Results, captioned, markdown_table
from benchmarks.common.turns import by_turns, ratios
from localrt.bench.process import ChildProcess
from localrt.common.helpers import helper_command

PLAIN = "off"
_TREES = (8, 64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure row by row, save, print; 1 if an answer differs."""
    parser = make_parser(__doc__, results="drafts", runs=5)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--draft", action="append", default=[], help="a head, a model, mtp, ngram")
    parser.add_argument("--code", type=Path, metavar="FILE", help="prompts to continue")
    parser.add_argument("--chat", type=Path, metavar="FILE", help="messages to answer")
    parser.add_argument("--edits", action="store_true", help="functions to change")
    parser.add_argument("--ram", action="append", default=[], help="also within this budget")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args(arguments)
    files = {"code": args.code, "chat": args.chat}
    prompts = {kind: _prompts(file, args.prompts) for kind, file in files.items() if file}
    if args.edits:
        prompts["edits"] = edits(args.prompts)
    if not prompts or not args.draft:
        parser.error("give --draft, and --code, --chat or --edits")
    results = Results(args.json, cited_command("drafts", arguments), "numpy")
    for ram, kind in product([None, *args.ram], prompts):
        job = {"model": str(find_model(args.model)), "ram": ram, "tokens": args.tokens}
        found = measure(job, args.draft, prompts[kind], args.runs)
        row = {"name": kind if ram is None else f"{kind} within {ram}"}
        results.put({**row, "prompts": len(prompts[kind]), "runs": args.runs, **found})
    print(drafts_table(results.record))
    return 0 if all(row["same_tokens"] for row in results.rows) else 1


def _prompts(file: Path, most: int) -> list[Record]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    found = [
        {"prompt": row["prompt"], "raw": True} if "prompt" in row else {"prompt": row["turns"][0]}
        for row in rows
    ]
    return _spread(found, most)


def _spread(prompts: list[Record], most: int) -> list[Record]:
    """``most`` evenly spread prompts: files list one kind of prompt after another."""
    count = min(most, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def edits(most: int) -> list[Record]:
    """Prompts that ask for a function of Python's library with a small change."""
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
    job: Mapping[str, Any], drafts: Sequence[str], prompts: Sequence[Record], runs: int
) -> Record:
    """Every draft's speed relative to plain decoding, prompt by prompt."""
    names = [PLAIN, *drafts]
    with ExitStack() as stack:
        children = {}
        for name in names:
            child = ChildProcess(helper_command("benchmarks.drafts.child"))
            children[name] = stack.enter_context(child)
            child.ask("load", job={**job, "draft": name})
        asked = list(product(range(len(prompts)), names))
        found = by_turns(
            {(n, name): partial(children[name].ask, "answer", **prompts[n]) for n, name in asked},
            runs,
        )
        contestants = []
        for name in names:
            one: Record = {"draft": Path(name).name, "trees": {}}
            one |= _summary(
                *([found[n, who] for n in range(len(prompts))] for who in (PLAIN, name))
            )
            if name != PLAIN:
                for size in _TREES:
                    trees = [children[name].ask("answer", **each, size=size) for each in prompts]
                    one["trees"][str(size)] = _tokens_a_pass(trees)
            contestants.append(one)
    same = all(one["tokens"] == found[n, PLAIN][0]["tokens"] for n, who in asked
               for one in found[n, who])  # fmt: skip
    return {"same_tokens": same, "contestants": contestants}


def _summary(plain: list[list[Record]], ours: list[list[Record]]) -> Record:
    """Medians over a prompt's runs, then over prompts; ratios are within one run."""
    speeds = [[[one["tok_s"] for one in runs] for runs in each] for each in (plain, ours)]
    each = [statistics.median(ratios(b, a)) for a, b in zip(*speeds, strict=True)]
    return {
        "tok_s": statistics.median(map(statistics.median, speeds[1])),
        "ratio": statistics.median(each),
        "worst": min(each),
        "best": max(each),
        "tokens_a_pass": _tokens_a_pass([runs[-1] for runs in ours]),
        "said": ours[-1][-1]["said"],
    }


def _tokens_a_pass(answers: Sequence[Mapping[str, Any]]) -> float:
    return float(statistics.mean(one["each"] for one in answers))


def drafts_table(record: Mapping[str, Any]) -> str:
    """Speeds relative to plain decoding, tokens per pass of trees, and the cost of a tree level
    relative to a step.
    """

    def rows() -> Iterator[list[str]]:
        for row in record["rows"]:
            for one in row["contestants"]:
                trees = [
                    f"{one['trees'][str(size)]:.1f}" if one["trees"] else "" for size in _TREES
                ]
                yield [
                    row["name"], one["draft"], f"{one['tok_s']:.1f}", f"{one['ratio']:.2f}x",
                    f"{one['worst']:.2f}x", f"{one['tokens_a_pass']:.1f}", *trees,
                ]  # fmt: skip

    headers = ["prompts", "draft", "tok/s", "of plain", "slowest prompt", "tokens a pass"]
    headers += [f"of {size} nodes" for size in _TREES]
    return captioned(record, markdown_table(headers, rows()))


if __name__ == "__main__":
    sys.exit(main())
