"""A GGUF file loaded by llama.cpp, and the contexts that compute with it.

Engine, sessions and tokenizer share it: it opens and describes the file, checks memory, and frees
the weights once the last context is gone. It runs nothing.

It also finds the llama.cpp library and initializes it once, without output.

llama.cpp has one log sink and one backend per process, so this module holds one `Library` for all
engines. The library's log lines become the reason of the next error.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType

from localrt.common.cores import default_threads
from localrt.common.errors import (
    CheckpointError,
    LocalrtError,
    MemoryBudgetError,
    MissingExtraError,
    OptionError,
    UnsupportedModelError,
)
from localrt.common.extras import install, install_for_gpu
from localrt.common.forks import finalize
from localrt.common.option_names import option
from localrt.common.progress import Progress, ProgressCallback
from localrt.common.settings import DEFAULT_CONTEXT
from localrt.engine.llamacpp import gpus
from localrt.engine.llamacpp.gpus import CHUNK, LlamaGpu
from localrt.engine.protocol import EngineInfo
from localrt.offload.account import Account, check_fits
from localrt.offload.memory import memory_state

_ERROR_LEVEL = 4


@dataclass(frozen=True, slots=True)
class Library:
    """llama-cpp-python's ctypes module, and the last error lines that llama.cpp reported.

    ``log_sink`` is only kept alive: otherwise the library would call into freed memory.
    """

    api: ModuleType
    errors: deque[str]
    log_sink: object

    def reason(self, fallback: str) -> str:
        """Return llama.cpp's last reason for a failure, in one line, and forget it."""
        # The first line names the cause; the next ones are from callers that gave up in turn.
        text = self.errors[0] if self.errors else fallback
        self.errors.clear()
        return text


