"""Chats over HTTP at once against the same chats one after another, on a streamed model.

    python -m benchmarks.app.serve [MODEL] [--ram 350MB] [--chats 8] [--tokens 64]

The servers are ``localrt serve`` in processes of their own, the clients are threads that read
streams. At once and in sequence take turns, with the same questions: texts must be the same, token
for token. Each has a server, for what guesses ahead remembers what has been said; measured without
and with that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import Record, save, setting
from localrt import Chunk
from localrt.remote import RemoteModel, connect

# Every question is asked in one round only: what guesses ahead remembers what has been said.
QUESTIONS = (
    "Explain how {} works.",
    "Write a haiku about {}, and explain it.",
    "List five facts about {}.",
    "Tell a short story in which {} matters.",
    "What should a beginner know about {}?",
    "Write a letter to a friend about {}.",
    "Which mistakes do people make with {}?",
    "Compare {} with its closest alternative.",
)
FOLLOW_UPS = ("Go on.", "Give an example.", "What is the most important point, and why?")
TOPICS = (
    *("a bicycle", "a hash table", "the sea", "TCP", "a paper clip", "a lighthouse"),
    *("sourdough bread", "a sewing machine", "glaciers", "chess", "a violin"),
)


def questions(run: int, chats: int) -> list[str]:
    """What the chats of a round ask."""
    count = len(QUESTIONS)
    return [
        QUESTIONS[i % count].format(TOPICS[(run + i // count + 3 * i) % len(TOPICS)])
        for i in range(chats)
    ]


@dataclass(frozen=True, slots=True)
class Round:
    """All chats once; the first token's median is over turns."""

    seconds: float
    tokens: int
    ttft_s: float
    tok_s: float  # all chats together


def play(
    model: RemoteModel, asked: Sequence[str], args: argparse.Namespace, *, at_once: bool
) -> tuple[Round, list[str]]:
    """Hold all chats, at once or in sequence; the texts in order."""

    def hold(question: str) -> list[Chunk]:
        chat = model.chat(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        follow_ups = (FOLLOW_UPS[turn % len(FOLLOW_UPS)] for turn in range(args.turns - 1))
        return [chat.send(text) for text in (question, *follow_ups)]

    began = time.perf_counter()
    with ThreadPoolExecutor(len(asked) if at_once else 1) as pool:
        answers = [answer for chat in pool.map(hold, asked) for answer in chat]
    seconds = time.perf_counter() - began
    tokens = sum(answer.metrics.completion_tokens for answer in answers)
    first = statistics.median(answer.metrics.ttft_s or 0.0 for answer in answers)
    return Round(seconds, tokens, first, tokens / seconds), [answer.text for answer in answers]


@contextmanager
def server(model: Path, args: argparse.Namespace, draft: str) -> Iterator[RemoteModel]:
    """The model of a ``localrt serve`` for as long as the block runs."""
    command = [sys.executable, "-m", "localrt", "serve", str(model), "--port", "0", "--json"]
    command += ["--quiet", "--ctx", str(args.ctx), "--max-running", str(args.chats)]
    command += ["--draft", draft, "--ram", args.ram]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the server did not start: see above")
        with connect(json.loads(line)["url"]) as remote:
            yield remote
    finally:
        process.terminate()
        process.wait(60)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print; 1 if a text differs."""
    parser = make_parser(__doc__, results="serve")
    parser.add_argument("model", nargs="?", default="qwen0.5b", metavar="MODEL")
    parser.add_argument("--ram", default="350MB", help="the server's budget")
    parser.add_argument("--drafts", default="off,auto", help="what guesses ahead")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3, help="of each chat")
    parser.add_argument("--tokens", type=int, default=64, help="of each turn's answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ctx", type=int, default=2048)
    args = parser.parse_args(arguments)
    model = find_model(args.model)
    found = [measure(model, args, draft) for draft in args.drafts.split(",")]
    sizes = {name: getattr(args, name) for name in ("ram", "chats", "turns", "tokens")}
    command = setting(cited_command("app.serve", arguments), "starlette", "uvicorn")
    save(args.json, {**command, "model": model.name, **sizes, "results": found})
    return 0 if all(one["same_texts"] for one in found) else 1


def measure(model: Path, args: argparse.Namespace, draft: str) -> Record:
    """All rounds, on a server for each way."""
    rounds: dict[str, list[Round]] = {"in sequence": [], "at once": []}
    same = True
    with ExitStack() as stack:
        remotes = {name: stack.enter_context(server(model, args, draft)) for name in rounds}
        for remote in remotes.values():
            remote.chat(max_tokens=8).send("Hello.")  # what is packed or measured once, is
        for run in range(args.runs):
            asked, texts = questions(run, args.chats), []
            for name in sorted(rounds, reverse=bool(run % 2)):
                done, answers = play(remotes[name], asked, args, at_once=name == "at once")
                rounds[name].append(done)
                texts.append(answers)
            same = same and texts[0] == texts[1]
    rates = {name: statistics.median(one.tok_s for one in found) for name, found in rounds.items()}
    ratio = rates["at once"] / rates["in sequence"]
    verdict = "the same texts" if same else "THE TEXTS DIFFER"
    print(f"draft {draft}: {args.chats} at once, {ratio:.2f}x the tokens per second; {verdict}")
    return {
        "draft": draft,
        "ratio": ratio,
        "same_texts": same,
        "rounds": {name: [asdict(one) for one in found] for name, found in rounds.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
