"""Speculation in numbers: tokens per pass, the curve over K, and speed against plain decoding.

    .venv/bin/python benchmarks/speculation.py --target T.gguf --draft D.gguf \
        --prompts humaneval.jsonl --out benchmarks/results/speculation.json

Prompts are raw, greedy and at temperature 0.7, 128 tokens each; every generation is compared with
plain decoding token by token. Parts: ``passes`` (K = 16, 64, 128 at depth 16), ``curve`` (K from 1
to 512, with a plot), ``auto`` (resident, the tuner decides), ``ngram`` (edits and summaries, whose
answers repeat their prompts), ``streamed`` (the target under --ram beside its draft), ``llamacpp``
(its own prompt lookup and plain decoding).
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder: its kernels.py would hide a package of that name

import localrt  # noqa: E402
from benchmarks.speculation_plot import draw_curve  # noqa: E402

TOKENS = 128
GREEDY: dict[str, Any] = {"temperature": 0.0}
WARM: dict[str, Any] = {"temperature": 0.7, "seed": 1}
CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PARTS = ("passes", "curve", "auto", "ngram", "streamed", "llamacpp")


def main() -> int:
    args = _arguments()
    prompts = _prompts(args.prompts, args.count)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "tokens": TOKENS, "parts": {}}
    parts: dict[str, Callable[[], Any]] = {
        "passes": lambda: passes(args, prompts),
        "curve": lambda: curve(args, prompts[:4]),
        "auto": lambda: auto(args, prompts),
        "ngram": lambda: repeats(args),
        "streamed": lambda: streamed(args, prompts[:6]),
        "llamacpp": lambda: llamacpp(args, prompts),
    }
    for name in args.parts:
        result["parts"][name] = parts[name]()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1))
    if "curve" in result["parts"]:
        args.out.with_suffix(".svg").write_text(draw_curve(result["parts"]["curve"]))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a prompt each")
    parser.add_argument("--texts", type=Path, help="MT-bench turns, for the n-gram set")
    parser.add_argument("--count", type=int, default=24, help="prompts taken, evenly spread")
    parser.add_argument("--ram", help="budget of the streamed part, such as 1350MB")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["passes", "curve", "auto"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/speculation.json")
    return parser.parse_args()


def _prompts(path: Path, count: int) -> list[str]:
    found = [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line.strip()]
    step = max(1, len(found) // count)
    return found[::step][:count]


def passes(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens per target pass at fixed budgets."""
    rows = []
    with _load(args, args.draft) as model:
        for sampling in (GREEDY, WARM):
            plain = [_run(model, prompt, draft="off", **sampling) for prompt in prompts]
            for budget in (16, 64, 128):
                ours = [_run(model, p, tree_budget=budget, **sampling) for p in prompts]
                rows.append({"tree_budget": budget, **sampling, **_compared(ours, plain)})
                print(rows[-1], file=sys.stderr)
    return rows


