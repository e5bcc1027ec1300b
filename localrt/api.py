"""The library's front: ``load`` a model, then ``stream``, ``generate`` or ``chat``.

Thread-safe and cancellable; no prints, no signal handlers, no global state. Everything below works
the same on every engine; what does the work is ``localrt.service.core``.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.chat import ChatSession
from localrt.common.closing import Closing
from localrt.common.errors import ContextOverflowError, LocalrtError, OptionError, known_arguments
from localrt.common.formatting import format_bytes, parse_size
from localrt.common.option_names import option
from localrt.common.progress import ProgressCallback
from localrt.engine.batch.live import LiveLimits
from localrt.engine.options import read_options
from localrt.engine.protocol import Logits, check_ids
from localrt.engine.types import Chunk, Message
from localrt.loading.options import LoadOptions
from localrt.models.tokenizers.base import Tokenizer
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
from localrt.service.embedding import embed
from localrt.service.live import LiveModel
from localrt.service.requests import whole_ids
from localrt.service.status import ModelInfo, Status

if TYPE_CHECKING:  # it brings the planner
    from localrt.planning.preview import Outlook

__all__ = ["Model", "ModelInfo", "load"]


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
    revision: str | None = None,
    offline: bool | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Model:
    """Load a model, downloading it first if need be.

    Args:
        model: a hub id (``org/name``, ``org/name:Q4_K_M``), a folder or .gguf file, or ``smollm2``.
        adapters: LoRA adapters by the names that ``adapter=`` of a request has for them:
            folders of PEFT or mlx-lm, ``.gguf`` files, or hub ids.
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
            or a wrong one. How tools are called and thinking is written follows from it.
        pre_tokenizer: how a GGUF file's tokenizer cuts text into words, by llama.cpp's name
            (``"qwen2"``), for a file that names none or a wrong one; loading says so in a note.
        draft: what drafts tokens: ``"auto"``, ``"off"``, ``"ngram"`` (text that repeats itself)
            or a smaller model, best of the same vocabulary, which is loaded first, within the same
            budgets, and left out where it does not fit. ``"MODEL+ngram"`` is both. Every request
            may choose again.
        threads: CPU threads of the engine; None takes the machine's physical cores.
        shrinkable: on the CPU, a model that fits whole can leave its memory to others later
            (``Model.leave_ram``, ``set_budget``). It is packed once, as one that is streamed.
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
    if offline is not None:
        check_flag(option("offline"), offline)
    if chat_template is not None:
        check_path(option("chat_template"), chat_template)
    options = LoadOptions(
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
    )
    return Model(
        open_core(
            str(model),
            options,
            adapters={name: str(path) for name, path in (adapters or {}).items()},
            draft=draft,
            revision=revision,
            offline=offline,
            progress=progress,
            cancel=cancel,
        )
    )


