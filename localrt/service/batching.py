"""Many prompts that share each pass over the weights: ``Model.stream_batch``.

Every prompt is checked before any work; ``localrt.engine.batch`` runs the passes.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from localrt.common.errors import LocalrtError, OptionError, TokenizerError
from localrt.common.progress import ProgressCallback
from localrt.engine.batch.offline import generate_batch
from localrt.engine.batch.sequence import failed
from localrt.engine.pool import kv_room
from localrt.engine.request import Request
from localrt.engine.types import Answer, Chunk, Message, Tools
from localrt.service.arguments import check_call, check_list, joined
from localrt.service.core import Core

Errors = Literal["raise", "return"]
Prompts: TypeAlias = Sequence[str | Sequence[Message]]
# Returns one prompt's ids, from its text, messages or ids.
_Prompt: TypeAlias = tuple[str | Sequence[Message] | None, Sequence[int] | None]
_SEEDS = 1 << 64
_SINGLE = "prompts is a list of prompts: for a single one, use generate"


def stream_batch(
    core: Core,
    prompts: Prompts | None,
    options: Mapping[str, Any],
    *,
    token_ids: Sequence[Sequence[int]] | None = None,
    raw: bool = False,
    tools: Tools | None = None,
    batch_size: int | None = None,
    errors: Errors = "raise",
    cancel: threading.Event | None = None,
    on_progress: ProgressCallback | None = None,
) -> Iterator[tuple[int, Chunk]]:
    """See ``Model.stream_batch``."""
    if errors not in ("raise", "return"):
        raise OptionError(f"errors must be 'raise' or 'return', is {errors!r}")
    check_call(cancel=cancel, on_progress=on_progress)
    room = kv_room(core.engine)
    core.check(options)
    stop = options.get("stop", core.defaults.get("stop"))
    if (token_ids is None or stop) and core.parts.tokenizer is None:
        raise TokenizerError(core.parts.tokenizer_problem)
    cancel = cancel or threading.Event()
    requests: list[tuple[int, Request]] = []
    unusable: list[tuple[int, Chunk]] = []
    for index, (prompt, ids) in enumerate(_prompts(prompts, token_ids)):
        try:
            request = core.requests.make(
                prompt, token_ids=ids, raw=raw, tools=tools, cancel=cancel, **options
            )
            request.check(ctx=core.ctx, vocab_size=core.info.vocab_size, vision=core.engine.vision)
            requests.append((index, _with_seed(request, index)))
        except LocalrtError as error:
            if errors == "raise":
                raise _named(error, index) from error
            unusable.append((index, failed(error)))
    stream = generate_batch(
        core.engine,
        core.parts.tokenizer,
        requests,
        ctx=core.ctx,
        room=room,
        size=batch_size,
        cancel=cancel,
        on_progress=on_progress,
    )
    return _items(stream, unusable, errors)


def gathered(stream: Iterable[tuple[int, Chunk]], kind: Any = None) -> list[Answer]:
    """Return the whole answer to each prompt, in order; ``kind`` as in ``joined``."""
    chunks: dict[int, list[Chunk]] = {}
    for index, chunk in stream:
        chunks.setdefault(index, []).append(chunk)
    return [joined(chunks[index], kind) for index in sorted(chunks)]


def _prompts(
    prompts: Prompts | None, token_ids: Sequence[Sequence[int]] | None
) -> Sequence[_Prompt]:
    """Return one pair for each prompt.

    Raises:
        OptionError: not a list of prompts.
    """
    if (prompts is None) == (token_ids is None):
        raise OptionError("give either prompts or token_ids")
    if token_ids is not None:
        check_list("token_ids", token_ids, "lists of token ids")
        if any(isinstance(ids, int) for ids in token_ids):
            raise OptionError("token_ids is a list with the ids of each prompt: [[1, 2], [3]]")
        return [(None, ids) for ids in token_ids]
    assert prompts is not None
    if isinstance(prompts, str):
        raise OptionError(_SINGLE)
    check_list("prompts", prompts, "prompts")
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise OptionError(_SINGLE)
    return [(prompt, None) for prompt in prompts]


def _with_seed(request: Request, index: int) -> Request:
    seed = request.sampling.seed
    if seed is None or not index:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + index) % _SEEDS))


def _named(error: LocalrtError, index: int) -> LocalrtError:
    """Return the same error, with the number of its prompt."""
    return type(error)(f"prompt {index} (counting from 0): {error.marked}")


def _items(
    stream: Generator[tuple[int, Chunk], None, None],
    unusable: Sequence[tuple[int, Chunk]],
    errors: Errors,
) -> Iterator[tuple[int, Chunk]]:
    with closing(stream):
        yield from unusable
        for index, chunk in stream:
            if chunk.error is not None and errors == "raise":
                raise _named(chunk.error, index) from chunk.error
            yield index, chunk