def curve(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens per pass, seconds of a pass and tokens per second over K."""
    rows = []
    with _load(args, args.draft) as model:
        plain = [_run(model, prompt, draft="off", **GREEDY) for prompt in prompts]
        for budget in CURVE:
            ours = [_run(model, p, tree_budget=budget, **GREEDY) for p in prompts]
            rows.append(
                {
                    "tree_budget": budget,
                    "verify_s": _verify_seconds(model, prompts[0], budget),
                    **_compared(ours, plain),
                }
            )
            print(rows[-1], file=sys.stderr)
    return rows


def _verify_seconds(model: localrt.Model, prompt: str, budget: int) -> float:
    """Seconds of one target pass over a tree of ``budget`` nodes, the median of five."""
    from localrt.speculative.tree import TokenTree

    session: Any = model.new_session()
    session.extend(model.tokenize(prompt))
    chain = TokenTree.of(
        [5 + i for i in range(budget)], [i // 2 - 1 for i in range(budget)], [0.0] * budget, "x"
    )
    times = []
    for _ in range(5):
        start = time.perf_counter()
        session.extend_tree(5, chain)
        times.append(time.perf_counter() - start)
        session.keep([])
    session.close()
    return statistics.median(times)


def auto(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Resident: plain against what the tuner makes of the draft, prompt by prompt, interleaved."""
    rows = []
    with _load(args, args.draft) as model:
        _run(model, prompts[0], draft="off", **GREEDY)
        for prompt in prompts:
            plain = _run(model, prompt, draft="off", **GREEDY)
            ours = _run(model, prompt, **GREEDY)
            again = _run(model, prompt, draft="off", **GREEDY)
            base = statistics.mean([plain.tok_s, again.tok_s])
            rows.append(
                {
                    "plain_tok_s": base,
                    "tok_s": ours.tok_s,
                    "speed": ours.tok_s / base,
                    "same": ours.ids == plain.ids,
                    "why": ours.why,
                }
            )
            print(rows[-1], file=sys.stderr)
    return rows


def repeats(args: argparse.Namespace) -> dict[str, Any]:
    """Prompts whose answers repeat them, with guesses from the prompt alone."""
    prompts = [*_edits(), *(_summaries(args.texts) if args.texts else [])]
    with _load(args, "off") as model:
        plain, ours = [], []
        for prompt in prompts:
            plain.append(_run(model, prompt, draft="off", raw=False, **GREEDY))
            ours.append(_run(model, prompt, draft="ngram", raw=False, **GREEDY))
    return _compared(ours, plain)


def _edits(count: int = 12) -> list[str]:
    """Functions of the standard library, with a small change asked for."""
    found = []
    for name in ("textwrap", "shlex", "bisect", "heapq", "statistics", "fnmatch", "string"):
        source = Path(__import__(name).__file__).read_text()
        for node in ast.parse(source).body:
            code = ast.get_source_segment(source, node)
            if isinstance(node, ast.FunctionDef) and code and 300 < len(code) < 1200:
                found.append(
                    f"Rename the function {node.name} to {node.name}_2 and write out the whole "
                    f"function again, otherwise unchanged:\n\n```python\n{code}\n```"
                )
    return found[:count]


def _summaries(path: Path, count: int = 8) -> list[str]:
    turns = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    texts: Iterable[str] = (str(t.get("prompt") or t["turns"][0]) for t in turns)
    long = [text for text in texts if len(text) > 300][:count]
    return [f"Repeat this text with every spelling mistake corrected:\n\n{t}" for t in long]


def streamed(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """The target under a budget, beside its draft: plain and tuned."""
    rows = []
    with localrt.load(args.target, draft=args.draft, ram=args.ram, ctx=args.ctx) as model:
        for prompt in prompts:
            plain = _run(model, prompt, draft="off", **GREEDY)
            ours = _run(model, prompt, **GREEDY)
            rows.append({"speed": ours.tok_s / plain.tok_s, **_compared([ours], [plain])})
            print(rows[-1], ours.why, file=sys.stderr)
    return rows


def llamacpp(args: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Any]:
    """llama.cpp: plain, and with its prompt lookup. Its Python API drafts with no model."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    result = {}
    for name, draft in (
        ("plain", None),
        ("prompt lookup", LlamaPromptLookupDecoding(num_pred_tokens=4)),
    ):
        model = llama_cpp.Llama(
            args.target,
            n_ctx=args.ctx,
            draft_model=draft,
            verbose=False,
            logits_all=draft is not None,
        )
        speeds = []
        for prompt in prompts:
            start, count = None, 0
            for _ in model(prompt, max_tokens=TOKENS, temperature=0.0, stream=True):
                start = start or time.perf_counter()
                count += 1
            assert start is not None
            speeds.append((count - 1) / (time.perf_counter() - start))
        result[name] = {"tok_s": statistics.median(speeds), "of_each": speeds}
        model.close()
    return result


class _Outcome:
    """One generation."""

    def __init__(self, chunk: localrt.Chunk) -> None:
        m = chunk.metrics
        self.ids = chunk.token_ids
        self.tok_s = m.decode_tok_s or 0.0
        self.per_pass = m.accepted_per_pass
        self.why = m.speculation


def _load(args: argparse.Namespace, draft: str) -> localrt.Model:
    return localrt.load(args.target, draft=draft, ctx=args.ctx)


def _run(model: localrt.Model, prompt: str, *, raw: bool = True, **options: Any) -> _Outcome:
    return _Outcome(model.generate(prompt, raw=raw, max_tokens=TOKENS, **options))


def _compared(ours: Sequence[_Outcome], plain: Sequence[_Outcome]) -> dict[str, Any]:
    each = [o.per_pass for o in ours if o.per_pass is not None]
    return {
        "tokens_per_pass": statistics.mean(each) if each else None,
        "tokens_per_pass_of_each": each,
        "tok_s": statistics.median(o.tok_s for o in ours),
        "plain_tok_s": statistics.median(o.tok_s for o in plain),
        "same_tokens": sum(o.ids == p.ids for o, p in zip(ours, plain, strict=True)),
        "prompts": len(ours),
    }


if __name__ == "__main__":
    raise SystemExit(main())
