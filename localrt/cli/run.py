"""``localrt run [MODEL] [PROMPT]``: one answer on stdout, made for pipes.

Text on stdin joins the prompt. Ctrl+C keeps what was printed (exit 130); a closed pipe ends it
quietly. ``--batch FILE`` answers many prompts instead (``run_batch.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from localrt.chat import ChatSession
from localrt.cli.help import Examples, ProgressLine
from localrt.cli.loading import choose_model, cut_base, limit_base, load_chat_model, load_model
from localrt.cli.options import (
    EMBEDDING_HELP,
    Flag,
    add_constraint_arguments,
    add_endpoint_arguments,
    add_flags,
    add_load_arguments,
    add_model_argument,
    add_sampling_arguments,
    constraint_options,
    sampling_options,
)
from localrt.cli.output import note, say, say_answer, say_json
from localrt.cli.run_batch import read_stdin, run_batch
from localrt.common.errors import LocalrtError, ModelNotFoundError, OptionError, reason_of
from localrt.common.files import (
    keep_private,
    parse_json,
    private_folder,
    read_stream,
    user_path,
    write_text,
)
from localrt.common.formatting import format_bytes, format_rate, format_seconds, one_line
from localrt.common.progress import NOTE, Progress
from localrt.common.settings import Settings
from localrt.engine.stopping import Repetition
from localrt.engine.types import Chunk, Metrics
from localrt.hub import DEMO_NAME
from localrt.hub.listing import may_be_a_name
from localrt.models.vision.picture import picture_bytes

EXAMPLES: Examples = (
    ('localrt run smollm2 "Name three rivers"', "one answer"),
    ('localrt run -c "And three more"', "go on with the last run"),
    ('git diff | localrt run model.gguf "Write a commit message:"', "text from a pipe"),
    ('localrt run model.gguf "What is this?" --image photo.jpg', "a question about a picture"),
    ("localrt run model.gguf --batch questions.txt", "an answer for every line"),
    ('localrt run coder.gguf "def add(a, b):" --suffix "return c"', "fill in what comes between"),
    ('localrt run model.gguf "A person" --json-schema person.json', "JSON that follows a schema"),
)


_BATCH_HELP = (
    "answer every line of FILE (-: stdin): all text, or all JSON objects with prompt or messages; "
    "one wrong line refuses the whole file (default: none)"
)
_SUFFIX_HELP = (
    "fill in what comes between the prompt and TEXT, with a model that can (default: none)"
)
_FLAGS: tuple[Flag, ...] = (
    ("--batch", str, "FILE", _BATCH_HELP),
    ("--batch-size", int, "N", "prompts at a time (default: as many as memory holds)"),
    ("--raw", bool, None, "complete the text, without a chat template"),
    ("--suffix", str, "TEXT", _SUFFIX_HELP),
    ("--json", bool, None, "print text and metrics as JSON"),
    ("--stats", bool, None, "print timings on stderr"),
)


REPEATED = "stopped: the same text came again and again; --max-tokens N lets it go on"
APPROXIMATE = (
    "approximate: what the weights are multiplied with is rounded to 8 or 16 bits, so that single "
    "words may differ from those of --format f32, which computes in full"
)
"""What ``exactness`` means to a reader."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser, default=None)
    add = parser.add_argument
    prompt = "the prompt; text on stdin is added below it"
    add("prompt", nargs="?", metavar="PROMPT", help=prompt)
    add("-s", "--system", metavar="TEXT", help="system prompt (default: none)")
    add("-c", "--continue", dest="resume", action="store_true", help="continue the last run")
    add_flags(parser, _FLAGS)
    file = "a document, text file or folder to read, again for more (default: none)"
    add("--file", action="append", default=[], metavar="PATH", help=file)
    add("--embedding-model", metavar="MODEL", help=EMBEDDING_HELP)
    image = "a picture to look at, again for more; -: from stdin (default: none)"
    add("--image", action="append", default=[], metavar="FILE", help=image)
    add_endpoint_arguments(parser)
    add_load_arguments(parser)
    add_sampling_arguments(parser)
    add_constraint_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model, answer, and save the conversation for ``-c``."""
    if args.resume and args.endpoint is None:
        _continue_with_its_model(args)
    given = None if args.endpoint else args.model or DEMO_NAME
    choose_model(args)
    constraint_options(args)  # reports errors before a model is loaded
    completes = "--raw" if args.suffix is None else "--suffix"
    args.raw = args.raw or args.suffix is not None
    if args.raw and (args.resume or args.system):
        raise OptionError(f"{completes} completes a text: leave out --continue and --system")
    if args.endpoint is not None and (args.raw or args.batch is not None):
        raise OptionError(
            f"{completes} and --batch need a model on this machine: leave out --endpoint"
        )
    if (args.image or args.file) and (args.raw or args.batch is not None):
        option = "--image" if args.image else "--file"
        raise OptionError(f"{option} goes with one prompt: leave out --raw, --suffix and --batch")
    if args.batch is not None:
        if args.suffix is not None:
            raise OptionError("--suffix fills in one text: leave out --batch")
        if args.embedder is not None:
            raise OptionError("--embedding-model searches files: leave out --batch")
        return run_batch(args)
    if args.batch_size is not None:
        raise OptionError("--batch-size needs --batch FILE")
    piped = "-" in args.image
    if piped and not args.prompt:
        raise OptionError("--image - takes stdin: give the prompt as an argument")
    args.image = _images(args.image)
    prompt = args.prompt if piped else prompt_of(args, "run")
    return answer(args, prompt, last_run_path(), given)


def _images(files: Sequence[str]) -> list[bytes]:
    """Read pictures from files, and at most one from stdin."""
    if files.count("-") > 1:
        raise OptionError("--image - can be given once: stdin is one picture")
    stdin = sys.stdin.buffer
    return [picture_bytes(read_stream(stdin, "stdin") if f == "-" else f) for f in files]


def _continue_with_its_model(args: argparse.Namespace) -> None:
    """Let ``run -c PROMPT`` use the model of the last run."""
    if (
        args.model is not None
        and args.prompt is None
        and not may_be_a_name(args.model, Settings.from_environment())
    ):
        args.model, args.prompt = None, args.model
    if args.model is None:
        with suppress(OSError, ValueError, LookupError, TypeError):
            args.model = str(parse_json(last_run_path().read_text(encoding="utf-8"))["run"])


def answer(
    args: argparse.Namespace, prompt: str, remember: Path | None, given: str | None = None
) -> int:
    """Print the answer to ``prompt``; save the conversation and the ``given`` MODEL to ``remember``
    if that is not None.
    """
    options = {**sampling_options(args), **constraint_options(args)}
    if args.embedder is not None and not args.file:
        raise OptionError("--embedding-model searches files: give --file PATH, too")
    if getattr(args, "raw", False):
        with load_model(args) as model:
            limit = limit_base(model, options, raw=args.suffix is None)
            stream = model.stream(prompt, raw=True, suffix=args.suffix, **options)
            return _print(args, model.name, stream, limit)
    with closing(load_chat_model(args)) as chatting:
        limit = limit_base(chatting, options)
        resume = getattr(args, "resume", False)
        if resume and (remember is None or not remember.is_file()):
            raise OptionError("there is no earlier run to continue: leave out --continue")
        chat = chatting.load_chat(remember) if resume and remember else chatting.chat()
        chat.embedder = args.embedder
        if args.system is not None:
            chat.system = args.system
        try:
            images = getattr(args, "image", ())
            with ProgressLine() as line:

                def show(step: Progress) -> None:
                    if step.stage != "prefill":
                        line(step)

                try:
                    stream = chat.stream(
                        prompt, images=images, files=args.file, on_progress=show, **options
                    )
                except KeyboardInterrupt:
                    line(Progress(NOTE, 0, None, "", "stopped while files were read"))
                    raise
            for each in chat.file_notes:
                note(each)
            return _print(args, chatting.name, stream, limit)
        finally:
            if remember is not None and chat.messages:
                _remember(chat, remember, given)
                if resume:  # a conversation continued once may be continued again
                    with suppress(LocalrtError):
                        chat.park()


def _print(args: argparse.Namespace, name: str, stream: Iterator[Chunk], limit: int) -> int:
    parts: list[str] = []
    last: Chunk | None = None
    repetition, repeats = Repetition(), False
    try:
        for last in stream:
            parts.append(last.text)
            if not args.json:
                say_answer(last.text)
            if repeats := bool(limit) and repetition.push(last.text):
                break
    finally:
        # Interrupted or not, end the output with a newline; closing records the turn.
        close = getattr(stream, "close", None)
        if close is not None:
            close()
        if not args.json and parts:
            say_answer("\n")
    assert last is not None, "a stream ends with a chunk that has a finish reason"
    if args.json:
        record = {
            "model": name,
            "text": "".join(parts),
            "finish_reason": "stop" if repeats else last.finish_reason,
            "metrics": last.metrics.to_dict(),
        }
        say_json(record, readable=True)
    if repeats:
        note(REPEATED)
    elif last.finish_reason == "length" and last.metrics.completion_tokens == limit:
        note(cut_base(limit))
    if args.stats:
        say(*_stats(last.metrics), file=sys.stderr)
    return 0


def _stats(m: Metrics) -> list[str]:
    cached = f", {m.cached_tokens} reused" if m.cached_tokens else ""
    thought = f" ({m.thinking_tokens} of thinking)" if m.thinking_tokens else ""
    lines = [
        f"prompt {m.prompt_tokens} tokens{cached}, first token after {format_seconds(m.ttft_s)}, "
        f"prefill {format_rate(m.prefill_tok_s)} tok/s; answer {m.completion_tokens} tokens"
        f"{thought}, {format_rate(m.decode_tok_s)} tok/s"
    ]
    if m.predicted_tok_s is not None and m.pipeline_efficiency is not None:
        lines.append(
            f"streamed: {format_bytes(m.ssd_read_bytes or 0)} read, pipeline busy "
            f"{m.pipeline_efficiency:.0%}, {format_rate(m.predicted_tok_s)} tok/s predicted "
            "without speculation"
        )
    if m.speculation is not None:
        came_true = {k: v for k, v in (m.accepted_by_source or {}).items() if v}
        shares = "".join(f", {share:.0%} of the tokens by {k}" for k, share in came_true.items())
        lines.append(m.speculation + shares)
    if m.exactness == "approximate":
        lines.append(APPROXIMATE)
    return lines


def prompt_of(args: argparse.Namespace, command: str) -> str:
    """Return the prompt given to ``localrt COMMAND``.

    Raises:
        ModelNotFoundError: there is no prompt, and MODEL looks like one.
    """
    try:
        return read_prompt(args.prompt, whole=getattr(args, "suffix", None) is not None)
    except OptionError:
        if args.endpoint is None and not may_be_a_name(args.model, Settings.from_environment()):
            words, flag = one_line(args.model), " -p" if command == "chat" else ""
            asked = json.dumps(words, ensure_ascii=False)
            raise ModelNotFoundError(
                f"no model {words!r}: it was taken for a model's name, which comes before the "
                f"prompt: localrt {command} {DEMO_NAME}{flag} {asked}"
            ) from None
        raise


def read_prompt(prompt: str | None, *, whole: bool = False) -> str:
    """Read the prompt from the command line, from stdin unless it is a terminal, or from both.

    ``whole`` takes one of them as it is, even if it is empty.

    Raises:
        OptionError: neither is there, or stdin is not UTF-8.
    """
    piped = ""
    if whole and prompt is not None:
        return prompt
    if sys.stdin is not None and not sys.stdin.isatty():
        piped = read_stdin()
    if whole:
        return piped
    parts = [text for text in (prompt, piped.strip("\n")) if text]
    if not parts:
        raise OptionError("the prompt is empty: give it as an argument or on stdin")
    return "\n\n".join(parts)


def last_run_path() -> Path:
    """Return the file of the last conversation of ``run``."""
    return Settings.from_environment().data_dir / "last-run.json"


def _remember(chat: ChatSession, path: Path, model: str | None) -> None:
    """Save the conversation; if that fails, print a line but do not fail."""
    try:
        private_folder(path.parent)
        keep_private(path.parent)
        chat.save(path)
        if model is not None:
            file = user_path(model)
            record = parse_json(path.read_text(encoding="utf-8"))
            record["run"] = str(file.absolute()) if file.exists() else model
            write_text(path, json.dumps(record, ensure_ascii=False), private=True)
    except OSError as error:  # StorageError is one
        why = reason_of(error)
        note(f"this answer cannot be continued later (-c): {why}")
