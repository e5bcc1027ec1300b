"""Chats over HTTP at once against the same chats one after another, on a streamed model.

    python -m benchmarks.app.serve [MODEL] [--ram 350MB] [--chats 8] [--tokens 64]

The servers are ``localrt serve`` in processes of their own, the clients are threads that read
streams. At once and in sequence take turns, with the same questions: texts must be the same, token
for token. Each has a server, for what guesses ahead remembers what has been said; measured without
and with that.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import Record, save, setting
from localrt.formatting import format_bytes, format_rate, format_seconds, table

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
    "a bicycle",
    "a hash table",
    "the sea",
    "TCP",
    "a paper clip",
    "a lighthouse",
    "sourdough bread",
    "a sewing machine",
    "glaciers",
    "chess",
    "a violin",
)


def questions(run: int, chats: int) -> list[str]:
    """What the chats of a round ask."""
    count = len(QUESTIONS)
    return [
        QUESTIONS[i % count].format(TOPICS[(run + i // count + 3 * i) % len(TOPICS)])
        for i in range(chats)
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a turn got. Seconds from the request to the first token, and to the end."""

    text: str
    tokens: int
    ttft_s: float
    total_s: float


class Client:
    """Chats with the server at ``port``."""

    def __init__(self, port: int, tokens: int) -> None:
        self._port = port
        self._tokens = tokens

    def chat(self, question: str, turns: int) -> list[Answer]:
        """The answers of a conversation that begins with ``question``."""
        messages = [{"role": "user", "content": question}]
        answers = [self._turn(messages)]
        for turn in range(turns - 1):
            messages.append({"role": "assistant", "content": answers[-1].text})
            messages.append({"role": "user", "content": FOLLOW_UPS[turn % len(FOLLOW_UPS)]})
            answers.append(self._turn(messages))
        return answers

    def _turn(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        """One streamed answer of exactly so many tokens."""
        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        began, first, tokens = time.perf_counter(), 0.0, 0
        pieces: list[str] = []
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if event["choices"]:
                text = event["choices"][0]["delta"].get("content") or ""
                first = first or (time.perf_counter() - began if text else 0.0)
                pieces.append(text)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        connection.close()
        return Answer("".join(pieces), tokens, first, time.perf_counter() - began)

    def metrics(self) -> dict[str, float]:
        """The server's counters."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@dataclass(frozen=True, slots=True)
class Round:
    """All chats once. Medians are over turns."""

    seconds: float
    tokens: int
    passes: int
    ssd_read_bytes: int
    ttft_s: float  # median
    tok_s: float  # all chats together
    chat_tok_s: float  # median, from the first token on


def play(
    client: Client, asked: Sequence[str], turns: int, *, at_once: bool
) -> tuple[Round, list[str]]:
    """Hold all chats, at once or in sequence; the texts in order."""
    before = client.metrics()
    chats: list[list[Answer]] = [[] for _ in asked]

    def ask(index: int) -> None:
        chats[index] = client.chat(asked[index], turns)

    began = time.perf_counter()
    if at_once:
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for index in range(len(asked)):
            ask(index)
    seconds = time.perf_counter() - began
    after = client.metrics()
    got = [answer for chat in chats for answer in chat]
    if len(got) < turns * len(asked):
        raise RuntimeError("a chat failed: see above")
    tokens = sum(answer.tokens for answer in got)

    def grown(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    done = Round(
        seconds=seconds,
        tokens=tokens,
        passes=grown("localrt_passes_total"),
        ssd_read_bytes=grown("localrt_ssd_read_bytes_total"),
        ttft_s=statistics.median(answer.ttft_s for answer in got),
        tok_s=tokens / seconds,
        chat_tok_s=statistics.median((a.tokens - 1) / (a.total_s - a.ttft_s) for a in got),
    )
    return done, [answer.text for answer in got]


@contextmanager
def server(model: Path, ram: str | None, draft: str, ctx: int, chats: int) -> Iterator[int]:
    """The port of ``localrt serve`` for as long as the block runs."""
    command = [sys.executable, "-m", "localrt", "serve", str(model), "--port", "0", "--json"]
    command += ["--quiet", "--ctx", str(ctx), "--max-running", str(chats)]
    command += ["--draft", draft]
    command += ["--ram", ram] if ram else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the server did not start: see above")
        yield int(json.loads(line)["url"].split("/")[2].rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.wait(60)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print; 1 if a text differs."""
    parser = make_parser(__doc__, results="serve")
    parser.add_argument("model", nargs="?", default="qwen0.5b", metavar="MODEL")
    parser.add_argument("--ram", default="350MB", help="the server's budget; 'all' for none")
    parser.add_argument("--drafts", default="off,auto", help="what guesses ahead")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3, help="of each chat")
    parser.add_argument("--tokens", type=int, default=64, help="of each turn's answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ctx", type=int, default=2048)
    args = parser.parse_args(arguments)
    args.model = find_model(args.model)
    found = [measure(args, draft) for draft in args.drafts.split(",")]
    sizes = {name: getattr(args, name) for name in ("ram", "chats", "turns", "tokens")}
    command = setting(cited_command("app.serve", arguments), "starlette", "uvicorn")
    save(args.json, {**command, "model": args.model.name, **sizes, "results": found})
    return 0 if all(one["same_texts"] for one in found) else 1


def measure(args: argparse.Namespace, draft: str) -> Record:
    """All rounds on one server."""
    ram = None if args.ram == "all" else args.ram
    rounds: dict[str, list[Round]] = {"in sequence": [], "at once": []}
    same = True
    with ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name in rounds:
            port = stack.enter_context(server(args.model, ram, draft, args.ctx, args.chats))
            clients[name] = Client(port, args.tokens)
            clients[name].chat("Hello.", 1)  # what is packed or measured once, is
        for run in range(args.runs):
            asked = questions(run, args.chats)
            texts = []
            for name in sorted(rounds, reverse=bool(run % 2)):
                done, said = play(clients[name], asked, args.turns, at_once=name == "at once")
                rounds[name].append(done)
                texts.append(said)
            same = same and texts[0] == texts[1]
    typical = {
        name: sorted(found, key=lambda done: done.tok_s)[len(found) // 2]
        for name, found in rounds.items()
    }
    ratio = typical["at once"].tok_s / typical["in sequence"].tok_s
    rows = [
        [
            name,
            format_rate(one.tok_s),
            format_rate(one.chat_tok_s),
            format_seconds(one.ttft_s),
            str(one.passes),
            format_bytes(one.ssd_read_bytes // max(1, one.tokens)),
        ]
        for name, one in typical.items()
    ]
    headers = ["chats", "tok/s, all", "tok/s, each", "first token", "passes", "read per token"]
    print(f"draft {draft}")
    print(table(rows, headers, "lrrrrr"))
    print(f"{args.chats} at once: {ratio:.2f}x the throughput of one after another")
    print("the same texts" if same else "THE TEXTS DIFFER", flush=True)
    return {
        "draft": draft,
        "ratio": ratio,
        "same_texts": same,
        "rounds": {name: [asdict(one) for one in found] for name, found in rounds.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
