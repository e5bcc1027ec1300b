"""``localrt run MODEL --batch FILE``: answers a file of prompts in its order.

FILE has one prompt per line: text, or JSON objects with ``prompt`` or ``messages``. A file with an
invalid line is refused before a model is loaded. Each answer is printed once all earlier ones are.
If a prompt cannot be answered, for example because it is too long, its error is printed instead;
the others are answered, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import localrt
from localrt.cli.help import StatusLine
from localrt.cli.loading import cut_base, limit_base, load_model
from localrt.cli.options import constraint_options, sampling_options
from localrt.cli.output import note, say, say_answer, say_json
from localrt.common.errors import OptionError
from localrt.common.files import decoded, parse_json, read_stream, read_text, text_lines
from localrt.common.formatting import format_rate, format_seconds
from localrt.common.option_names import did_you_mean, on_command_line
from localrt.engine.types import Chunk
from localrt.service.arguments import joined

_KEYS = ("prompt", "messages", "id")


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """One prompt of a file: a text or messages, its line (from 1), and its ``id`` if any."""

    line: int
    prompt: Any
    id: object = None


def run_batch(args: argparse.Namespace) -> int:
    """Read all prompts, load the model, print every answer; 1 when some failed."""
    if args.prompt is not None or args.resume:
        raise OptionError("--batch takes its prompts from FILE: leave out PROMPT and --continue")
    prompts = parse_prompts(_read(args.batch), "stdin" if args.batch == "-" else args.batch)
    if args.raw and not all(isinstance(prompt.prompt, str) for prompt in prompts):
        raise OptionError("--raw completes texts, but FILE has messages")
    if args.system is not None:
        prompts = [_with_system(prompt, args.system) for prompt in prompts]
    with load_model(args) as model:
        return _print(args, model, prompts)


def parse_prompts(text: str, name: str) -> list[BatchPrompt]:
    """Return the prompts in ``text``, skipping empty lines.

    Lines are JSON if all are objects, if one has ``prompt`` or ``messages``, or if ``name`` ends in
    ``.jsonl``. The ``id`` of a prompt is printed with its answer.

    Raises:
        OptionError: no prompts, text among JSON objects, or an object that is not a prompt.
    """
    lines = [(number, line) for number, line in enumerate(text_lines(text), 1) if line.strip()]
    if not lines:
        raise OptionError(f"{name} has no prompts: write one on each line")
    objects = [_object(line) for _, line in lines]
    asking = [bool({"prompt", "messages"} & (each or {}).keys()) for each in objects]
    if not name.endswith(".jsonl") and None in objects:
        if not any(asking):
            return [BatchPrompt(number, line) for number, line in lines]
        if not all(asking):
            plain, json_object = (lines[asking.index(each)] for each in (False, True))
            if plain[1].lstrip().startswith("{"):
                _parse_json(plain[1], plain[0], f"line {plain[0]} of {name}")
            raise OptionError(
                f"{name} mixes text (line {plain[0]}) with JSON objects (line {json_object[0]}): "
                'make every line an object with "prompt" or "messages", or every line text'
            )
    return [_parse_json(line, number, f"line {number} of {name}") for number, line in lines]


def _object(line: str) -> dict[str, object] | None:
    """Parse a line as a JSON object, without checking its keys; None if it is text."""
    if line.lstrip().startswith("{"):
        with suppress(ValueError):
            value = parse_json(line)
            return value if isinstance(value, dict) else None
    return None


def _parse_json(line: str, number: int, where: str) -> BatchPrompt:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise OptionError(f"{where} is not JSON: {error}") from error
    if isinstance(value, dict) and (unknown := [key for key in value if key not in _KEYS]):
        hint = did_you_mean(unknown[0], _KEYS) or f"only {', '.join(_KEYS)} are known"
        raise OptionError(f"{where} has {unknown[0]!r:.60}: {hint}")
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise OptionError(f'{where} must be an object with either "prompt" or "messages"')
    prompt = value.get("prompt", value.get("messages"))
    if not isinstance(prompt, str if "prompt" in value else list):
        kind = "a string" if "prompt" in value else "a list"
        raise OptionError(f"{where} has a prompt that is not {kind}")
    if not prompt:
        raise OptionError(f"{where} has an empty prompt")
    if not isinstance(prompt, str) and not all(map(_is_message, prompt)):
        raise OptionError(
            f'{where} has a message that is not an object like {{"role": "user", "content": "..."}}'
        )
    return BatchPrompt(number, prompt, value.get("id"))


def _is_message(value: Any) -> bool:
    is_object = isinstance(value, dict) and isinstance(value.get("role"), str)
    return is_object and (value.get("content") is not None or "tool_calls" in value)


def read_stdin() -> str:
    """Read all text on stdin.

    Raises:
        OptionError: stdin is not UTF-8, or too large.
    """
    return decoded(read_stream(sys.stdin.buffer, "stdin"), "stdin")


def _read(file: str) -> str:
    return read_stdin() if file == "-" else read_text(file)


def _with_system(prompt: BatchPrompt, system: str) -> BatchPrompt:
    """Add a system prompt, unless the prompt's messages have one."""
    messages = prompt.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        return prompt
    return replace(prompt, prompt=[{"role": "system", "content": system}, *messages])


