"""The methods of ``Model`` for many prompts that share each pass over the weights.

They check every prompt before any work, and gather what the schedule in ``engine.batch``
yields. Nothing here knows passes, sessions or memory.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

from localrt.engine.batch.batch import BatchLimits, Item, check_request, generate_batch, kv_room
from localrt.engine.options import Options, read_options
from localrt.engine.request import Request
from localrt.engine.types import Chunk
from localrt.errors import LocalrtError, OptionError, TokenizerError
from localrt.progress import ProgressCallback

if TYPE_CHECKING:
    from localrt.api import Model
    from localrt.chat import Message
    from localrt.live import LiveModel

__all__ = ["BatchMethods", "Errors", "Prompts"]

Errors = Literal["raise", "return"]
Prompts: TypeAlias = "Sequence[str | Sequence[Message]]"
# What gives one prompt's ids: its text or messages, or the ids themselves.
_Prompt: TypeAlias = "tuple[str | Sequence[Message] | None, Sequence[int] | None]"
_SEEDS = 1 << 64


class BatchMethods:
    """See ``Model``, which has these methods."""

    _lives: Sequence[LiveModel] = ()

    @overload
    def stream_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["raise"] = "raise", **options: Any
    ) -> Iterator[tuple[int, Chunk]]: ...

    @overload
    def stream_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["return"], **options: Any
    ) -> Iterator[Item]: ...

    def stream_batch(
        self,
        prompts: Prompts | None = None,
        *,
        token_ids: Sequence[Sequence[int]] | None = None,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        batch_size: int | None = None,
        errors: Errors = "raise",
        cancel: threading.Event | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Iterator[Item]:
        """Generate for many prompts; yields ``(index of the prompt, chunk)`` as chunks come.

        Each prompt is what ``stream`` takes, and its chunks are those that ``stream`` would yield
        (bit for bit on the CPU kernels), with ``seed + index`` as its seed where one is given. The
        prompts share passes, with guesses ahead that are worth it: up to ``batch_size`` at a time,
        by default as many of 64 as memory holds KV caches for, which ``max_tokens`` bounds; others
        join as soon as one has finished.

        With ``errors="raise"`` a prompt that cannot be run (longer than the context) raises before
        any work; with ``"return"`` its error is yielded in place of its chunks, and the others run.
        A failure that stops all raises in either case. ``cancel`` ends every prompt with finish
        reason ``"cancelled"``; ``on_progress`` counts finished prompts after each pass.
        """
        model = cast("Model", self)
        if errors not in ("raise", "return"):
            raise OptionError(f"errors must be 'raise' or 'return', is {errors!r}")
        checked = read_options(model.defaults, options)
        limits = BatchLimits(
            ctx=model.info.ctx,
            room=kv_room(model._parts.engine, ram=model._ram, gpu_memory=model._gpu_memory),
            size=batch_size,
        )
        if (token_ids is None or checked.stop) and model._parts.tokenizer is None:
            raise TokenizerError(model._parts.tokenizer_problem)
        cancel = cancel or threading.Event()
        requests: list[tuple[int, Request]] = []
        failed: list[Item] = []
        for index, (prompt, ids) in enumerate(_prompts(prompts, token_ids)):
            own = _with_seed(checked, index)
            try:
                request = model._requests.make(
                    prompt, own, token_ids=ids, raw=raw, tools=tools, cancel=cancel
                )
                check_request(request, ctx=limits.ctx, vocab_size=model.info.vocab_size)
                requests.append((index, model._guessing(request, own)))
            except LocalrtError as error:
                if errors == "raise":
                    raise _named(error, index) from error
                failed.append((index, error))
        stream = generate_batch(
            model._parts.engine,
            model._parts.tokenizer,
            requests,
            limits,
            cancel=cancel,
            on_progress=on_progress,
        )
        return _items(stream, failed, errors)

    @overload
    def generate_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["raise"] = "raise", **options: Any
    ) -> list[Chunk]: ...

    @overload
    def generate_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["return"], **options: Any
    ) -> list[Chunk | LocalrtError]: ...

    def generate_batch(
        self, prompts: Prompts | None = None, *, errors: Errors = "raise", **options: Any
    ) -> Sequence[Chunk | LocalrtError]:
        """Like ``stream_batch``: one chunk with the whole text for each prompt, in their order.

        With ``errors="return"``, a prompt that failed has its ``LocalrtError`` there instead.
        """
        return _gathered(self.stream_batch(prompts, errors=errors, **options))

    @overload
    def astream_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["raise"] = "raise", **options: Any
    ) -> AsyncIterator[tuple[int, Chunk]]: ...

    @overload
    def astream_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["return"], **options: Any
    ) -> AsyncIterator[Item]: ...

    def astream_batch(
        self, prompts: Prompts | None = None, *, errors: Errors = "raise", **options: Any
    ) -> AsyncIterator[Item]:
        """Like ``stream_batch``, for asyncio: the work runs in a thread."""
        from localrt.answering.streams import in_thread

        cancel = options.pop("cancel", None) or threading.Event()
        return in_thread(
            lambda: self.stream_batch(prompts, errors=errors, cancel=cancel, **options), cancel.set
        )

    @overload
    async def agenerate_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["raise"] = "raise", **options: Any
    ) -> list[Chunk]: ...

    @overload
    async def agenerate_batch(
        self, prompts: Prompts | None = None, *, errors: Literal["return"], **options: Any
    ) -> list[Chunk | LocalrtError]: ...

    async def agenerate_batch(
        self, prompts: Prompts | None = None, *, errors: Errors = "raise", **options: Any
    ) -> Sequence[Chunk | LocalrtError]:
        """Like ``generate_batch``, for asyncio."""
        stream = self.astream_batch(prompts, errors=errors, **options)
        return _gathered([item async for item in stream])

    def live(self, *, most: int = 64, buffer: int = 256, patience_s: float = 60.0) -> LiveModel:
        """A batch that stays open: requests of many threads or tasks join it and leave it.

            with model.live() as live:
                for chunk in live.stream("Why is the sky blue?"):  # from any thread
                    print(chunk.text, end="")

        All answers that are on their way share each pass over the weights, up to ``most`` of them,
        fewer where memory is short, and guesses ahead that are worth it. What each says is what
        ``stream`` would yield (bit for bit on the CPU kernels). ``client=`` of a request says whose
        it is: clients take turns. An answer pauses while its reader is ``buffer`` chunks behind,
        and is cancelled when that lasts ``patience_s``. An engine that cannot join sequences runs
        one after another.
        """
        from localrt.engine.batch.live import LiveLimits
        from localrt.live import open_live

        model = cast("Model", self)
        limits = LiveLimits(ctx=model.info.ctx, most=most, buffer=buffer, patience_s=patience_s)
        live = open_live(model, limits)
        self._lives = [*(other for other in self._lives if not other.closed), live]
        return live

    def _close_lives(self) -> None:
        lives, self._lives = self._lives, ()
        for live in lives:
            live.close()


def _prompts(
    prompts: Prompts | None, token_ids: Sequence[Sequence[int]] | None
) -> Sequence[_Prompt]:
    """One pair for each prompt.

    Raises:
        OptionError: not a list of prompts.
    """
    if (prompts is None) == (token_ids is None):
        raise OptionError("give either prompts or token_ids")
    if token_ids is not None:
        if any(isinstance(ids, int) for ids in token_ids):
            raise OptionError("token_ids is a list with the ids of each prompt: [[1, 2], [3]]")
        return [(None, ids) for ids in token_ids]
    assert prompts is not None
    if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
        raise OptionError("prompts is a list of prompts: for a single one, use generate")
    return [(prompt, None) for prompt in prompts]


def _with_seed(options: Options, index: int) -> Options:
    seed = options.sampling.seed
    if seed is None or not index:
        return options
    return replace(options, sampling=replace(options.sampling, seed=(seed + index) % _SEEDS))


def _named(error: LocalrtError, index: int) -> LocalrtError:
    """The same error, saying which prompt it is about."""
    return type(error)(f"prompt {index} (counting from 0): {error}")


def _items(
    stream: Generator[Item, None, None], failed: Sequence[Item], errors: Errors
) -> Iterator[Item]:
    with closing(stream):
        yield from failed
        for index, item in stream:
            if isinstance(item, LocalrtError) and errors == "raise":
                raise _named(item, index) from item
            yield index, item


def _gathered(stream: Iterable[Item]) -> Sequence[Chunk | LocalrtError]:
    from localrt.answering.streams import joined

    chunks: dict[int, list[Chunk]] = {}
    whole: dict[int, Chunk | LocalrtError] = {}
    for index, item in stream:
        if isinstance(item, LocalrtError):
            whole[index] = item
            continue
        chunks.setdefault(index, []).append(item)
        if item.finish_reason is not None:
            whole[index] = joined(chunks.pop(index))
    return [whole[index] for index in sorted(whole)]