@cache
def load_library() -> Library:
    """Return the library, with its backend started and its log kept from the terminal.

    Raises:
        MissingExtraError: llama-cpp-python is not installed, or its library cannot be loaded.
    """
    try:
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        raise MissingExtraError(
            f"the llamacpp engine needs llama-cpp-python: {install('llamacpp')}"
        ) from error
    except (OSError, RuntimeError) as error:
        cause = str(error).splitlines()[0] if str(error) else "unknown cause"
        raise MissingExtraError(
            f"llama-cpp-python is installed but its library does not load ({cause}); try again"
            f" with {install('llamacpp')} --force-reinstall"
        ) from error

    errors: deque[str] = deque(maxlen=16)

    def keep(level: int, text: bytes, _data: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == _ERROR_LEVEL and line:
            errors.append(" ".join(line.split()))

    log_sink = api.llama_log_callback(keep)
    api.llama_log_set(log_sink, ctypes.c_void_p(None))
    api.llama_backend_init()
    return Library(api, errors, log_sink)


_NO_POOLING = 0  # LLAMA_POOLING_TYPE_NONE
_NO_MEMORY = re.compile("alloc|memory", re.IGNORECASE)  # in a reason for not loading


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """llama.cpp's own options that change its speed.

    ``repack`` copies weights into a layout its CPU kernels prefer, which costs that memory again.
    ``flash_attention`` None leaves the choice to llama.cpp.
    """

    repack: bool = True
    flash_attention: bool | None = None


class LlamaCppModel:
    """A loaded GGUF file. Thread-safe; hold ``lock`` to compute."""

    def __init__(
        self,
        library: Library,
        handle: object,
        info: EngineInfo,
        *,
        threads: int,
        settings: LlamaCppSettings,
    ) -> None:
        self.library = library
        self.api = library.api
        self.handle = handle
        self.info = info
        self.notes: list[str] = []
        """Lines for the user."""
        self.lock = Lock()
        self.kv_bytes_per_token = _kv_bytes_per_token(self.api, handle)
        self.hidden_size = int(self.api.llama_model_n_embd(handle))
        self._threads = threads
        self._settings = settings
        self._closed = False
        self._users: weakref.WeakSet[object] = weakref.WeakSet()  # the users of contexts
        self._free = finalize(self, self.api.llama_model_free, handle)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        ctx: int | None = None,
        threads: int | None = None,
        device: str = "auto",
        gpu_memory: int | None = None,
        progress: ProgressCallback | None = None,
        settings: LlamaCppSettings | None = None,
    ) -> LlamaCppModel:
        """Load ``path``, a GGUF file (of a split model: its first part).

        The GPUs of this build take the layers that fit their free memory, at most ``gpu_memory``
        bytes of each; if it runs out all the same, fewer.

        A cache of ``ctx`` tokens is checked against memory at once, so that a context that cannot
        fit fails here; ``threads`` defaults to the performance cores. An exception from
        ``progress`` stops the load and is raised here.

        Raises:
            CheckpointError: the file is missing or malformed.
            MemoryBudgetError: the model, or ``ctx`` tokens of its cache, do not fit.
            MissingExtraError: llama-cpp-python is not installed.
            OptionError: ``device`` is not one that this build of llama.cpp can use.
            UnsupportedModelError: not a GGUF file, or not a model that generates text.
        """
        if path.is_dir() or path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(f"the llamacpp engine reads GGUF files; {path} is not one")
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist")
        library, notes = load_library(), list[str]()
        devices, kept = _gpus(library.api, device), ctx or DEFAULT_CONTEXT
        devices = gpus.with_layers(devices, path, ctx=kept, most=gpu_memory)
        threads, settings = threads or default_threads(), settings or LlamaCppSettings()
        while (
            model := cls._open(path, library, devices, kept, threads, progress, settings)
        ) is None:
            full, devices = gpus.layers_text(devices), gpus.with_fewer(devices)
            notes.append(f"llama.cpp has no room for {full}: trying {gpus.layers_text(devices)}")
        if devices:
            notes.append(f"llama.cpp: {gpus.layers_text(devices)}, of {model.info.layers + 1}")
        model.notes = notes
        try:
            if ctx is not None:
                model.check_cache_fits(ctx)
        except MemoryBudgetError:
            model.close()
            raise
        return model

    @classmethod
    def _open(
        cls,
        path: Path,
        library: Library,
        devices: Sequence[LlamaGpu],
        ctx: int,
        threads: int,
        progress: ProgressCallback | None,
        settings: LlamaCppSettings,
    ) -> LlamaCppModel | None:
        """Load with layers on ``devices``; None if they have no room for them and their caches."""
        api = library.api
        params = api.llama_model_default_params()
        gpus.place(api, params, devices)
        params.use_extra_bufts = settings.repack
        total, stopped = path.stat().st_size, list[BaseException]()

        def report(fraction: float, _data: object) -> bool:
            try:
                if progress is not None:
                    progress(Progress("load", int(fraction * total), total, "bytes"))
            except BaseException as error:  # noqa: BLE001 - raised again when the load has returned
                stopped.append(error)
            return not stopped

        params.progress_callback = callback = api.llama_progress_callback(report)
        library.errors.clear()
        handle = api.llama_model_load_from_file(str(path).encode(), params)
        del callback
        if stopped:
            if handle:
                api.llama_model_free(handle)
            raise stopped[0]
        if not handle:
            reason = library.reason("it gave no reason")
            if devices and _NO_MEMORY.search(reason):
                return None
            raise CheckpointError(f"llama.cpp cannot load {path.name}: {reason}")
        if not api.llama_model_has_decoder(handle) or api.llama_model_has_encoder(handle):
            api.llama_model_free(handle)
            raise UnsupportedModelError(f"{path.name} is not a model that continues text")

        info = _describe(api, handle, devices[0].backend if devices else "cpu")
        model = cls(library, handle, info, threads=threads, settings=settings)
        try:
            if devices:  # what passes need is tried before anyone waits for an answer
                api.llama_free(model.new_context(ctx))
        except MemoryBudgetError:
            model.close()
            return None
        return model

    def close(self) -> None:
        """Free the weights once the last context is freed."""
        self._closed = True
        if not self._users:
            self._free()

    def new_context(
        self, size: int, *, user: object = None, outputs: int = 1, embeddings: bool = False
    ) -> object:
        """Return a llama.cpp context of ``size`` tokens, which ``user`` gives back with
        ``release``.

        ``outputs`` is the number of rows of a pass whose logits are kept or, with ``embeddings``,
        whose unpooled hidden states are.

        Raises:
            LocalrtError: the model is closed.
            MemoryBudgetError: llama.cpp could not allocate it.
        """
        self.check_open()
        params = self.api.llama_context_default_params()
        params.n_ctx = size
        params.n_batch = params.n_ubatch = min(CHUNK, size)
        params.n_seq_max = 1
        params.n_outputs_max = outputs  # otherwise llama.cpp reserves logits for a whole batch
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        if self.info.device == "cpu":
            params.offload_kqv = params.op_offload = False
        if embeddings:
            params.embeddings = True
            params.pooling_type = _NO_POOLING
        if self._settings.flash_attention is not None:
            params.flash_attn_type = int(self._settings.flash_attention)
        self.library.errors.clear()
        context = self.api.llama_init_from_model(self.handle, params)
        if not context:
            reason = self.library.reason("not enough memory")
            raise MemoryBudgetError(
                f"llama.cpp cannot make a cache for {size} tokens: {reason}; use a smaller "
                f"{option('ctx')}"
            )
        if user is not None:
            self._users.add(user)
        return context

    def release(self, user: object) -> None:
        """Record that ``user`` has freed its context."""
        self._users.discard(user)
        if self._closed:
            self.close()

    def check_open(self) -> None:
        """Raise `LocalrtError` if the model is closed."""
        if self._closed:
            raise LocalrtError("the model is closed: load it again")

    def check_cache_fits(self, capacity: int) -> None:
        """Raise `MemoryBudgetError` if a cache of this many tokens does not fit in RAM."""
        if self.info.device == "cpu":
            needed = Account.of([("ram", "keys and values", capacity * self.kv_bytes_per_token)])
            what = f"a context of {capacity} tokens"
            check_fits(needed, memory_state().available, what, ctx=capacity)


