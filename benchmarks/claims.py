"""What localrt promises, measured beside llama.cpp's server in the kind of program that needs it.

    python -m benchmarks.claims --server llama-server --hybrid FILE [--only WORD] [--again WORD]

FILE is a GGUF of a model with recurrent layers, whose weights may be random
(``tests.models.real_shapes``). Both servers get the same requests one after another, each alone on
the machine, in its default settings; the rows say what else they are told.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.memory_limit import MemoryLimit, drop_from_cache
from benchmarks.common.record import Record, Results, captioned, markdown_table
from localrt.common.formatting import format_bytes
from localrt.common.helpers import localrt_command
from localrt.common.settings import Settings
from localrt.hub.cache import note_use

PEERS = ("localrt", "llama-server")
TEXT = "The store keeps what was packed and brings it back in the order in which it came. "
QUESTIONS = (
    "Write a function that reverses a linked list.",
    "Explain in two sentences what a hash table is.",
    "Write a bash line that counts the files in a folder.",
    "What does this regular expression match: ^[a-z]+\\d{2}$",
    "Write a Python class for a stack, with push and pop.",
    "List three uses of a binary tree.",
    "Write SQL that finds the ten most expensive orders.",
    "Why may a test fail only sometimes? Give two causes.",
    "Write a quicksort in C.",
    "What is the difference between a process and a thread?",
    "Write a decorator that times a function.",
    "Explain what `git rebase` does.",
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} {TEXT * 2}",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "relative path"}},
                "required": ["path"],
            },
        },
    }
    for name, what in {
        "read_file": "Return the text of a file.",
        "list_folder": "List the names in a folder.",
        "run_tests": "Run the tests of a folder.",
        "find_text": "Find lines with a text.",
    }.items()
]
_START_S, _ANSWER_S = 300, 900


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the programs are: llama.cpp's server, the models, and a folder for what they write."""

    program: Path
    hybrid: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, the seconds to its first and last token, and the prompt tokens it had to read."""

    text: str
    first_s: float
    seconds: float
    read: int
    tokens: int

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - 1) / max(self.seconds - self.first_s, 1e-9)


class Server:
    """A running server."""

    def __init__(self, origin: str, process: subprocess.Popen[bytes]) -> None:
        # A connection for each request: llama-server may end a kept one at any time.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(
            base_url=origin, timeout=_ANSWER_S, trust_env=False, limits=limits
        )
        self._process = process

    def names(self) -> list[str]:
        """The models that it lists."""
        return [model["id"] for model in self._client.get("/v1/models").json()["data"]]

    def ask(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Answer:
        """Greedy answer, streamed."""
        body = {"messages": messages, "temperature": 0, "stream": True, **fields}
        body = {"model": "model", "stream_options": {"include_usage": True}, **body}
        start, first, text = time.perf_counter(), None, ""
        usage: dict[str, Any] = {}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise httpx2.HTTPError(f"{response.status_code}: {response.read()[:200]!r}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    new = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    if new and first is None:
                        first = time.perf_counter() - start
                    text += new
        seconds = time.perf_counter() - start
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        read = usage["prompt_tokens"] - cached
        return Answer(text, first or seconds, seconds, read, usage["completion_tokens"])

    def wait(self) -> None:
        """Wait until it is ready."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(httpx2.HTTPError):
                if self._client.get("/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.1)
        raise httpx2.HTTPError("it did not start")

    def close(self) -> None:
        """End it as Ctrl+C does."""
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def serving(peer: str, words: Sequence[str], setting: Setting, limit: int = 0) -> Iterator[Server]:
    """``peer`` with the options ``words``, within ``limit`` bytes of memory if not 0."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = str(bound.getsockname()[1])
    if peer == "localrt":
        command = localrt_command("serve", *words, "--quiet", "--port", port)
    else:
        command = [str(setting.program), *words, "--port", port]
    with ExitStack() as stack:
        group = MemoryLimit.create(limit) if limit else None
        log = stack.enter_context((setting.folder / f"{peer}.log").open("ab"))
        if group is not None:
            stack.callback(group.remove)
            join = f'echo $$ > "{group.processes}"; exec "$@"'
            command = ["sh", "-c", join, "sh", *command]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        server = Server(f"http://127.0.0.1:{port}", process)
        stack.callback(server.close)
        server.wait()
        yield server


# -- the claims ------------------------------------------------------------------------------------


def agents_day(peer: str, setting: Setting) -> Record:
    """Requests of a coding agent: the user's, each with two calls of tools and a title beside it;
    then the older half of the history is summed up, and it goes on.
    """
    words = {
        "localrt": [str(setting.hybrid), "--ctx", "8192"],
        "llama-server": ["-m", str(setting.hybrid), "-c", "8192", "--jinja"],
    }[peer]
    system = {"role": "system", "content": TEXT * 20}
    messages: list[dict[str, Any]] = [system]
    answers = []
    with serving(peer, words, setting) as server:
        for turn, question in enumerate(QUESTIONS[:6]):
            if turn == 4:
                messages = [
                    system,
                    {"role": "user", "content": f"So far: {TEXT * 4}"},
                    *messages[11:],
                ]
            messages.append({"role": "user", "content": f"{turn}: {question}"})
            title = [{"role": "user", "content": f"Give a title of three words to: {question}"}]
            server.ask(title, max_tokens=1)
            for step in range(3):
                answers.append(server.ask(messages, tools=_TOOLS, max_tokens=1))
                if step < 2:
                    messages += _tool_call(f"call{turn}{step}", f"a{step}.py")
            messages.append({"role": "assistant", "content": f"Done with {turn}."})
    later = answers[1:]
    return {
        "read": sum(answer.read for answer in later),
        "first_s": statistics.median(answer.first_s for answer in later),
    }


def _tool_call(name: str, path: str) -> list[dict[str, Any]]:
    """An agent's thought and call, and what the tool returned."""
    function = {"name": "read_file", "arguments": json.dumps({"path": path})}
    entry = {"id": name, "type": "function", "function": function}
    thought = f"<think>\nI should look at {path}.\n</think>\n\n"
    return [
        {"role": "assistant", "content": thought, "tool_calls": [entry]},
        {"role": "tool", "tool_call_id": name, "content": TEXT * 12},
    ]


def restarts(peer: str, setting: Setting) -> Record:
    """The next question of a long conversation, after the server was ended and started twice."""
    model = str(find_model("qwen0.5b"))
    words = {"localrt": [model, "--ctx", "4096"], "llama-server": ["-m", model, "-c", "4096"]}
    messages = [{"role": "user", "content": TEXT * 150}]
    answers = []
    for turn in range(3):
        with serving(peer, words[peer], setting) as server:
            answers.append(server.ask(messages, max_tokens=8))
        messages.append({"role": "assistant", "content": answers[-1].text})
        messages.append({"role": "user", "content": QUESTIONS[turn]})
    return {
        "read": sum(answer.read for answer in answers[1:]),
        "first_s": statistics.median(answer.first_s for answer in answers[1:]),
    }


def draft_fits(peer: str, setting: Setting, limit: int = 1_300_000_000) -> Record:
    """A model with its draft, in less memory than both take, with no word about memory."""
    model, draft = str(find_model("qwen1.5b")), str(find_model("qwen0.5b"))
    words = {
        "localrt": [model, "--draft", draft, "--ctx", "2048"],
        "llama-server": ["-m", model, "-md", draft, "-c", "2048"],
    }[peer]
    return {"limit": limit, **_rate(peer, words, setting, limit)}


def larger_than_memory(peer: str, setting: Setting, limit: int = 850_000_000) -> Record:
    """A model in less memory than it takes."""
    model = str(find_model("qwen1.5b"))
    words = {
        "localrt": [model, "--ctx", "2048", "--draft", "off"],
        "llama-server": ["-m", model, "-c", "2048", "-np", "1"],
    }[peer]
    return {"limit": limit, **_rate(peer, words, setting, limit)}


def _rate(peer: str, words: Sequence[str], setting: Setting, limit: int) -> Record:
    drop_from_cache([find_model("qwen1.5b"), find_model("qwen0.5b")])
    try:
        with serving(peer, words, setting, limit) as server:
            rates = []
            for question in QUESTIONS[:6]:
                answer = server.ask([{"role": "user", "content": question}], max_tokens=24)
                rates.append(answer.tok_s)
    except httpx2.HTTPError as error:
        return {"failed": str(error)[:200]}
    return {"tok_s": statistics.median(rates[1:])}


def three_models(peer: str, setting: Setting, limit: int = 1_500_000_000) -> Record:
    """Three models in turn, four rounds, in memory for about two of them."""
    paths = [find_model(name) for name in ("qwen1.5b", "qwen0.5b", "smollm2")]
    drop_from_cache(paths)
    folder = setting.folder / "models"
    folder.mkdir(exist_ok=True)
    for path in paths:
        note_use(str(path.absolute()), Settings.from_environment())
        with suppress(FileExistsError):
            (folder / path.name).symlink_to(path)
    words = {"localrt": ["--ctx", "2048"], "llama-server": ["--models-dir", str(folder)]}[peer]
    words += ["-c", "2048"] if peer == "llama-server" else []
    seconds: list[float] = []
    failed = ""
    try:
        with serving(peer, words, setting, limit) as server:
            known = server.names()
            stems = ["1.5b", "0.5b", "smollm2"]
            names = [next(name for name in known if stem in name.lower()) for stem in stems]
            for question in QUESTIONS[:4]:
                for name in names:
                    messages = [{"role": "user", "content": question}]
                    answer = server.ask(messages, model=name, max_tokens=16)
                    seconds.append(answer.seconds)
    except httpx2.HTTPError as error:
        failed = str(error)[:200]
    facts = {"limit": limit, "asked": 12, "answered": len(seconds), "failed": failed}
    return {**facts, "answer_s": statistics.median(seconds[3:]) if seconds[3:] else None}


def same_answers(peer: str, setting: Setting) -> Record:
    """Greedy answers with a draft model and without."""
    model, draft = str(find_model("qwen1.5b")), str(find_model("qwen0.5b"))
    with_draft = {
        "localrt": [model, "--draft", draft, "--ctx", "2048"],
        "llama-server": ["-m", model, "-md", draft, "-c", "2048", "-np", "1"],
    }[peer]
    without = {
        "localrt": [model, "--draft", "off", "--ctx", "2048"],
        "llama-server": ["-m", model, "-c", "2048", "-np", "1"],
    }[peer]
    texts = []
    for words in (without, with_draft):
        with serving(peer, words, setting) as server:
            server.ask([{"role": "user", "content": "Hello."}], max_tokens=8)
            asked = [
                server.ask([{"role": "user", "content": question}], max_tokens=64)
                for question in QUESTIONS
            ]
        texts.append([answer.text for answer in asked])
    changed = sum(a != b for a, b in zip(*texts, strict=True))
    return {"asked": len(QUESTIONS), "changed": changed}


CLAIMS = {
    "agent": agents_day,
    "restarts": restarts,
    "draft": draft_fits,
    "models": three_models,
    "answers": same_answers,
    "larger": larger_than_memory,
}


def claims_table(record: Mapping[str, Any]) -> str:
    """One row a claim."""
    rows = [[_TITLES[row["name"]](row), *(_SHOWN[row["name"]](row[peer]) for peer in PEERS)]
            for row in record["rows"]]  # fmt: skip
    about = "medians of the requests, each server alone"
    return captioned(record, markdown_table(["", *PEERS], rows), about)


def _limit(row: Record) -> str:
    return format_bytes(row["localrt"]["limit"])


def _shown_read(got: Record) -> str:
    return f"{got['read']:,} tokens read, {got['first_s']:.2f} s to the first token"


def _shown_rate(got: Record) -> str:
    return f"{got['tok_s']:.1f} tok/s" if "tok_s" in got else f"no answer: {got['failed']}"


_TITLES: dict[str, Callable[[Record], str]] = {
    "agent": lambda row: "an agent's 17 later requests to a model with recurrent layers",
    "restarts": lambda row: "the next turn after each of two restarts, about 2,750 tokens",
    "draft": lambda row: f"1.5B with a draft of 0.5B, within {_limit(row)}",
    "models": lambda row: f"1.5B, 0.5B and 135M in turn, within {_limit(row)}",
    "answers": lambda row: "1.5B with a draft of 0.5B, against 1.5B alone",
    "larger": lambda row: f"1.5B within {_limit(row)}",
}
_SHOWN: dict[str, Callable[[Record], str]] = {
    "agent": _shown_read,
    "restarts": _shown_read,
    "draft": _shown_rate,
    "models": lambda got: (
        f"{got['answered']} of {got['asked']} answered"
        + (f", {got['answer_s']:.1f} s each" if got["answer_s"] else "")
    ),
    "answers": lambda got: f"{got['changed']} of {got['asked']} answers changed",
    "larger": _shown_rate,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing in the results, print the table."""
    parser = make_parser(__doc__, results="claims", rows=True)
    parser.add_argument("--server", type=Path, required=True, help="llama.cpp's llama-server")
    parser.add_argument("--hybrid", type=Path, required=True, help="a model with recurrent layers")
    args = parser.parse_args(arguments)
    results = Results(args.json, cited_command("claims", arguments))
    for name in results.pending(CLAIMS, args.only, args.again):
        row: Record = {"name": name}
        for peer in PEERS:
            with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
                os.environ["LOCALRT_CACHE"] = folder
                row[peer] = CLAIMS[name](peer, Setting(args.server, args.hybrid, Path(folder)))
            print(name, peer, row[peer], flush=True)
        results.put(row, CLAIMS)
    print(claims_table(results.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
