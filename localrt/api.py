"""The library's front: ``load`` a model, then ``stream``, ``generate`` or ``chat``.

Thread-safe and cancellable; no prints, no signal handlers, no global state. Everything below works
the same on every engine.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from localrt.batching import BatchMethods
from localrt.drafts.choice import Drafts
from localrt.drafts.loading import draft_loader, load_beside
from localrt.engine.loop import generate
from localrt.engine.options import Options, read_options
from localrt.engine.pool import SessionPool
from localrt.engine.request import Request
from localrt.engine.types import Chunk, ProgressCallback, TokenLogprob
from localrt.errors import ContextOverflowError, OptionError, TokenizerError
from localrt.loading import LoadedModel, LoadOptions, load_parts
from localrt.settings import Settings

if TYPE_CHECKING:
    from localrt.chat import ChatSession, Message
    from localrt.engine.base import EngineSession, Logits
    from localrt.models.tokenizers import Tokenizer

__all__ = ["Model", "ModelInfo", "in_thread", "joined", "load"]

_Item = TypeVar("_Item")

# Without max_tokens, a trimmed conversation keeps this share of the context free for the answer.
_ANSWER_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What was loaded and how it runs. ``ctx`` is the context in use, in tokens.

    ``notes`` are lines that a user should see: a plain chat format, a shortened context.
    """

    name: str
    path: Path
    architecture: str
    parameters: int
    layers: int
    vocab_size: int
    engine: str
    device: str
    format: str
    weight_bytes: int
    context_length: int
    ctx: int
    has_chat_template: bool
    exactness: str
    notes: tuple[str, ...] = ()