def _gpus(api: ModuleType, device: str) -> list[LlamaGpu]:
    if device not in ("auto", "cpu", "cuda"):
        raise OptionError(f"{option('device')} must be auto, cpu or cuda, not {device!r}")
    found = [] if device == "cpu" else gpus.find_devices(api)
    if device == "cuda" and not found:
        raise OptionError(
            "this build of llama-cpp-python has no GPU to use: leave "
            f"{option('device', 'cuda')} out, or build it for your GPU: {install_for_gpu()}"
        )
    return found


def _metadata(api: ModuleType, model: object, key: str) -> str | None:
    buffer = ctypes.create_string_buffer(256)
    if api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer)) < 0:
        return None
    return buffer.value.decode("utf-8", "replace")


def _kv_bytes_per_token(api: ModuleType, model: object) -> int:
    """Return the bytes of keys and values per token in half precision, by the model's sizes."""
    architecture = _metadata(api, model, "general.architecture")
    heads = max(1, api.llama_model_n_head(model))
    head_dim = api.llama_model_n_embd(model) // heads
    key = int(_metadata(api, model, f"{architecture}.attention.key_length") or head_dim)
    value = int(_metadata(api, model, f"{architecture}.attention.value_length") or head_dim)
    layers, kv_heads = api.llama_model_n_layer(model), api.llama_model_n_head_kv(model)
    return int(layers * kv_heads * (key + value) * 2)


def _describe(api: ModuleType, model: object, device: str) -> EngineInfo:
    vocab = api.llama_model_get_vocab(model)
    file_type = api.llama_ftype_name(api.llama_model_ftype(model)) or b"unknown"
    return EngineInfo(
        engine="llamacpp",
        architecture=_metadata(api, model, "general.architecture") or "unknown",
        device=device,
        format=_format_name(file_type.decode()),
        parameters=api.llama_model_n_params(model),
        layers=api.llama_model_n_layer(model),
        vocab_size=api.llama_vocab_n_tokens(vocab),
        weight_bytes=api.llama_model_size(model),
        context_length=api.llama_model_n_ctx_train(model),
        exactness="approximate",  # it rounds activations to 8 bits for its integer kernels
    )


def _format_name(file_type: str) -> str:
    """Return the usual spelling of ``"Q4_K - Medium"``: ``"Q4_K_M"``."""
    name, _, size = file_type.partition(" - ")
    return f"{name}_{size[0]}" if size[:1].isalpha() else name