def _print(args: argparse.Namespace, model: localrt.Model, prompts: Sequence[BatchPrompt]) -> int:
    started, failed, tokens, cut = time.perf_counter(), 0, 0, 0
    options = {**sampling_options(args), **constraint_options(args)}
    limit = limit_base(model, options, raw=args.raw)
    # Where answers appear as they come, a line between them would only flicker.
    line = StatusLine(live=sys.stderr.isatty() and not sys.stdout.isatty())
    stream = model.stream_batch(
        [prompt.prompt for prompt in prompts],
        raw=args.raw,
        batch_size=args.batch_size,
        errors="return",
        on_progress=lambda step: line.show(f"{step.done} of {step.total} prompts, {step.detail}"),
        **options,
    )
    for prompt, answer in zip(prompts, _in_order(stream), strict=True):
        line.close()
        if args.json:
            say_json(_record(prompt, answer), readable=True)
        elif answer.error is not None:
            note(f"line {prompt.line}: {answer.error.told(on_command_line)}")
        else:
            say_answer(f"==> {prompt.line} <==\n{answer.text}\n\n")
        if answer.error is not None:
            failed += 1
        else:
            tokens += len(answer.token_ids)
            cut += answer.finish_reason == "length" and len(answer.token_ids) == limit
    line.close()
    if args.stats:
        seconds = time.perf_counter() - started
        rate = format_rate(tokens / seconds if seconds > 0 else None)
        answers = f"{len(prompts) - failed} of {len(prompts)} prompts answered"
        say(
            f"{answers}, {tokens} tokens in {format_seconds(seconds)}, {rate} tok/s",
            file=sys.stderr,
        )
    if cut:
        note(f"{cut} of {len(prompts)} answers {cut_base(limit)}")
    if failed:
        note(f"{failed} of {len(prompts)} prompts failed")
    return 1 if failed else 0


def _in_order(stream: Iterator[tuple[int, Chunk]]) -> Iterator[Chunk]:
    """Yield whole answers in the order of their prompts, each as soon as possible."""
    chunks: dict[int, list[Chunk]] = {}
    whole: dict[int, Chunk] = {}
    following = 0
    for index, chunk in stream:
        chunks.setdefault(index, []).append(chunk)
        if chunk.finish_reason is not None:
            whole[index] = joined(chunks.pop(index))
        while following in whole:
            yield whole.pop(following)
            following += 1


def _record(prompt: BatchPrompt, answer: Chunk) -> dict[str, object]:
    record = {"line": prompt.line, **({} if prompt.id is None else {"id": prompt.id})}
    if answer.error is not None:
        return {**record, "error": str(answer.error)}
    return {
        **record,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "metrics": answer.metrics.to_dict(),
    }