class Model(Closing):
    """A loaded model. Use ``localrt.load``; close it, or use it as a context manager.

    ``defaults`` are the options of requests that say nothing else.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._batches: list[LiveModel] = []
        self._closed = False
        self.name = core.name
        self.info = core.info
        self.defaults = core.defaults

    def __repr__(self) -> str:
        """What it is, and where it runs."""
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
        raw: bool = False,
        suffix: str | None = None,
        files: Sequence[tuple[str, str]] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: threading.Event | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Generate, one chunk per token; the last carries the finish reason and all metrics.

        Args:
            prompt: a string is one user turn through the chat template, a list of messages a
                conversation.
            token_ids: the prompt's ids as they are, instead of ``prompt``.
            raw: take the string as it is, without the template.
            suffix: the text after the gap, with ``prompt`` as the text before it, both without the
                template: a model that was trained for it fills in the middle.
            files: with ``suffix``, names and texts of the same project, the most important one
                last; ``overflow="drop_oldest"`` leaves out what does not fit.
            tools: functions that the model may ask to be called, in OpenAI's form; what it asks
                for is in the last chunk's ``tool_calls``.
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
        return self._core.stream(request)

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
        self._check_open()
        return ChatSession(self._core, system=system, tools=tools, **options)

    def load_chat(self, path: str | Path) -> ChatSession:
        """A conversation saved with ``ChatSession.save``."""
        check_path("path", path)
        return ChatSession.load(self._core, path)

    # -- many at a time --------------------------------------------------------------------------

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
    ) -> Iterator[tuple[int, Chunk]]:
        """Generate for many prompts; yields ``(index of the prompt, chunk)`` as chunks come.

        Each prompt is what ``stream`` takes, and its chunks are those that ``stream`` would yield
        (bit for bit on the CPU kernels), with ``seed + index`` as its seed where one is given. The
        prompts share passes, with speculation where it pays: up to ``batch_size`` at a time,
        by default as many of 64 as memory holds KV caches for, which ``max_tokens`` bounds; others
        join as soon as one has finished.

        With ``errors="raise"`` a prompt that cannot be run (longer than the context) raises before
        any work; with ``"return"`` its last chunk has the ``error``, and the others run. A failure
        that stops all raises in either case. ``cancel`` ends every prompt with finish reason
        ``"cancelled"``; ``on_progress`` counts finished prompts after each pass.
        """
        return stream_batch(
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

    def generate_batch(self, prompts: Prompts | None = None, **options: Any) -> list[Chunk]:
        """Like ``stream_batch``: one chunk with the whole text for each prompt, in their order."""
        return gathered(self.stream_batch(prompts, **options))

    def astream_batch(
        self, prompts: Prompts | None = None, **options: Any
    ) -> AsyncIterator[tuple[int, Chunk]]:
        """Like ``stream_batch``, for asyncio: the work runs in a thread."""
        cancel = options.pop("cancel", None) or threading.Event()
        return in_thread(lambda: self.stream_batch(prompts, cancel=cancel, **options), cancel.set)

    async def agenerate_batch(self, prompts: Prompts | None = None, **options: Any) -> list[Chunk]:
        """Like ``generate_batch``, for asyncio."""
        return gathered([item async for item in self.astream_batch(prompts, **options)])

    def live(
        self,
        *,
        most: int = 64,
        buffer: int = 256,
        patience_s: float = 60.0,
        reserve_ram: str | int | None = None,
    ) -> LiveModel:
        """A batch that stays open: requests of many threads or tasks join it and leave it.

            with model.live() as live:
                for chunk in live.stream("Why is the sky blue?"):  # from any thread
                    print(chunk.text, end="")

        All answers that are on their way share each pass over the weights, up to ``most`` of them,
        fewer where memory is short, and draft tokens that pay. What each says is what
        ``stream`` would yield (bit for bit on the CPU kernels). ``client=`` of a request says whose
        it is: clients take turns. An answer pauses while its reader is ``buffer`` chunks behind,
        and is cancelled when that lasts ``patience_s``. An engine that cannot join sequences runs
        one after another. ``reserve_ram`` bytes of the budget are left to the program meanwhile,
        where weights are streamed.
        """
        self._check_open()
        limits = LiveLimits(ctx=self.info.ctx, most=most, buffer=buffer, patience_s=patience_s)
        reserved = 0 if reserve_ram is None else parse_size(reserve_ram, option("reserve_ram"))
        live = LiveModel(self._core, limits, reserve_ram=reserved)
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
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of plain text, or of a conversation as the chat template writes it.

        With the ``tools`` and ``options`` of ``stream``, exactly those that it would read.
        """
        if isinstance(text, str):
            return self.tokenizer.encode(text, add_special=add_special)
        self._core.requests.check_messages(text)
        chosen = read_options(self.defaults, options)
        tools = None if chosen.tool_choice == "none" else tools
        return self._core.requests.render(text, tools, options=chosen)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids.

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> int:
        """Tokens of a plain text, or of a conversation as the chat template writes it.

        With the ``tools`` and ``options`` of ``stream``, exactly those that it would read.
        """
        return len(self.tokenize(prompt, tools=tools, **options))

    def logits(
        self,
        token_ids: Sequence[int],
        *,
        first: int = 0,
        adapter: str | Mapping[str, float] | None = None,
    ) -> Iterator[Logits]:
        """Logits after each token from index ``first`` on, for measuring a model.

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
        return core.engine.logits(ids, first=first, mix=core.adapters.mix(chosen))

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
        return embed(self._core, texts, pooling=pooling, normalize=normalize, cancel=cancel)

    # -- adapters --------------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that a request may ask for."""
        return self._core.adapters.names

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Have requests know the LoRA adapter at ``path`` by ``name``, from the next one on.

        A folder of PEFT (LoRA, rsLoRA, DoRA) or mlx-lm, a ``.gguf`` file, or a hub id. The weights
        of the model are not read again; answers with different adapters share passes.

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
        """Forget an adapter. Answers that are on their way with it end with an error.

        Raises:
            OptionError: there is none of that name.
        """
        self._core.adapters.remove(name)

    # -- what it is doing ------------------------------------------------------------------------

    def status(self, *, lanes: bool | None = None) -> Status:
        """Memory against budgets, what was read and computed so far, the generation in progress.

        Takes well under a millisecond and waits for no pass. With ``lanes`` a streamed model also
        remembers what the disk, the link and the processors did in its last pass, from that call on
        until one with False.
        """
        return self._core.watch.status(lanes=lanes)

    def advise(self) -> Outlook:
        """The most that decoding can reach here, and which changes would help most.

        From the plan that the model was placed by, or a new one; measures nothing and may take a
        second: call it from a thread, while nothing is generated.
        """
        return self._core.advise()

    # -- life ------------------------------------------------------------------------------------

    def set_budget(
        self, *, ram: str | int | None = None, gpu_memory: str | int | None = None
    ) -> None:
        """Change the budgets of ``load`` while the model is there, even while it answers.

        With less, weights that were in memory are read for every token from the next pass on:
        answers stay the same, slower, and ``Metrics.memory`` says why. With more RAM than before,
        weights stay in memory as they pass. A GPU takes back nothing that it has given.

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
        """Bytes of the RAM budget that a streamed model does not take yet; 0 of any other."""
        return self._core.engine.weights.memory.spare

    @property
    def weights_in_ram(self) -> int:
        """Bytes of RAM that the weights take now."""
        if self._closed:
            return 0
        memory = self._core.engine.weights.memory
        on_gpu = self.info.device.startswith("cuda") and not memory.streams
        return memory.ram_nbytes if memory.streams else 0 if on_gpu else self.info.weight_bytes

    def leave_ram(self, nbytes: int) -> int:
        """Leave ``nbytes`` of RAM to something else in this process, or as much as can be; below
        zero: take them back. The bytes that were left.

        First goes what the budget has left, then weights, which are read again in each pass until
        there is room for them. A model that was loaded whole leaves nothing: see ``shrinkable`` of
        ``load``.
        """
        if not isinstance(nbytes, int):
            raise OptionError(f"nbytes must be an integer, is {nbytes!r:.80}")
        return self._core.leave_ram(nbytes)

    def unload(self) -> None:
        """``close``, and give all memory back to the system, conversations' caches included.

        Answers that are on their way end as cancelled. Takes a tenth of a second.
        """
        self._end_batches()
        self._core.unload()

    def close(self) -> None:
        """Free weights and caches; running batches (``live``) end."""
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
