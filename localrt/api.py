"""The library's front: ``load`` a model, then ``stream``, ``generate`` or ``chat``.

Thread-safe and cancellable; no prints, no signal handlers, no global state. Everything below works
the same on every engine.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from localrt.answering.batching import BatchMethods
from localrt.answering.parking import Parking, prompt_cache
from localrt.answering.requests import Requests
from localrt.answering.streams import in_thread, joined
from localrt.answering.watching import Watch
from localrt.closing import Closing
from localrt.drafts.choice import Drafts
from localrt.drafts.loading import draft_loader, load_beside
from localrt.engine.loop import generate
from localrt.engine.options import Options, read_options
from localrt.engine.parking.keeper import KvKeeper, Tier
from localrt.engine.parking.prompt_cache import PromptCache
from localrt.engine.pool import SessionPool
from localrt.engine.request import Request
from localrt.engine.types import Chunk
from localrt.errors import (
    ContextOverflowError,
    OptionError,
)
from localrt.hub.usage import note_use
from localrt.loading.parts import LoadedModel, LoadOptions, load_parts
from localrt.progress import ProgressCallback
from localrt.settings import Settings

if TYPE_CHECKING:
    from localrt.answering.status import Status
    from localrt.chat import ChatSession, Message
    from localrt.engine.protocol import EngineSession, Logits
    from localrt.models.tokenizers import Tokenizer
    from localrt.planning.outlook import Outlook

__all__ = ["Model", "ModelInfo", "load"]


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
            repeats itself), ``"head"`` (the trained head that there is for it, or its folder) or a
            model with the same vocabulary that guesses; it is loaded first, within the same
            budgets, and left out where it does not fit.
        threads: CPU threads of the engine; None takes the machine's physical cores.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.
        progress: called with ``Progress`` from the loading thread.
        cancel: set it from another thread to stop with ``CancelledError``.

    Raises:
        LocalrtError: with one line that says what is wrong and what to do.
    """
    from localrt.formatting import parse_size
    from localrt.hub import resolve

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
    note_use(resolved.name, settings)
    return Model(
        resolved.name,
        parts,
        {"draft": draft},
        ram=options.ram,
        gpu_memory=options.gpu_memory,
        drafts=drafts,
        prompts=prompt_cache(parts, settings),
    )


