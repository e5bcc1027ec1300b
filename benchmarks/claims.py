"""What localrt promises, measured beside llama.cpp's server in the kind of program that needs it.

    python -m benchmarks.claims --server llama-server --hybrid FILE [--only WORD] [--again WORD]

FILE is a GGUF of a model with recurrent layers, whose weights may be random
(``tests.models.real_shapes``). Both servers get the same requests one after another, each alone on
the machine, in its default settings; the rows say what else they are told.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.memory_limit import MemoryLimit, drop_from_cache
from benchmarks.common.record import Record, Results, captioned, markdown_table
from localrt.bench.mix.mix import AppRequest
from localrt.bench.mix.servers import Client, Running, Target, TimedReply, start
from localrt.client.model import list_remote
from localrt.client.servers import Address
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_bytes
from localrt.common.processes import localrt_command
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
_ANSWER_S = 900


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the programs are: llama.cpp's server, the models, and a folder for what they write."""

    program: Path
    hybrid: Path
    folder: Path


@contextmanager
def serving(peer: str, words: Sequence[str], setting: Setting, limit: int = 0) -> Iterator[Address]:
    """``peer`` with the options ``words``, within ``limit`` bytes of memory if not 0."""
    command = [str(setting.program), *words]
    if peer == "localrt":
        command = localrt_command("serve", *words, "--quiet")
    with ExitStack() as stack:
        if limit:
            try:
                group = MemoryLimit.create(limit)
            except LocalrtError as error:  # which says nothing about the peer
                raise SystemExit(f"localrt: {error}") from None
            stack.callback(group.remove)
            join = f'echo $$ > "{group.processes}"; exec "$@"'
            command = ["sh", "-c", join, "sh", *command]
        yield start(stack, Running(), peer, command)


