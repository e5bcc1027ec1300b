"""Answers from the running batch, as whole JSON objects or as a stream of events.

If a client disconnects or stops reading, its answers are cancelled. An error in the middle of a
stream is its last event.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from localrt.api import Model
from localrt.common.errors import CancelledError, ContextOverflowError, OptionError
from localrt.engine.batch.chunked_prefill import CLASSES
from localrt.engine.sampling import log_probabilities
from localrt.engine.types import Chunk, FinishReason, Metrics, TokenLogprob
from localrt.server.dialect import GenerationRequest, ResponseWriter, TokenBytes
from localrt.server.errors import JsonResponse, failure, invalid
from localrt.server.media import with_pictures
from localrt.server.models import ServedModel
from localrt.server.service import ModelRequest
from localrt.service.arguments import joined
from localrt.service.live import AsyncAnswer, run_to_end

T = TypeVar("T")

_SILENT_S = 15.0  # seconds of silence before a stream sends a keep-alive
_ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


async def answer(
    model_request: ModelRequest,
    call: GenerationRequest,
    make: Callable[[GenerationRequest, str, TokenBytes], ResponseWriter],
) -> Response:
    """Return the response to ``call`` by the requested model; ``make`` creates its reply.

    A stream begins after 15 s even if the model is still loading or the prompt being processed.

    Raises:
        ApiError, LocalrtError: nothing has been sent.
        ClientDisconnect: the client has disconnected.
    """
    request, service = model_request.http, model_request.service
    options = service.options
    if call.choices > options.max_choices:
        raise invalid(f"n must be at most {options.max_choices}, is {call.choices}", "n")
    count, most = len(call.prompts) * call.choices, options.max_running + options.max_queued
    if count > most:
        field = "n" if call.choices > 1 else "prompt"
        raise invalid(f"{count} answers in one request: at most {most} are allowed", field)
    work = _Work(model_request, call)
    async with AsyncExitStack() as stack:
        stack.enter_context(service.admitted(count))
        await stack.enter_async_context(work)
        preparing = asyncio.ensure_future(work.prepare(_client(request)))
        stack.push_async_callback(_cancelled, preparing)
        patience = _SILENT_S if call.stream else None
        await until_gone(request, asyncio.wait([preparing], timeout=patience))
        error = preparing.exception() if preparing.done() else None
        told = call.stream and call.overflow_in_stream and isinstance(error, ContextOverflowError)
        if error is not None and not told:
            raise error
        reply = make(call, model_request.model_name, work)
        if not call.stream:
            return JsonResponse(reply.whole(await until_gone(request, work.gathered())))
        events = _events(preparing, work, reply)
        stack.push_async_callback(events.aclose)
        # The stack is closed once the response has been sent.
        return _EventStream(events, reply.media_type, stack.pop_all(), options.write_timeout_s)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def computed(model_request: ModelRequest, work: Callable[[Model, threading.Event], T]) -> T:
    """Run ``work`` on the model in a thread; its event is set if the client disconnects.

    Such work runs one at a time, since it shares the engine with answers.

    Raises:
        ApiError, LocalrtError: the work failed.
        ClientDisconnect: the client has disconnected.
    """
    cancel = threading.Event()

    async def run() -> T:
        async with model_request.using() as served, served.embedding:
            return await asyncio.to_thread(work, served.model, cancel)

    with model_request.service.admitted():
        try:
            return await until_gone(model_request.http, run())
        finally:
            cancel.set()


async def rendered(
    model_request: ModelRequest,
    call: GenerationRequest,
    work: Callable[[Model, Mapping[str, object]], T],
) -> T:
    """Run ``work`` on the model and the one prompt of ``call`` in a thread; it computes no passes.

    Raises:
        ApiError, LocalrtError: the work failed.
        ClientDisconnect: the client has disconnected.
    """

    async def run() -> T:
        async with (
            model_request.using() as served,
            with_pictures(call.prompts, model_request.service, sees=served.sees) as (given,),
        ):
            return await run_to_end(lambda: work(served.model, given))

    with model_request.service.admitted():
        return await until_gone(model_request.http, run())


async def prompt_tokens(model_request: ModelRequest, call: GenerationRequest) -> int:
    """Count the tokens of the only prompt of ``call``, a conversation, with tools and options."""

    def count(model: Model, arguments: Mapping[str, Any]) -> int:
        return model.count(arguments["prompt"], tools=arguments["tools"], **call.options)

    return await rendered(model_request, call, count)


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``, unless the client disconnects first.

    Raises:
        ClientDisconnect: the client has disconnected, and the work is cancelled.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _client(request: Request) -> Hashable:
    """Return the client of a request: a key and an address."""
    address = request.client.host if request.client else ""
    return request.headers.get("authorization", ""), address


CLASS_HEADER = "x-localrt-class"


def _class_of(model_request: ModelRequest, call: GenerationRequest) -> str:
    """Return the class of a request.

    Raises:
        ApiError: 400, the header names no class.
    """
    name = model_request.http.headers.get(CLASS_HEADER) or call.request_class
    if name not in CLASSES:
        raise invalid(f"{CLASS_HEADER} must be one of {', '.join(CLASSES)}, is {name[:40]!r}")
    return name


# -- the answers of a call -------------------------------------------------------------------------


class _Work(AsyncExitStack):
    """The answers to a call and their model, until the context ends.

    It is also the reply's tokenizer, because the model may still be loading.
    """

    def __init__(self, model_request: ModelRequest, call: GenerationRequest) -> None:
        super().__init__()
        self._model_request, self._service = model_request, model_request.service
        self._call = call
        self._served: ServedModel | None = None
        self._echoes: list[Chunk] = []  # one per prompt that is echoed or only read
        self._answers: list[AsyncAnswer] = []

    def token_bytes(self, token_id: int) -> bytes:
        assert self._served is not None, "its model has written the token"
        spelled: bytes = self._served.model.tokenizer.token_bytes(token_id)
        return spelled

    async def prepare(self, client: Hashable) -> None:
        """Load the model and submit the answers."""
        call, service = self._call, self._service
        request_class = _class_of(self._model_request, call)
        terms: dict[str, Any] = {"client": client, "request_class": request_class}
        served = await self.enter_async_context(self._model_request.using())
        self._served = served
        self.callback(self._end)
        adapting: dict[str, Any] = {}
        if served.model.adapters:
            adapting["adapter"] = self._model_request.model.adapter or "none"
        served.check_biases(call.options.get("logit_bias", ()))
        if call.echo or call.only_reads:
            await self._read(served, adapting.get("adapter"))
        if call.only_reads:
            return
        async with with_pictures(call.prompts, service, sees=served.sees) as prompts:
            for one in replace(call, prompts=prompts).submissions():
                self._answers.append(await served.live.asubmit(**terms, **one, **adapting))
                if service.stopping:  # the server stopped meanwhile
                    self._answers[-1].cancel()
        self._note_loosened()

    async def _read(self, served: ServedModel, adapter: str | None) -> None:
        call, cancel = self._call, threading.Event()
        top = call.options["logprobs"] if call.echo and call.logprobs else None
        read = partial(
            echo_of, served.model, shown=call.echo, top=top, adapter=adapter, cancel=cancel
        )
        end: FinishReason | None = "length" if call.only_reads else None
        try:
            async with served.embedding:
                for one in call.prompts:
                    prompt = one.get("token_ids", one.get("prompt"))
                    echo = replace(await asyncio.to_thread(read, prompt), finish_reason=end)
                    self._echoes += [echo] * call.choices
        finally:
            cancel.set()

    def _note_loosened(self) -> None:
        """Log the keywords of a schema that a grammar cannot enforce."""
        names = ", ".join(next((one.left_out for one in self._answers if one.left_out), ()))
        if names:
            why = "answers cannot be bound by these"
            self._service.note_once(
                f"schema {names}", f"a schema is followed without {names}: {why}"
            )

    def _end(self) -> None:
        for one in self._answers:
            one.cancel()

    async def gathered(self) -> list[Chunk]:
        """Return every answer as one chunk."""
        parts: dict[int, list[Chunk]] = defaultdict(list)
        async with aclosing(self.merged()) as merged:
            async for found in merged:
                if found is not None:
                    parts[found[0]].append(found[1])
        return [joined(parts[index]) for index in sorted(parts)]

    async def merged(self) -> AsyncGenerator[tuple[int, Chunk] | None, None]:
        """Yield (answer number, chunk) for all answers; None after a long silence.

        Raises:
            LocalrtError: an answer has failed or was cancelled.
        """
        for each in enumerate(self._echoes):
            yield each
        waiting = {
            asyncio.ensure_future(anext(one, None)): (index, one)
            for index, one in enumerate(self._answers)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    waiting, timeout=_SILENT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield None
                for task in done:
                    index, one = waiting.pop(task)
                    chunk = task.result()
                    if chunk is None:
                        continue
                    if chunk.finish_reason == "cancelled":
                        why = (
                            "the server is stopping"
                            if self._service.stopping
                            else "it was not read"
                        )
                        raise CancelledError(f"the answer was cut off: {why}")
                    if not self._call.parallel_tools:
                        chunk = replace(chunk, tool_calls=chunk.tool_calls[:1])
                    yield index, chunk
                    if chunk.finish_reason is None:
                        waiting[asyncio.ensure_future(anext(one, None))] = index, one
        finally:
            for task in waiting:
                task.cancel()


# -- streams ---------------------------------------------------------------------------------------


async def _events(
    preparing: asyncio.Task[None], work: _Work, reply: ResponseWriter
) -> AsyncGenerator[bytes, None]:
    try:
        for event in reply.begin():
            yield event
        while not (await asyncio.wait([preparing], timeout=_SILENT_S))[0]:
            yield reply.alive()
        preparing.result()
        held: dict[int, list[Chunk]] = defaultdict(list)
        shown = time.monotonic()
        async with aclosing(work.merged()) as merged:
            async for each in merged:
                if each is not None:
                    index, chunk = each
                    held[index].append(chunk)
                    if chunk.finish_reason is not None or chunk.text:
                        for event in reply.delta(index, joined(held.pop(index))):
                            yield event
                        shown = time.monotonic()
                        continue
                # Nothing has arrived, or only part of a character or a call.
                if each is None or time.monotonic() - shown >= _SILENT_S:
                    yield reply.alive()
                    shown = time.monotonic()
        for event in reply.end():
            yield event
    except BaseException as error:  # a native library's panic too
        if isinstance(error, _ENDS):
            raise
        for event in reply.failed(failure(error)):
            yield event


class _EventStream(StreamingResponse):
    """A stream of events; ``stack`` is always closed at the end."""

    def __init__(
        self, events: AsyncIterator[bytes], kind: str, stack: AsyncExitStack, timeout_s: float
    ) -> None:
        headers = {"X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=kind)
        self._stack = stack
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patiently(message: Any) -> None:
            # Sending blocks once the network's buffers are full.
            async with asyncio.timeout(self._timeout_s or None):
                await send(message)

        try:
            await super().__call__(scope, receive, patiently)
        finally:
            await self._stack.aclose()


# -- prompts that are echoed -----------------------------------------------------------------------


def echo_of(
    model: Model,
    prompt: str | Sequence[int],
    *,
    shown: bool,
    top: int | None,
    adapter: str | None,
    cancel: threading.Event,
) -> Chunk:
    """Return ``prompt`` as a chunk, without text unless ``shown``; with ``top`` alternatives per
    token, or without log-probabilities if it is None.

    Raises:
        LocalrtError: it cannot be read, or is longer than the context.
    """
    ids = model.tokenizer.encode_raw(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise OptionError("the prompt is empty: there is nothing to read")
    text = prompt if isinstance(prompt, str) else model.detokenize(ids, skip_special=False)
    scores = () if top is None else tuple(_scores(model, ids, top, adapter, cancel))
    return Chunk(text if shown else "", (), Metrics(prompt_tokens=len(ids)), logprobs=scores)


def _scores(
    model: Model, ids: Sequence[int], top: int, adapter: str | None, cancel: threading.Event
) -> Iterator[TokenLogprob]:
    """Yield every token's score; the first token has none, since nothing precedes it."""
    spelled = model.tokenizer.token_text
    if ids:
        yield TokenLogprob(ids[0], spelled(ids[0]), nan)
    at = 1
    for rows in model.logits(ids[:-1], adapter=adapter) if len(ids) > 1 else ():  # (n, vocab)
        if cancel.is_set():
            raise CancelledError("the request was cancelled")
        for row, token in zip(rows, ids[at:], strict=False):
            value, best = log_probabilities(row, token, top)
            alternatives = tuple((one, spelled(one), logprob) for one, logprob in best)
            yield TokenLogprob(token, spelled(token), value, alternatives)
        at += len(rows)