class Model(BatchMethods, Closing):
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
        prompts: PromptCache | None = None,
    ) -> None:
        self._parts = parts
        self._drafts = drafts
        self._ram, self._gpu_memory = ram, gpu_memory
        self._requests = Requests(parts)
        self._chats: WeakSet[ChatSession] = WeakSet()
        # Where weights are streamed, an idle cache is memory that they would need.
        keep = 1 if parts.engine.info.streamed else 4
        self._pool = SessionPool(parts.engine, parts.ctx, keep=keep)
        self._watch = Watch(parts.engine, ctx=parts.ctx, ram=ram, gpu_memory=gpu_memory)
        self._parking = Parking(parts, prompts, lambda: (self._ram, self._gpu_memory))
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
        request = self._requests.make(
            prompt,
            checked,
            token_ids=token_ids,
            raw=raw,
            tools=tools,
            cancel=cancel,
            on_progress=on_progress,
        )
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

    def chat(
        self,
        system: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ChatSession:
        """A conversation that keeps its history, and its KV cache from turn to turn.

        ``tools`` are functions that the model may ask to be called, in OpenAI's form.
        """
        from localrt.chat import ChatSession

        chat = ChatSession(self, system=system, tools=tools, **options)
        self._chats.add(chat)
        return chat

    def load_chat(self, path: str | Path) -> ChatSession:
        """A conversation saved with ``ChatSession.save``."""
        from localrt.chat import ChatSession

        chat = ChatSession.load(self, path)
        self._chats.add(chat)
        return chat

    # -- tokens ----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            TokenizerError: the model has none; ``token_ids`` still work.
        """
        return self._requests.tokenizer

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
        return len(self._requests.render(prompt))

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

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: str = "auto",
        normalize: bool = True,
        cancel: threading.Event | None = None,
    ) -> Logits:
        """The meaning of each text (or of its token ids) as a vector: float32 (texts, hidden size).

        ``pooling`` joins the hidden states of a text's tokens: ``"mean"``, ``"last"``, or
        ``"auto"``: what an embedding model's own files say, else the mean. With ``normalize`` each
        vector has length 1, so that the product of two is their cosine. Texts share passes.

        Raises:
            OptionError: an empty text, an unknown pooling, an id outside the vocabulary.
            ContextOverflowError: a text is longer than the context.
            CancelledError: ``cancel`` was set.
        """
        from localrt.answering.embedding import embed

        return embed(self, texts, pooling=pooling, normalize=normalize, cancel=cancel)

    # -- what it is doing ------------------------------------------------------------------------

    def status(self, *, lanes: bool | None = None) -> Status:
        """Memory against budgets, what was read and computed so far, the generation in progress.

        Takes well under a millisecond and waits for no pass. With ``lanes`` a streamed model also
        remembers what the disk, the link and the processors did in its last pass, from that call on
        until one with False.
        """
        return self._watch.status(lanes=lanes)

    def advise(self) -> Outlook:
        """The most that decoding can reach here, and which changes would help most.

        From the plan that the model was placed by, or a new one; measures nothing and may take a
        second: call it from a thread, while nothing is generated.
        """
        from localrt.planning.outlook import outlook

        found = outlook(self._parts, ram=self._ram, gpu_memory=self._gpu_memory)
        self._watch.token_bytes = found.token_bytes
        self._watch.ceiling_tok_s = found.ceiling_tok_s
        return found

    # -- life ------------------------------------------------------------------------------------

    def set_budget(
        self, *, ram: str | int | None = None, gpu_memory: str | int | None = None
    ) -> None:
        """Change the budgets of ``load`` while the model is there, even while it answers.

        With less, weights that were in memory are read for every token from the next pass on:
        answers stay the same, slower, and ``Metrics.memory`` says why. With more RAM than before,
        weights stay in memory as they pass. A card takes back nothing that it has given.

        Raises:
            OptionError: not a size.
            MemoryBudgetError: it cannot be done, since the model was loaded whole, or not even
                streaming makes enough room; nothing changes then.
        """
        from localrt.answering.set_budget import change_gpu_memory, change_ram
        from localrt.formatting import parse_size

        sizes = [None if size is None else parse_size(size) for size in (ram, gpu_memory)]
        engine = self._parts.engine
        if sizes[0] is not None:
            change_ram(engine, sizes[0], free=self._pool.free)
            self._ram = self._watch.ram = sizes[0]
        if sizes[1] is not None:
            change_gpu_memory(engine, sizes[1])
            self._gpu_memory = self._watch.gpu_memory = sizes[1]

    def unload(self) -> None:
        """``close``, and give all memory back to the system, conversations' caches included.

        Answers that are on their way end as cancelled. Takes a tenth of a second.
        """
        import gc

        from localrt.models.tokenizers.free_memory import return_free_memory

        for chat in list(self._chats):
            chat.let_go()
        self.close()
        gone = "the model is closed: load it again"
        self._parts = replace(self._parts, tokenizer=None, tokenizer_problem=gone)
        self._drafts, self._requests = None, Requests(self._parts)
        gc.collect()
        return_free_memory()

    def close(self) -> None:
        """Free weights and caches; running batches (``live``) end."""
        self._close_lives()
        self._parking.close()
        self._pool.close()
        if self._drafts is not None:
            self._drafts.close()
        self._parts.engine.close()

    # -- for ChatSession ------------------------------------------------------------------------

    def new_session(self) -> EngineSession:
        """A session of the model's context length, outside the pool."""
        return self._watch.holds(self._parts.engine.session(self.info.ctx))

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
        request = self._requests.make(
            messages, options, tools=tools, cancel=cancel, on_progress=on_progress
        )
        request = replace(self._guessing(request, options), restore=self._parking.restore)
        return self._watch.over(generate(session, self._parts.tokenizer, request))

    @property
    def keeper(self) -> KvKeeper:
        """Who looks after the caches of conversations that wait."""
        return self._parking.keeper

    def keep(self, session: EngineSession | None, to: Tier) -> int:
        """Save a session's KV cache: see ``Parking.save``."""
        return self._parking.save(session, to)

    # -- parts -----------------------------------------------------------------------------------

    def _leased(self, request: Request) -> Iterator[Chunk]:
        with self._pool.lease(request.prompt) as session:
            self._watch.holds(session)
            yield from self._watch.over(generate(session, self._parts.tokenizer, request))

    def _guessing(self, request: Request, options: Options) -> Request:
        """The request with what drafts for it."""
        if self._drafts is None:
            return request
        return replace(request, speculation=self._drafts.speculation(options))
