"""The library's front: ``load`` a model, then ``stream``, ``generate`` or ``chat``.

Thread-safe and cancellable; no prints, no signal handlers, no global state. Everything below works
the same on every engine; ``localrt.service.core`` does the work.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from localrt.chat import ChatSession
from localrt.chat_format.pictures import with_pictures
from localrt.common.closing import Closing
from localrt.common.errors import ContextOverflowError, LocalrtError, OptionError, known_arguments
from localrt.common.forks import Answering
from localrt.common.formatting import format_bytes, parse_size
from localrt.common.option_names import option
from localrt.common.progress import ProgressCallback
from localrt.engine.batch.chunked_prefill import PassTurns
from localrt.engine.batch.live import LiveLimits
from localrt.engine.options import BatchOptions, GenerateOptions, PromptOptions, read_options
from localrt.engine.protocol import Logits, check_ids
from localrt.engine.types import Answer, Chunk, Message, Tools
from localrt.loading.context import LoadContext
from localrt.loading.load import check_embeds
from localrt.loading.options import LoadOptions
from localrt.models.tokenizers.base import Tokenizer
from localrt.models.weight_store import GpuUse
from localrt.service.arguments import (
    check_call,
    check_flag,
    check_model,
    check_path,
    check_text,
    in_thread,
    joined,
)
from localrt.service.batching import Errors, Prompts, gathered, stream_batch
from localrt.service.core import Core, open_core
from localrt.service.embedding import embed, rank
from localrt.service.live import LiveModel
from localrt.service.requests import whole_ids
from localrt.service.status import ModelInfo, Status

if TYPE_CHECKING:  # it loads the planner
    from localrt.planning.recommend import Outlook

__all__ = ["Model", "ModelInfo", "embedder", "load"]


@known_arguments
def load(
    model: str | Path = "smollm2",
    *,
    adapters: Mapping[str, str | Path] | None = None,
    engine: str = "auto",
    format: str | None = None,
    device: str = "auto",
    gpu_memory: str | int | None = None,
    ram: str | int | None = None,
    ctx: int | None = None,
    kv_format: str | None = None,
    activations: str | None = None,
    chat_template: str | Path | None = None,
    pre_tokenizer: str | None = None,
    draft: str = "auto",
    threads: int | None = None,
    shrinkable: bool = False,
    gentle: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Model:
    """Load a model, downloading it first if need be.

    Args:
        model: a hub id (``org/name``, ``org/name:Q4_K_M``), a folder or .gguf file, or ``smollm2``.
        adapters: LoRA adapters by name, as in ``adapter=`` of a request:
            folders of PEFT, ``.gguf`` files, or hub ids.
        engine: ``"native"``, ``"llamacpp"``, or ``"auto"``: native where it knows the architecture,
            else llamacpp for a GGUF file.
        format: None keeps weights as they were published: quantized ones stay so. ``"bf16"`` or
            ``"f32"`` unpacks them and computes in that format, for measuring; it takes more memory.
            (``localrt quantize`` packs a model anew.)
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``, or ``"auto"``: the GPU if there is one.
        gpu_memory, ram: the most that may be used, in bytes or as ``"8GB"``; None takes what is
            free. ``ram`` is for the whole process. A model that does not fit is streamed: weights
            are read again for every token. Loading fails where not even that fits.
        ctx: context length in tokens; None takes the model's own, or as much as fits.
        kv_format: how keys and values are kept: ``"bf16"``, ``"int8"`` (half of its memory) or
            ``"int4"`` (about a third); None is bf16. int8 and int4 need the compiled CPU
            kernels, or a GPU that they run on.
        activations: what weights are multiplied with on a GPU that our kernels run on:
            ``"int8"``, 32 of them with a scale, as on the CPU (None is the same), or ``"bf16"``,
            which keeps bf16 precision and takes more time in passes of many rows.
        chat_template: a file with the Jinja2 template to chat with, for a model that brings none
            or a wrong one. It also determines the syntax of tool calls and thinking.
        pre_tokenizer: how a GGUF file's tokenizer cuts text into words, by llama.cpp's name
            (``"qwen2"``), for a file that names none or a wrong one; loading says so in a note.
        draft: what drafts tokens: ``"auto"``, ``"off"``, ``"ngram"`` (text that repeats itself)
            or a smaller model of the same vocabulary, which is loaded first, within the same
            budgets, and left out where it does not fit. ``"mtp"`` is the block for it in the
            model's own files; a path may be that of a draft head (EAGLE-3, DFlash, Gemma 4's
            assistants). ``"MODEL+ngram"`` is both. Every request may choose again.
        threads: CPU threads of the engine; None takes one for each performance core.
        shrinkable: a model that fits whole can leave its memory, or its GPU's, to others later
            (``Model.leave_ram``, ``set_budget``). It is packed once, like a streamed model.
        gentle: passes compute only while no other program wants the cores (on the CPU, with the
            native engine): a video beside it plays on, and answers take longer meanwhile.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.
        progress: called with ``Progress`` from the loading thread; one of the stage ``"note"`` says
            what will be downloaded or written to the disk, before it is.
        cancel: set it from another thread to stop with ``CancelledError``.

    Raises:
        LocalrtError: with one line that says what is wrong and what to do.
    """
    check_model(model, adapters)
    check_call(cancel=cancel, on_progress=progress, name="progress")
    check_text(option("draft"), draft)
    if offline is not None:
        check_flag(option("offline"), offline)
    if chat_template is not None:
        check_path(option("chat_template"), chat_template)
    options = LoadOptions(
        model=str(model),
        revision=revision,
        adapters={name: str(path) for name, path in (adapters or {}).items()},
        draft=draft,
        engine=engine,
        format=format,
        device=device,
        gpu_memory=None if gpu_memory is None else parse_size(gpu_memory, option("gpu_memory")),
        ram=None if ram is None else parse_size(ram, option("ram")),
        ctx=ctx,
        kv_format=kv_format,
        activations=activations,
        chat_template=None if chat_template is None else Path(chat_template),
        pre_tokenizer=pre_tokenizer,
        threads=threads,
        shrinkable=shrinkable,
        gentle=gentle,
    )
    context = LoadContext(offline=offline, progress=progress, cancel=cancel)
    return Model(open_core(options, context))


def embedder(
    model: str | Path, *, progress: ProgressCallback | None = None, **options: Any
) -> Callable[[], Model]:
    """Find an embedding model, and return what opens it on the CPU when a chat has to search files:
    ``chat(embedder=localrt.embedder("BAAI/bge-m3"))``. ``options`` are ``ram`` and ``offline`` of
    ``load``.

    Raises:
        OptionError: it is no embedding model.
        HubError: there is no model of this name, or it cannot be downloaded.
    """
    check_model(model, None)
    context = LoadContext(offline=options.get("offline"), progress=progress)
    path = context.resolve(str(model)).path.absolute()  # vectors are kept by it
    check_embeds(path)
    return partial(load, path, device="cpu", draft="off", **options)


class Model(Closing):
    """A loaded model. Use ``localrt.load``; close it, or use it as a context manager.

    ``defaults`` are the options of requests that do not set them.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._batches: list[LiveModel] = []
        self._closed = False
        self.name = core.name
        self.info = core.info
        self.defaults = core.defaults

    def __repr__(self) -> str:
        """Name the model, and say where it runs."""
        if self._closed:
            return f"<localrt.Model {self.name!r}: closed>"
        info = self.info
        size = f"{format_bytes(info.weight_bytes)}{', streamed' if info.streamed else ''}"
        where = f"on {info.device} ({info.engine})"
        return f"<localrt.Model {self.name!r}: {info.format}, {size}, ctx {info.ctx}, {where}>"

    # -- text ------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        images: Sequence[Any] = (),
        raw: bool = False,
        suffix: str | None = None,
        files: Sequence[tuple[str, str]] = (),
        tools: Tools | None = None,
        cancel: threading.Event | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Chunk]:
        """Generate, one chunk per token; the last carries the finish reason and all metrics.

        Args:
            prompt: a string is one user turn through the chat template, a list of messages a
                conversation.
            token_ids: the prompt's ids as they are, instead of ``prompt``.
            images: pictures for a prompt that is a string: paths, bytes or PIL images. In messages
                they are parts of a content, ``{"type": "image", "image": ...}``.
            raw: take the string as it is, without the template.
            suffix: the text after the gap, with ``prompt`` as the text before it, both without the
                template: a model that was trained for it fills in the middle.
            files: with ``suffix``, names and texts of the same project, the most important one
                last; ``overflow="drop_oldest"`` leaves out what does not fit.
            tools: functions that the model may ask to be called: Python's, with types and a
                docstring, or described in OpenAI's form; what it asks for is in the last chunk's
                ``tool_calls``.
            cancel: set it from another thread to stop within one layer's time, with finish reason
                ``"cancelled"``. So does closing the iterator.
            on_progress: called with ``Progress`` while the prompt is computed.
            options: those of ``Options`` and ``Sampling``: ``max_tokens``, ``temperature``,
                ``top_k``, ``top_p``, ``seed``, ``stop``, ``logprobs``, ``json_schema``,
                ``tool_choice``, ``draft``, ``adapter`` and others. One that is None or left out has
                its value in ``defaults``, or its own.

        Raises:
            OptionError: an unknown option or an impossible value, no prompt, or a suffix for a
                model that fills in nothing.
            ContextOverflowError: the prompt leaves no room for one token.
            TokenizerError: the model has no tokenizer, and not only ``token_ids`` are given.
            LocalrtError: what else goes wrong, when it does.
        """
        if images:
            if raw or not isinstance(prompt, str):
                raise OptionError("images go with a prompt that is a string and not raw")
            prompt = [{"role": "user", "content": with_pictures(prompt, images)}]
        request = self._core.requests.make(
            prompt,
            token_ids=token_ids,
            raw=raw,
            suffix=suffix,
            files=files,
            tools=tools,
            cancel=cancel,
            on_progress=on_progress,
            **options,
        )
        return Answering(self._core.stream(request))

    def generate(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[PromptOptions]
    ) -> Answer:
        """Like ``stream``, but return the whole answer."""
        return self._joined(self.stream(prompt, **options), options)

    def astream(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[PromptOptions]
    ) -> AsyncIterator[Chunk]:
        """Like ``stream``, for asyncio: the work runs in a thread."""
        options["cancel"] = cancel = options.get("cancel") or threading.Event()
        return in_thread(lambda: self.stream(prompt, **options), cancel.set)

    async def agenerate(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[PromptOptions]
    ) -> Answer:
        """Like ``generate``, for asyncio."""
        return self._joined([each async for each in self.astream(prompt, **options)], options)

    def _joined(self, chunks: Iterable[Chunk], options: Mapping[str, Any]) -> Answer:
        return joined(chunks, options.get("json_schema", self.defaults.get("json_schema")))

    def chat(
        self,
        system: str | None = None,
        *,
        tools: Tools | None = None,
        embedder: Callable[[], Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> ChatSession:
        """Start a conversation that keeps its history, and its KV cache from turn to turn.

        ``tools`` are functions that the model may call, as in ``stream``. With ``embedder``
        (``localrt.embedder``), long files are searched by meaning too.
        """
        self._check_open()
        return ChatSession(self._core, system=system, tools=tools, embedder=embedder, **options)

    def load_chat(self, path: str | Path) -> ChatSession:
        """Load a conversation saved with ``ChatSession.save``."""
        check_path("path", path)
        return ChatSession.load(self._core, path)

    # -- many at a time --------------------------------------------------------------------------

    def stream_batch(
        self,
        prompts: Prompts | None = None,
        *,
        token_ids: Sequence[Sequence[int]] | None = None,
        raw: bool = False,
        tools: Tools | None = None,
        batch_size: int | None = None,
        errors: Errors = "raise",
        cancel: threading.Event | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[tuple[int, Chunk]]:
        """Generate for many prompts; yields ``(index of the prompt, chunk)`` as chunks come.

        Each prompt is what ``stream`` takes, and gets the same chunks as from ``stream`` (bit for
        bit on the CPU kernels), with ``seed + index`` as its seed if a seed is given. The prompts
        share passes, with speculation where it pays: up to ``batch_size`` at a time, by default up
        to 64, as many as memory holds KV caches for; ``max_tokens`` bounds their size. The next one
        joins as soon as one has finished.

        With ``errors="raise"`` a prompt that cannot be run (longer than the context) raises before
        any work; with ``"return"`` its last chunk has the ``error``, and the others run. A failure
        that stops all raises in either case. ``cancel`` ends every prompt with finish reason
        ``"cancelled"``; ``on_progress`` counts finished prompts after each pass.
        """
        stream = stream_batch(
            self._core,
            prompts,
            options,
            token_ids=token_ids,
            raw=raw,
            tools=tools,
            batch_size=batch_size,
            errors=errors,
            cancel=cancel,
            on_progress=on_progress,
        )
        return Answering(stream)

    def generate_batch(
        self, prompts: Prompts | None = None, **options: Unpack[BatchOptions]
    ) -> list[Answer]:
        """Like ``stream_batch``, but return the whole answer to each prompt, in order."""
        return gathered(self.stream_batch(prompts, **options), options.get("json_schema"))

    def astream_batch(
        self, prompts: Prompts | None = None, **options: Unpack[BatchOptions]
    ) -> AsyncIterator[tuple[int, Chunk]]:
        """Like ``stream_batch``, for asyncio: the work runs in a thread."""
        options["cancel"] = cancel = options.get("cancel") or threading.Event()
        return in_thread(lambda: self.stream_batch(prompts, **options), cancel.set)

    async def agenerate_batch(
        self, prompts: Prompts | None = None, **options: Unpack[BatchOptions]
    ) -> list[Answer]:
        """Like ``generate_batch``, for asyncio."""
        items = [item async for item in self.astream_batch(prompts, **options)]
        return gathered(items, options.get("json_schema"))

    def live(
        self,
        *,
        most: int = 64,
        buffer: int = 256,
        patience_s: float = 60.0,
        reserve_ram: str | int | None = None,
        turns: PassTurns | None = None,
    ) -> LiveModel:
        """Open a batch that requests of many threads or tasks can join and leave.

            with model.live() as live:
                for chunk in live.stream("Why is the sky blue?"):  # from any thread
                    print(chunk.text, end="")

        Running answers share each pass over the weights, up to ``most`` of them, fewer if memory is
        short, with draft tokens that pay. Each gets the same text as from ``stream`` (bit for bit
        on the CPU kernels). A request's ``client=`` identifies its sender: clients take turns. An
        answer pauses while its reader is ``buffer`` chunks behind, and is cancelled if that lasts
        ``patience_s``. An engine that cannot share passes runs one answer after another. If weights
        are streamed, ``reserve_ram`` bytes of the budget are left to the program meanwhile. Batches
        of several models that share ``turns`` compute one pass after another.
        """
        self._check_open()
        limits = LiveLimits(ctx=self.info.ctx, most=most, buffer=buffer, patience_s=patience_s)
        reserved = 0 if reserve_ram is None else parse_size(reserve_ram, option("reserve_ram"))
        live = LiveModel(self._core, limits, reserve_ram=reserved, turns=turns)
        self._batches = [*(other for other in self._batches if not other.closed), live]
        return live

    # -- tokens ----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            TokenizerError: the model has none; ``token_ids`` still work.
        """
        return self._core.requests.tokenizer

    def tokenize(
        self,
        text: str | Sequence[Message],
        *,
        add_special: bool = True,
        tools: Tools | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[int]:
        """Return the token ids of plain text, or of a conversation rendered by the chat template.

        With the ``tools`` and ``options`` of ``stream``, they are the ids that it would read.
        """
        if isinstance(text, str):
            return self.tokenizer.encode(text, add_special=add_special)
        self._core.requests.check_messages(text)
        chosen = read_options(self.defaults, options)
        tools = None if chosen.tool_choice == "none" else tools
        return self._core.requests.render(text, tools, options=chosen)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids.

        Raises:
            OptionError: an id outside the vocabulary.
        """
        ids = whole_ids(tokens, "tokens")
        check_ids(ids, self.info.vocab_size)
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def count(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Tools | None = None,
        **options: Unpack[GenerateOptions],
    ) -> int:
        """Count the tokens of plain text, or of a conversation rendered by the chat template.

        With the ``tools`` and ``options`` of ``stream``, it counts what that would read.
        """
        return len(self.tokenize(prompt, tools=tools, **options))

    def logits(
        self,
        token_ids: Sequence[int],
        *,
        first: int = 0,
        adapter: str | Mapping[str, float] | None = None,
    ) -> Iterator[Logits]:
        """Yield logits after each token from index ``first`` on, for measuring a model.

        Float32 pieces (n, vocab) in order, n at most 64, each the caller's own.

        Raises:
            ContextOverflowError: more tokens than the context holds.
            OptionError: an id outside the vocabulary.
        """
        core, ids = self._core, whole_ids(token_ids, "token_ids")
        if len(ids) > core.ctx:
            raise ContextOverflowError(
                f"{len(ids)} tokens do not fit a context of {core.ctx}",
                tokens=len(ids),
                ctx=core.ctx,
            )
        check_ids(ids, self.info.vocab_size)
        chosen = adapter if adapter is not None else self.defaults.get("adapter")
        return Answering(core.engine.logits(ids, first=first, mix=core.adapters.mix(chosen)))

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: str = "auto",
        normalize: bool = True,
        cancel: threading.Event | None = None,
    ) -> Logits:
        """Return the meaning of each text (or its token ids) as a float32 vector: (texts, hidden
        size).

        ``pooling`` joins the hidden states of a text's tokens: ``"mean"``, ``"last"``, ``"cls"``
        (the first), or ``"auto"``, which takes what an embedding model's files say, else the mean.
        With ``normalize`` each vector has length 1, so that the dot product of two is their cosine.
        Texts share passes.

        Raises:
            OptionError: an empty text, an unknown pooling, an id outside the vocabulary.
            ContextOverflowError: a text is longer than the context.
            CancelledError: ``cancel`` was set.
        """
        return embed(self._core, texts, pooling=pooling, normalize=normalize, cancel=cancel)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        cancel: threading.Event | None = None,
    ) -> list[float]:
        """Return for each document, from 0 to 1, how well it answers the query.

        A cross-encoder reads each document together with the query. A reranker that writes, such as
        Qwen3-Reranker, reads an ``instruction``, too; the score is the probability that it answers
        "yes" and not "no".

        Raises:
            OptionError: the model is no reranker.
            ContextOverflowError: a document is too long.
            CancelledError: ``cancel`` was set.
        """
        return self.rank_counted(query, documents, instruction=instruction, cancel=cancel)[0]

    def rank_counted(self, *asked: Any, **options: Any) -> tuple[list[float], int]:
        """Return what ``rank`` does, and the number of tokens read."""
        return rank(self._core, *asked, **options)

    # -- adapters --------------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests can use."""
        return self._core.adapters.names

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Make the LoRA adapter at ``path`` available as ``name``, from the next request on.

        It is a folder of PEFT (LoRA, rsLoRA, DoRA), a ``.gguf`` file, or a hub id. The
        model's weights are not read again; answers with different adapters share passes.

        Raises:
            OptionError: the name is taken.
            ModelNotFoundError, CheckpointError, UnsupportedModelError: there is none, it is
                damaged, of another model, or of a kind that is not read.
            MemoryBudgetError: there is no room for it with those in use.
        """
        self._check_open()
        check_text("name", name)
        check_path("path", path)
        self._core.add_adapter(name, str(path))

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Running answers that use it end with an error.

        Raises:
            OptionError: no adapter has that name.
        """
        self._core.adapters.remove(name)

    # -- what it is doing ------------------------------------------------------------------------

    def status(self, *, lanes: bool | None = None) -> Status:
        """Return memory use and budgets, counts so far, and the generation in progress.

        Takes well under a millisecond and waits for no pass. With ``lanes`` a streamed model also
        records what the disk, the link and the processors did in its last pass, until a call with
        ``lanes=False``.
        """
        return self._core.watch.status(lanes=lanes)

    def advise(self) -> Outlook:
        """Return the highest decoding speed possible here, and the changes that would help most.

        It uses the plan that placed the model, or a new one; it measures nothing but may take a
        second: call it from a thread, while nothing is generated.
        """
        return self._core.advise()

    # -- budgets and closing ---------------------------------------------------------------------

    def set_budget(
        self, *, ram: str | int | None = None, gpu_memory: str | int | None = None
    ) -> None:
        """Change the budgets of ``load`` on a loaded model, even while it answers.

        With less memory, some weights are read again for every token, from the next pass on:
        answers stay the same but slow down, and ``Metrics.memory`` says why. With more RAM, weights
        stay in memory once they are read. What leaves a GPU goes to RAM, if there is room, and
        comes back with a larger budget, up to that of ``load``.

        Raises:
            OptionError: not a size.
            MemoryBudgetError: it cannot be done, since the model was loaded whole, or not even
                streaming makes enough room; nothing changes then.
        """
        self._core.engine.set_budget(
            ram=None if ram is None else parse_size(ram, option("ram")),
            gpu_memory=None if gpu_memory is None else parse_size(gpu_memory, option("gpu_memory")),
            free=self._core.free_idle,
        )

    @property
    def spare_ram(self) -> int:
        """The bytes of its RAM budget that a streamed model does not use yet; 0 for others."""
        return self._core.engine.weights.memory.spare

    @property
    def weights_in_ram(self) -> int:
        """The bytes of RAM that the weights take now."""
        if self._closed:
            return 0
        memory = self._core.engine.weights.memory
        on_gpu = self.info.device.startswith("cuda") and not memory.streams
        return memory.ram_nbytes if memory.streams else 0 if on_gpu else self.info.weight_bytes

    @property
    def gpu_use(self) -> GpuUse | None:
        """What the model takes of a GPU's memory; None without a GPU, or once it is closed."""
        return None if self._closed else self._core.engine.gpu_use

    def leave_ram(self, nbytes: int) -> int:
        """Leave ``nbytes`` of RAM, or as much as possible, to something else in this process; below
        zero takes them back. Return the bytes left.

        The unused part of the budget goes first, then weights, which are read again in each pass
        until there is room for them. A model loaded whole leaves nothing: see ``shrinkable`` of
        ``load``.
        """
        if not isinstance(nbytes, int):
            raise OptionError(f"nbytes must be an integer, is {nbytes!r:.80}")
        return self._core.leave_ram(nbytes)

    def unload(self) -> None:
        """Close, and give all memory back to the system, conversations' caches included.

        Running answers end as cancelled. Takes a tenth of a second.
        """
        if self._core.is_here:
            self._end_batches()
            self._core.unload()

    def close(self) -> None:
        """Free weights and caches; running batches (``live``) end."""
        if self._core.is_here:
            self._end_batches()
            self._core.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LocalrtError("the model is closed: load it again")

    def _end_batches(self) -> None:
        self._closed = True
        batches, self._batches = self._batches, []
        for live in batches:
            live.close()
