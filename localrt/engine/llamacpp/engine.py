"""The ``llamacpp`` engine: llama.cpp behind the engine contract, for GGUF files.

The library's low-level calls are used, without its Python sampler and prompt handling. Each session
owns a llama.cpp context, which grows with it; logits are a view of the library's own buffer. The
library's tokenizer serves models whose own localrt cannot build.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from types import ModuleType

import numpy as np

from localrt.common.errors import LocalrtError, OptionError, TokenizerError
from localrt.common.forks import finalize
from localrt.engine.llamacpp.gpus import CHUNK
from localrt.engine.llamacpp.model import LlamaCppModel
from localrt.engine.protocol import Engine, EngineSession, Logits
from localrt.models.tokenizers.base import Tokenizer, Watch, ignore_count
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.protocol import Check

_GROWTH = 1024  # a context grows in multiples of this many tokens
_ABORTED = 2
# Rows of logits kept at once if all are wanted: 39 MB at a vocabulary of 151,936.
_LOGIT_ROWS = 64
# llama.cpp calls its abort callback once per graph node, about a thousand times a pass. A call into
# Python takes a microsecond or two, so the callback is set only for passes that take much longer.
_ABORTABLE_PASS_S = 0.1


class LlamaCppSession(EngineSession):
    """One sequence and its cache, in a llama.cpp context of its own. Not thread-safe."""

    def __init__(self, model: LlamaCppModel, capacity: int) -> None:
        self._model = model
        self._api = model.api
        self.capacity = capacity
        self._tokens: list[int] = []
        self._size = 0  # tokens that the context has room for; 0: there is no context yet
        self._outputs = 1  # rows of a pass whose logits the context keeps
        self._context: object = None
        self._free: Callable[[], object] = _nothing
        self._abort = _Abort(self._api)
        self._last_pass_s = 0.0

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def nbytes(self) -> int:
        return self._size * self._model.kv_bytes_per_token

    def extend(
        self,
        tokens: Sequence[int],
        *,
        check: Check | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Logits:
        self._make_room(tokens)
        vocab = self._model.info.vocab_size
        for start in range(0, len(tokens), CHUNK):
            if check is not None:
                check()
            chunk = tokens[start : start + CHUNK]
            self._run(chunk, check)
            self._tokens.extend(chunk)
            if on_progress is not None:
                on_progress(start + len(chunk))
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(vocab,))

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, check: Check | None = None
    ) -> Iterator[Logits]:
        """Yield logits after each of ``tokens`` from index ``first`` on; the session must be empty.

        Pieces (n, vocab) in order, n at most 64. Each piece is the caller's own.

        Raises:
            See ``extend``. LocalrtError also where the session holds tokens.
        """
        if self._tokens:
            raise LocalrtError("logits of all tokens need a session that holds none")
        if self._outputs == 1:
            self.close()  # a context keeps as many rows as it was made for
            self._outputs = _LOGIT_ROWS
        self._make_room(tokens)
        vocab = self._model.info.vocab_size
        if first:
            self.extend(tokens[:first], check=check)
        for start in range(first, len(tokens), _LOGIT_ROWS):
            if check is not None:
                check()
            chunk = tokens[start : start + _LOGIT_ROWS]
            self._run(chunk, check, every_row=True)
            self._tokens.extend(chunk)
            kept = self._api.llama_get_logits(self._context)
            yield np.ctypeslib.as_array(kept, shape=(len(chunk), vocab)).copy()

    def trim(self, length: int) -> int:
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot trim {len(self._tokens)} tokens to {length}")
        if length == len(self._tokens):
            return length
        kept = self._tokens[:length]
        memory = self._api.llama_get_memory(self._context)
        if not self._api.llama_memory_seq_rm(memory, 0, length, -1):
            # A recurrent state cannot be cut at a position: it is computed again from the start.
            self._api.llama_memory_clear(memory, False)
            kept = []
        self._tokens = kept
        return len(kept)

    def close(self) -> None:
        self._free()
        self._context, self._size, self._tokens, self._free = None, 0, [], _nothing
        self._model.release(self)

    def _make_room(self, tokens: Sequence[int]) -> None:
        """Check ``tokens``, and make a context that they fit into."""
        self._model.check_open()
        self.check_tokens(tokens, self._model.info.vocab_size)
        needed = len(self._tokens) + len(tokens)
        if needed > self._size:
            self._grow(needed)

    def _run(self, chunk: Sequence[int], check: Check | None, *, every_row: bool = False) -> None:
        """Run a pass over at most `CHUNK` tokens; the cache is unchanged if it does not finish.

        Logits are kept for the last token, or for all (at most as many as the context keeps).
        """
        ids = (ctypes.c_int32 * len(chunk))(*chunk)
        batch = self._api.llama_batch_get_one(ids, len(chunk))
        if every_row:
            wanted = (ctypes.c_int8 * len(chunk))(*[1] * len(chunk))
            batch.logits = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8))
        slow = len(chunk) > 1 or self._last_pass_s > _ABORTABLE_PASS_S
        with self._model.lock, self._abort.during(self._context, check if slow else None):
            started = time.perf_counter()
            code = self._api.llama_decode(self._context, batch)
            self._last_pass_s = time.perf_counter() - started
        if code == 0:
            return
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, 0, len(self._tokens), -1)
        if code == _ABORTED and self._abort.error is not None:
            raise self._abort.error
        reason = self._model.library.reason(f"code {code}")
        raise LocalrtError(f"llama.cpp could not run {len(chunk)} tokens: {reason}")

    def _grow(self, needed: int) -> None:
        """Move to a larger context, without ever having both in memory."""
        size = max(needed, 2 * self._size)
        size = min(self.capacity, -(-size // _GROWTH) * _GROWTH)
        kept, state = self._tokens, None
        if kept:
            count = self._api.llama_state_seq_get_size(self._context, 0)
            state = (ctypes.c_uint8 * count)()
            self._api.llama_state_seq_get_data(self._context, state, count, 0)
        self.close()
        self._context = self._model.new_context(size, user=self, outputs=self._outputs)
        self._free = finalize(self, self._api.llama_free, self._context)
        self._size = size
        if state is not None:
            if not self._api.llama_state_seq_set_data(self._context, state, len(state), 0):
                raise LocalrtError("llama.cpp could not move its cache to a larger one")
            self._tokens = kept


class _Abort:
    """Calls ``check`` during a pass. Its exception is kept, since C cannot carry it."""

    def __init__(self, api: ModuleType) -> None:
        self._set = api.llama_set_abort_callback
        self._never = api.ggml_abort_callback()
        self._callback = api.ggml_abort_callback(self._ask)
        self._check: Check | None = None
        self._context: object = None
        self.error: BaseException | None = None

    def during(self, context: object, check: Check | None) -> _Abort:
        self._context, self._check, self.error = context, check, None
        return self

    def __enter__(self) -> None:
        if self._check is not None:
            self._set(self._context, self._callback, None)

    def __exit__(self, *_exception: object) -> None:
        if self._check is not None:
            self._set(self._context, self._never, None)
            self._check = None

    def _ask(self, _data: object) -> bool:
        try:
            if self._check is not None:
                self._check()
        except BaseException as error:  # noqa: BLE001 - raised again when the pass has returned
            self.error = error
            return True
        return False


def _nothing() -> None:
    """Free nothing: there is no context yet."""


_NO_VOCABULARY = 0  # LLAMA_VOCAB_TYPE_NONE


class LlamaCppTokenizer(Tokenizer):
    """Text to token ids and back through llama.cpp. Thread-safe."""

    def __init__(self, model: LlamaCppModel) -> None:
        self._model = model  # keeps the vocabulary's memory alive
        self._api = model.api
        self._vocab = self._api.llama_model_get_vocab(model.handle)
        if self._api.llama_vocab_type(self._vocab) == _NO_VOCABULARY:
            raise TokenizerError("the model file has no tokenizer: pass token_ids instead of text")
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self._vocab))
        bos = int(self._api.llama_vocab_bos(self._vocab))
        self.bos_id = bos if bos >= 0 else None
        self.eos_ids = self._where(self._api.llama_vocab_is_eog)
        self.special_ids = self._where(self._api.llama_vocab_is_control)
        first = self.encode("a", add_special=False)[:1]
        self.strip_space = bool(first) and self.token_bytes(first[0]).startswith(b" ")

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        watch: Watch = ignore_count,
    ) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._api.llama_tokenize(
            self._vocab, data, len(data), ids, room, add_special, parse_special
        )
        if count < 0:
            ids = (ctypes.c_int32 * -count)()
            count = self._api.llama_tokenize(
                self._vocab, data, len(data), ids, -count, add_special, parse_special
            )
        if count < 0:
            raise TokenizerError("llama.cpp cannot tokenize this text")
        return ids[:count]

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token ids are 0 to {self.vocab_size - 1}, not {token}")
        buffer = ctypes.create_string_buffer(256)
        count = self._piece(token, buffer)
        if count < 0:  # minus the size that it needs
            buffer = ctypes.create_string_buffer(-count)
            count = self._piece(token, buffer)
        return buffer.raw[:count]

    def token_text(self, token: int) -> str:
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token ids are 0 to {self.vocab_size - 1}, not {token}")
        spelling: bytes = self._api.llama_vocab_get_text(self._vocab, token) or b""
        return spelling.decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def _piece(self, token: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        api = self._api
        return int(api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True))

    @cached_property
    def _ids(self) -> dict[str, int]:
        # Backwards, so that of two tokens with one spelling the first wins.
        return {self.token_text(token): token for token in reversed(range(self.vocab_size))}

    def _where(self, test: Callable[[object, int], bool]) -> frozenset[int]:
        return frozenset(token for token in range(self.vocab_size) if test(self._vocab, token))


class LlamaCppEngine(Engine):
    """A GGUF model run by llama.cpp. Thread-safe: passes of several sessions take turns."""

    pass_rows = CHUNK

    def __init__(self, model: LlamaCppModel) -> None:
        self._model = model
        self.info = model.info

    def session(self, capacity: int) -> LlamaCppSession:
        self._model.check_open()
        if capacity < 1:
            raise OptionError(f"a session needs room for at least one token, not {capacity}")
        self._model.check_cache_fits(capacity)
        return LlamaCppSession(self._model, capacity)

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, mix: Mix = (), check: Check | None = None
    ) -> Iterator[Logits]:
        """See ``Engine``; adapters are not supported."""
        assert not mix, "none can be added"
        with closing(self.session(len(tokens))) as session:
            yield from session.logits(tokens, first=first, check=check)

    def close(self) -> None:
        """Free the weights once the last session with a cache is closed."""
        self._model.close()

    def tokenizer(self) -> LlamaCppTokenizer:
        """llama.cpp's own tokenizer, not to be used after ``close``."""
        return LlamaCppTokenizer(self._model)

    def kv_nbytes(self, length: int) -> int:
        return length * self._model.kv_bytes_per_token

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states."""
        return self._model.hidden_size

    def hidden_states(
        self, texts: Sequence[Sequence[int]], *, check: Check | None = None
    ) -> Generator[tuple[int, Logits], None, None]:
        """See ``Engine``; each text has a context of its own.

        Raises:
            MemoryBudgetError: llama.cpp has no room for so long a text.
            LocalrtError: llama.cpp failed.
        """
        model = self._model
        for index, tokens in enumerate(texts):
            context = model.new_context(
                len(tokens), outputs=min(CHUNK, len(tokens)), embeddings=True
            )
            try:
                for start in range(0, len(tokens), CHUNK):
                    if check is not None:
                        check()
                    yield index, _embedded(model, context, tokens[start : start + CHUNK])
            finally:
                model.api.llama_free(context)


def _embedded(model: LlamaCppModel, context: object, tokens: Sequence[int]) -> Logits:
    """Return the hidden states of the next ``tokens``, (n, D), as the caller's own copy."""
    ids = (ctypes.c_int32 * len(tokens))(*tokens)
    batch = model.api.llama_batch_get_one(ids, len(tokens))
    wanted = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
    batch.logits = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8))
    with model.lock:
        code = model.api.llama_decode(context, batch)
    if code != 0:
        raise LocalrtError(f"llama.cpp could not embed: {model.library.reason(f'{code}')}")
    rows = model.api.llama_get_embeddings(context)
    return np.ctypeslib.as_array(rows, shape=(len(tokens), model.hidden_size)).copy()