def load(
    model: str | Path = "smollm2",
    *,
    engine: str = "auto",
    format: str | None = None,
    device: str = "auto",
    gpu_memory: str | int | None = None,
    ram: str | int | None = None,
    ctx: int | None = None,
    kv_format: str | None = None,
    draft: str = "auto",
    threads: int | None = None,
    revision: str | None = None,
    offline: bool | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Model:
    """Load a model, downloading it first if need be.

    Args:
        model: a hub id (``org/name``, ``org/name:Q4_K_M``), a folder or .gguf file, or ``smollm2``.
        engine: ``"native"``, ``"llamacpp"``, or ``"auto"``: native where it knows the architecture.
        format: ``"bf16"`` or ``"f32"`` to compute in; None chooses.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        gpu_memory, ram: budgets, such as ``"8GB"``; loading fails early when they cannot hold it.
        ctx: context length in tokens; None takes the model's own, or what fits.
        kv_format: how the KV cache is kept: ``"bf16"``, or ``"int8"``, which takes half the memory
            (CPU kernels only); None is bf16.
        draft: default for speculation: ``"auto"``, ``"off"``, ``"ngram"`` (guesses from text that
            repeats itself) or a model with the same vocabulary that guesses; it is loaded first,
            within the same budgets, and left out where it does not fit.
        threads: CPU threads of the engine; None takes the machine's physical cores.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.
        progress: called with ``Progress`` from the loading thread.
        cancel: set it from another thread to stop with ``CancelledError``.

    Raises:
        LocalrtError: with one line that says what is wrong and what to do.
    """
    from localrt.hub import resolve
    from localrt.offload.budget import parse_size

    options = LoadOptions(
        engine=engine,
        format=format,
        device=device,
        gpu_memory=None if gpu_memory is None else parse_size(gpu_memory),
        ram=None if ram is None else parse_size(ram),
        ctx=ctx,
        kv_format=kv_format,
        threads=threads,
    )
    read_options({"draft": draft})
    settings = Settings.from_environment()
    resolved = resolve(
        str(model),
        settings=settings,
        revision=revision,
        offline=offline,
        progress=progress,
        cancel=cancel,
    )
    with load_beside(
        draft,
        options,
        settings,
        target=resolved.path,
        offline=offline,
        progress=progress,
        cancel=cancel,
    ) as beside:
        parts = beside.target(
            lambda own: load_parts(
                resolved.path, own, settings=settings, progress=progress, cancel=cancel
            )
        )
        drafts = Drafts(parts, draft_loader(options, settings, offline=offline))
        beside.hand_over(drafts)
    return Model(
        resolved.name,
        parts,
        {"draft": draft},
        ram=options.ram,
        gpu_memory=options.gpu_memory,
        drafts=drafts,
    )


class Model(BatchMethods):
    """A loaded model. Use ``localrt.load``; close it, or use it as a context manager."""

    def __init__(
        self,
        name: str,
        parts: LoadedModel,
        defaults: Mapping[str, Any],
        *,
        ram: int | None = None,
        gpu_memory: int | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self._parts = parts
        self._drafts = drafts
        self._ram, self._gpu_memory = ram, gpu_memory
        # Where weights are streamed, an idle cache is memory that they would need.
        keep = 1 if parts.engine.info.streamed else 4
        self._pool = SessionPool(parts.engine, parts.ctx, keep=keep)
        engine = parts.engine.info
        self.name = name
        self.defaults: dict[str, Any] = {**parts.defaults, **defaults}
        self.info = ModelInfo(
            name=name,
            path=parts.path,
            architecture=engine.architecture,
            parameters=engine.parameters,
            layers=engine.layers,
            vocab_size=engine.vocab_size,
            engine=engine.engine,
            device=engine.device,
            format=engine.format,
            weight_bytes=engine.weight_bytes,
            context_length=engine.context_length,
            ctx=parts.ctx,
            has_chat_template=not parts.template.is_plain,
            exactness=engine.exactness,
            notes=parts.notes,
        )

    # -- text ------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: threading.Event | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Generate, one chunk per token; the last carries the finish reason and all metrics.

        A string is one user turn through the chat template, a list of messages a conversation;
        ``raw=True`` takes the string as it is and ``token_ids`` the ids as they are. Options
        (``max_tokens``, ``temperature``, ``seed``, ...) are those of ``Options`` and ``Sampling``.
        Closing the iterator, or setting ``cancel``, stops within one layer's time.
        """
        checked = read_options(self.defaults, options)
        ids = self._prompt_ids(prompt, token_ids, raw, tools, checked)
        if not raw and token_ids is None:
            checked = self._with_template_stops(checked)
        request = self._request(ids, checked, cancel, on_progress)
        return self._leased(self._guessing(request, checked))

    def generate(self, prompt: str | Sequence[Message] | None = None, **options: Any) -> Chunk:
        """Like ``stream``, as one chunk that holds the whole text."""
        return joined(self.stream(prompt, **options))

    def astream(
        self, prompt: str | Sequence[Message] | None = None, **options: Any
    ) -> AsyncIterator[Chunk]:
        """Like ``stream``, for asyncio: the work runs in a thread."""
        cancel = options.pop("cancel", None) or threading.Event()
        return in_thread(lambda: self.stream(prompt, cancel=cancel, **options), cancel.set)

    async def agenerate(
        self, prompt: str | Sequence[Message] | None = None, **options: Any
    ) -> Chunk:
        """Like ``generate``, for asyncio."""
        return joined([chunk async for chunk in self.astream(prompt, **options)])

    def chat(self, system: str | None = None, **options: Any) -> ChatSession:
        """A conversation that keeps its history, and its KV cache from turn to turn."""
        from localrt.chat import ChatSession

        return ChatSession(self, system=system, **options)

    def load_chat(self, path: str | Path) -> ChatSession:
        """A conversation saved with ``ChatSession.save``."""
        from localrt.chat import ChatSession

        return ChatSession.load(self, path)

    # -- tokens ----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            TokenizerError: the model has none; ``token_ids`` still work.
        """
        if self._parts.tokenizer is None:
            raise TokenizerError(self._parts.tokenizer_problem)
        return self._parts.tokenizer

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of plain text."""
        return self.tokenizer.encode(text, add_special=add_special)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(tokens, skip_special=skip_special)

    def count(self, prompt: str | Sequence[Message]) -> int:
        """Tokens of a plain text, or of a conversation as the chat template writes it."""
        if isinstance(prompt, str):
            return len(self.tokenize(prompt))
        return len(self._render(prompt, None))

    def logits(self, token_ids: Sequence[int], *, first: int = 0) -> Iterator[Logits]:
        """Logits after each token from index ``first`` on, for measuring a model.

        Float32 pieces (n, vocab) in order, n at most 64, each the caller's own.

        Raises:
            ContextOverflowError: more tokens than the context holds.
            OptionError: an id outside the vocabulary.
        """
        engine, ctx = self._parts.engine, self.info.ctx
        ids = [int(token) for token in token_ids]
        if len(ids) > ctx:
            raise ContextOverflowError(f"{len(ids)} tokens do not fit a context of {ctx}")
        if ids and not 0 <= min(ids) <= max(ids) < self.info.vocab_size:
            raise OptionError(f"token ids must be from 0 to {self.info.vocab_size - 1}")
        return engine.logits(ids, first=first)

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free weights and caches."""
        self._pool.close()
        if self._drafts is not None:
            self._drafts.close()
        self._parts.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- for ChatSession ------------------------------------------------------------------------

    def new_session(self) -> EngineSession:
        """A session of the model's context length, outside the pool."""
        return self._parts.engine.session(self.info.ctx)

    def stream_on(
        self,
        session: EngineSession,
        messages: Sequence[Message],
        options: Options,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: threading.Event | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> Iterator[Chunk]:
        """Generate the next turn of ``messages`` on a session that the caller owns."""
        ids = self._prompt_ids(messages, None, False, tools, options)
        options = self._with_template_stops(options)
        request = self._guessing(self._request(ids, options, cancel, on_progress), options)
        return generate(session, self._parts.tokenizer, request)

    # -- parts -----------------------------------------------------------------------------------

    def _leased(self, request: Request) -> Iterator[Chunk]:
        with self._pool.lease(request.prompt) as session:
            yield from generate(session, self._parts.tokenizer, request)

    def _guessing(self, request: Request, options: Options) -> Request:
        """The request with what drafts for it."""
        if self._drafts is None:
            return request
        return replace(request, speculation=self._drafts.speculation(options))

    def _with_template_stops(self, options: Options) -> Options:
        """A plain chat format ends an answer by what begins the next turn."""
        stops = self._parts.template.stop_strings
        return replace(options, stop=(*options.stop, *stops)) if stops else options

    def _request(
        self,
        ids: Sequence[int],
        options: Options,
        cancel: threading.Event | None,
        on_progress: ProgressCallback | None,
    ) -> Request:
        stops = options.stop
        if stops and self._parts.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer, and the model has none")
        return Request(
            prompt=ids,
            sampling=options.sampling,
            max_tokens=options.max_tokens,
            stop=stops,
            eos_ids=frozenset() if options.ignore_eos else self._parts.eos_ids,
            logprobs=options.logprobs,
            exactness=self.info.exactness,
            cancel=cancel or threading.Event(),
            on_progress=on_progress,
        )

    def _prompt_ids(
        self,
        prompt: str | Sequence[Message] | None,
        token_ids: Sequence[int] | None,
        raw: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Options,
    ) -> list[int]:
        if (prompt is None) == (token_ids is None):
            raise OptionError("give either a prompt or token_ids")
        if token_ids is not None:
            ids = [int(token) for token in token_ids]
        elif isinstance(prompt, str):
            if not prompt:
                raise OptionError("the prompt is empty: write something to answer")
            if raw:
                ids = self.tokenize(prompt)
            else:
                ids = self._render([{"role": "user", "content": prompt}], tools)
        else:
            assert prompt is not None
            if raw:
                raise OptionError("raw takes a string, not a list of messages")
            if not prompt:
                raise OptionError("the list of messages is empty")
            ids = self._fitted(prompt, tools, options)
        if not ids:
            raise OptionError("the prompt is empty: there is nothing to continue")
        return ids

    def _fitted(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Options,
    ) -> list[int]:
        """The conversation's ids; oldest turns dropped where the options ask for it."""
        ids = self._render(messages, tools)
        if options.overflow == "error":
            return ids
        ctx = self.info.ctx
        room = ctx - min(options.max_tokens or ctx, max(1, ctx // _ANSWER_SHARE))
        head = 1 if messages[0]["role"] == "system" else 0
        start = head
        while len(ids) > room:
            # A turn begins at a user message: tool results and answers go with it.
            start = next(
                (i for i in range(start + 1, len(messages)) if messages[i]["role"] == "user"),
                len(messages),
            )
            if start >= len(messages):
                raise ContextOverflowError(
                    f"the last message alone has {len(ids)} tokens with the system prompt and the "
                    f"context holds {ctx}: shorten it or raise --ctx"
                )
            ids = self._render([*messages[:head], *messages[start:]], tools)
        return ids

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        from localrt.models.chat_template import encode_messages

        return encode_messages(self.tokenizer, self._parts.template, messages, tools=tools)


def joined(chunks: Iterator[Chunk] | Sequence[Chunk]) -> Chunk:
    """One chunk from a whole stream: all text and tokens, the last one's metrics and reason."""
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    last: Chunk | None = None
    for last in chunks:
        texts.append(last.text)
        ids.extend(last.token_ids)
        logprobs.extend(last.logprobs)
    assert last is not None, "a stream ends with a chunk that has a finish reason"
    return replace(last, text="".join(texts), token_ids=tuple(ids), logprobs=tuple(logprobs))


async def in_thread(
    start: Callable[[], Iterator[_Item]], cancel: Callable[[], None]
) -> AsyncIterator[_Item]:
    """Run a stream in threads, one item at a time; leaving the loop cancels the work."""
    import asyncio  # six megabytes, for those who use it

    stream = await asyncio.to_thread(start)
    try:
        while (item := await asyncio.to_thread(next, stream, None)) is not None:
            yield item
    finally:
        cancel()
        # A generator that still runs in its thread cannot be closed: it ends at its next check.
        while not _closed(stream):
            await asyncio.sleep(0.005)


def _closed(stream: Iterator[Any]) -> bool:
    if isinstance(stream, Generator):
        try:
            stream.close()
        except ValueError:
            return False
    return True