def ask(server: Address, asked: str | Sequence[Mapping[str, Any]], **fields: Any) -> TimedReply:
    """Greedy answer to a question or to messages, streamed; ``fields`` are the body's.

    Raises:
        LocalrtError: there is none.
    """
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    body = {"messages": messages, "temperature": 0, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    request = AppRequest("/chat/completions", body, give_up_s=_ANSWER_S)
    reply = Client().send(Target(server, "model"), request, "interactive")
    if reply.error or reply.cancelled:
        raise LocalrtError(reply.error or f"no answer within {_ANSWER_S} s")
    return reply


def _reading(replies: Sequence[TimedReply]) -> Record:
    """The prompt tokens that had to be read, and the seconds to the first token."""
    return {
        "read": sum((reply.prompt_tokens or 0) - reply.cached_tokens for reply in replies),
        "first_s": statistics.median(reply.ttft_s or reply.end_s for reply in replies),
    }


def _words(peer: str, model: Path, ctx: int, *more: str, draft: str | Path = "auto") -> list[str]:
    """The options of both: a model, its context and a draft; ``more`` are llama.cpp's alone."""
    if peer == "localrt":
        return [str(model), "--ctx", str(ctx), "--draft", str(draft)]
    draft_words = ["-md", str(draft)] if isinstance(draft, Path) else []
    return ["-m", str(model), "-c", str(ctx), *draft_words, *more]


# -- the claims ------------------------------------------------------------------------------------


def agents_day(peer: str, setting: Setting) -> Record:
    """Requests of a coding agent: the user's, each with two calls of tools and a title beside it;
    then the older half of the history is summed up, and it goes on.
    """
    words = _words(peer, setting.hybrid, 8192, "--jinja")
    system = {"role": "system", "content": TEXT * 20}
    messages: list[dict[str, Any]] = [system]
    answers = []
    with serving(peer, words, setting) as server:
        for turn, question in enumerate(QUESTIONS[:6]):
            if turn == 4:
                summed_up = {"role": "user", "content": f"So far: {TEXT * 4}"}
                messages = [system, summed_up, *messages[11:]]
            messages.append({"role": "user", "content": f"{turn}: {question}"})
            ask(server, f"Give a title of three words to: {question}", max_tokens=1)
            for step in range(3):
                answers.append(ask(server, messages, tools=_TOOLS, max_tokens=1))
                if step < 2:
                    messages += _tool_call(f"call{turn}{step}", f"a{step}.py")
            messages.append({"role": "assistant", "content": f"Done with {turn}."})
    return _reading(answers[1:])


def _tool_call(name: str, path: str) -> list[dict[str, Any]]:
    """An agent's thought and call, and what the tool returned."""
    function = {"name": "read_file", "arguments": json.dumps({"path": path})}
    entry = {"id": name, "type": "function", "function": function}
    thought = f"<think>\nI should look at {path}.\n</think>\n\n"
    return [
        {"role": "assistant", "content": thought, "tool_calls": [entry]},
        {"role": "tool", "tool_call_id": name, "content": TEXT * 12},
    ]


def long_requests(peer: str, setting: Setting) -> Record:
    """Seconds to the first token of requests of 12,000 tokens: of nothing that is known, and of
    what follows 11,000 tokens that are.
    """
    words = _words(peer, setting.hybrid, 16_384, "-np", "1", "-fa", "on", draft="off")
    known, unknown = list[TimedReply](), list[TimedReply]()
    with serving(peer, words, setting) as server:
        a_text = (ask(server, TEXT * 40, max_tokens=1).prompt_tokens or 0) / 40
        for run in range(3):
            system = {"role": "system", "content": f"{run}: {TEXT * round(11_000 / a_text)}"}
            for asked, found in (("First", unknown), ("Then", known)):
                text = f"{asked}: {TEXT * round(1_000 / a_text)}"
                found.append(ask(server, [system, {"role": "user", "content": text}], max_tokens=1))
    read: Record = {"tokens": known[-1].prompt_tokens, "cached": known[-1].cached_tokens}
    seconds = {"unknown_s": _reading(unknown)["first_s"], "known_s": _reading(known)["first_s"]}
    return {**read, **seconds}


def restarts(peer: str, setting: Setting) -> Record:
    """The next question of a long conversation, after the server was ended and started twice."""
    words = _words(peer, find_model("qwen0.5b"), 4096)
    messages = [{"role": "user", "content": TEXT * 150}]
    answers = []
    for turn in range(3):
        with serving(peer, words, setting) as server:
            answers.append(ask(server, messages, max_tokens=8))
        messages.append({"role": "assistant", "content": answers[-1].text})
        messages.append({"role": "user", "content": QUESTIONS[turn]})
    return _reading(answers[1:])


def draft_fits(peer: str, setting: Setting) -> Record:
    """A model with its draft, in less memory than both take, with no word about memory."""
    words = _words(peer, find_model("qwen1.5b"), 2048, draft=find_model("qwen0.5b"))
    return _rate(peer, words, setting, 1_300_000_000)


def larger_than_memory(peer: str, setting: Setting) -> Record:
    """A model in less memory than it takes."""
    words = _words(peer, find_model("qwen1.5b"), 2048, "-np", "1", draft="off")
    return _rate(peer, words, setting, 850_000_000)


def _rate(peer: str, words: Sequence[str], setting: Setting, limit: int) -> Record:
    drop_from_cache([find_model("qwen1.5b"), find_model("qwen0.5b")])
    try:
        with serving(peer, words, setting, limit) as server:
            replies = [ask(server, question, max_tokens=24) for question in QUESTIONS[:6]]
    except LocalrtError as error:
        return {"limit": limit, "failed": str(error)[:200]}
    rates = [1 / (reply.tpot_s or 1e9) for reply in replies[1:]]
    return {"limit": limit, "tok_s": statistics.median(rates)}


def three_models(peer: str, setting: Setting) -> Record:
    """Three models in turn, four rounds, in memory for about two of them."""
    limit = 1_500_000_000
    paths = [find_model(name) for name in ("qwen1.5b", "qwen0.5b", "smollm2")]
    drop_from_cache(paths)
    folder = setting.folder / "models"
    folder.mkdir(exist_ok=True)
    for path in paths:
        note_use(str(path.absolute()), Settings.from_environment())
        with suppress(FileExistsError):
            (folder / path.name).symlink_to(path)
    router = ["--models-dir", str(folder), "-c", "2048"]
    words = ["--ctx", "2048"] if peer == "localrt" else router
    seconds: list[float] = []
    failed = ""
    try:
        with serving(peer, words, setting, limit) as server:
            known = [model.name for model in list_remote(server)]
            stems = ["1.5b", "0.5b", "smollm2"]
            names = [next(name for name in known if stem in name.lower()) for stem in stems]
            for question in QUESTIONS[:4]:
                for name in names:
                    seconds.append(ask(server, question, model=name, max_tokens=16).end_s)
    except LocalrtError as error:
        failed = str(error)[:200]
    facts = {"limit": limit, "asked": 12, "answered": len(seconds), "failed": failed}
    return {**facts, "answer_s": statistics.median(seconds[3:]) if seconds[3:] else None}


def same_answers(peer: str, setting: Setting) -> Record:
    """Greedy answers with a draft model and without."""
    model, drafts = find_model("qwen1.5b"), ("off", find_model("qwen0.5b"))
    texts = []
    for draft in drafts:
        words = _words(peer, model, 2048, "-np", "1", draft=draft)
        with serving(peer, words, setting) as server:
            ask(server, "Hello.", max_tokens=8)
            texts.append([ask(server, question, max_tokens=64).text for question in QUESTIONS])
    changed = sum(a != b for a, b in zip(*texts, strict=True))
    return {"asked": len(QUESTIONS), "changed": changed}


def _shown_read(got: Record) -> str:
    return f"{got['read']:,} tokens read, {got['first_s']:.2f} s to the first token"


def _shown_long(got: Record) -> str:
    return (
        f"{got['unknown_s']:.1f} s to the first token, {got['known_s']:.2f} s if 11,000 are known"
    )


def _shown_rate(got: Record) -> str:
    return f"{got['tok_s']:.1f} tok/s" if "tok_s" in got else f"no answer: {got['failed']}"


def _shown_models(got: Record) -> str:
    each = f", {got['answer_s']:.1f} s each" if got["answer_s"] else ""
    return f"{got['answered']} of {got['asked']} answered{each}"


def _shown_changes(got: Record) -> str:
    return f"{got['changed']} of {got['asked']} answers changed"


class Claim(NamedTuple):
    """How a peer is measured, and what the table says of it."""

    measure: Callable[[str, Setting], Record]
    title: str
    shown: Callable[[Record], str]


CLAIMS = {
    "agent": Claim(
        agents_day, "an agent's 17 later requests to a model with recurrent layers", _shown_read
    ),
    "long": Claim(long_requests, "a request of 12,000 tokens", _shown_long),
    "restarts": Claim(
        restarts, "the next turn after each of two restarts, about 2,750 tokens", _shown_read
    ),
    "draft": Claim(draft_fits, "1.5B with a draft of 0.5B, within {limit}", _shown_rate),
    "models": Claim(three_models, "1.5B, 0.5B and 135M in turn, within {limit}", _shown_models),
    "answers": Claim(same_answers, "1.5B with a draft of 0.5B, against 1.5B alone", _shown_changes),
    "larger": Claim(larger_than_memory, "1.5B within {limit}", _shown_rate),
}


def claims_table(record: Mapping[str, Any]) -> str:
    """One row a claim."""
    rows = []
    for row in record["rows"]:
        claim, limit = CLAIMS[row["name"]], format_bytes(row["localrt"].get("limit", 0))
        rows.append([claim.title.format(limit=limit), *(claim.shown(row[peer]) for peer in PEERS)])
    about = "medians of the requests, each server alone"
    return captioned(record, markdown_table(["", *PEERS], rows), about)


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
                setting = Setting(args.server, args.hybrid, Path(folder))
                row[peer] = CLAIMS[name].measure(peer, setting)
            print(name, peer, row[peer], flush=True)
        results.put(row, CLAIMS)
    print(claims_table(results.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
