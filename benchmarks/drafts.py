"""What drafts gain and cost: decoding with them over decoding without, by prompts.

    python -m benchmarks.drafts PROMPTS.jsonl [...] [--model qwen1.5b] [--draft auto]
        [--first 8] [--tokens 128] [--runs 5] [--json FILE]

A line of a file has a ``prompt``, or ``turns`` of which the first is sent. In each run, a new
process answers the first prompts of a file greedily, each with and without drafts, in varying
order. Both must give the same answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import localrt
from benchmarks.common import command
from benchmarks.common.record import Record, Results, captioned, markdown_table
from localrt.common.formatting import format_rate

_Answer = tuple[str, float, float]  # text, tokens per second, tokens per pass


def prompts_of(file: Path, first: int) -> list[str]:
    """The first prompts of a file.

    Raises:
        ValueError: a line has none, or there is no line.
    """
    lines = file.read_text("utf-8").splitlines()[:first]
    try:
        found = map(json.loads, lines)
        prompts = [str(line["prompt"] if "prompt" in line else line["turns"][0]) for line in found]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: a line has no prompt: {error!r}") from None
    if not prompts:
        raise ValueError(f"{file} has no lines")
    return prompts


def answers(model: Path, prompts: Sequence[str], tokens: int, draft: str) -> list[list[_Answer]]:
    """Without and with drafts, the answers of a newly loaded model, behind one that warms up."""
    found: dict[str, list[_Answer]] = {"off": [], draft: []}
    with localrt.load(model, ctx=4096, draft=draft) as loaded:
        loaded.generate("Count to ten.", max_tokens=16, temperature=0.0)
        for place, prompt in enumerate(prompts):
            for each in sorted(found, reverse=place % 2 > 0):
                answer = loaded.generate(prompt, max_tokens=tokens, temperature=0.0, draft=each)
                rate, a_pass = answer.metrics.decode_tok_s, answer.metrics.accepted_per_pass
                found[each].append((answer.text, rate or 0.0, a_pass or 1.0))
    return list(found.values())


def compare(name: str, job: Sequence[Any], runs: int) -> Record:
    """Medians over prompts of the medians over runs."""
    texts, rates, passes = [], [], []
    for _ in range(runs):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = np.array(pool.submit(answers, *job).result(), dtype=object)
        texts.append(found[..., 0])
        rates.append(found[..., 1].astype(float))
        passes.append(found[1, :, 2].astype(float))
    if (np.array(texts) != texts[0][0]).any():
        raise SystemExit(f"{name}: answers differ")
    off, drafts = np.median(np.median(rates, axis=0), axis=1).tolist()
    gains = np.median([drafted / plain for plain, drafted in rates], axis=0).tolist()
    more = {"gains": gains, "tokens_a_pass": float(np.median(passes))}
    return {"name": name, "off": off, "drafts": drafts, **more}


def drafts_table(record: Mapping[str, Any]) -> str:
    """A line for each file of prompts."""
    rows = [
        [
            row["name"],
            *(format_rate(row[key]) for key in ("off", "drafts")),
            *(f"{one(row['gains']):.2f}x" for one in (median, min, max)),
            f"{row['tokens_a_pass']:.1f}",
        ]
        for row in record["rows"]
    ]
    headers = ["prompts", "without, tok/s", "with", "gain", "least", "most", "tokens a pass"]
    about = f"medians of {record['first']} prompts and {record['runs']} runs,"
    return captioned(record, markdown_table(headers, rows), about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure file by file, save, print."""
    parser = command.make_parser(__doc__, runs=5, results="drafts")
    parser.add_argument("prompts", nargs="+", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--model", default="qwen1.5b", help="(default: %(default)s)")
    parser.add_argument("--draft", default="auto", help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=8, help="prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.draft == "off":
        parser.error("--draft off is what drafts are compared with")
    try:
        prompts = {file.stem: prompts_of(file, args.first) for file in args.prompts}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    about = {"runs": args.runs, "first": args.first}
    results = Results(args.json, command.cited_command("drafts", arguments), **about)
    model = command.find_model(args.model)
    for kind, texts in prompts.items():
        job = (model, texts, args.tokens, args.draft)
        results.put(compare(f"{args.model}, {kind}", job, args.runs))
    print(drafts_table(results.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
