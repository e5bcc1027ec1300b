"""The ``llamacpp`` engine: llama.cpp behind the engine contract, for GGUF files.

The library's low-level calls are used, without its Python sampler and prompt handling.

llama.cpp's own tokenizer behind the tokenizer contract.

For GGUF models whose tokenizer localrt cannot build itself. It reads the vocabulary of a model that
is loaded, and must not be used after that is closed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property

import numpy as np

from localrt.common.errors import LocalrtError, OptionError, TokenizerError
from localrt.engine.llamacpp.model import CHUNK, LlamaCppModel
from localrt.engine.llamacpp.session import LlamaCppSession
from localrt.engine.protocol import Check, Engine, Logits
from localrt.models.tokenizers.base import Tokenizer, Watch, ignore_count
from localrt.quant.ops.adapters import Mix

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
        """Token ids of ``text``; see the contract for the two options."""
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
        """The bytes that ``token`` stands for; a control token stands for its own name."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token ids are 0 to {self.vocab_size - 1}, not {token}")
        buffer = ctypes.create_string_buffer(256)
        count = self._piece(token, buffer)
        if count < 0:  # minus the room that it needs
            buffer = ctypes.create_string_buffer(-count)
            count = self._piece(token, buffer)
        return buffer.raw[:count]

    def token_text(self, token: int) -> str:
        """The vocabulary's own spelling of ``token``."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token ids are 0 to {self.vocab_size - 1}, not {token}")
        spelling: bytes = self._api.llama_vocab_get_text(self._vocab, token) or b""
        return spelling.decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Id of the token that the vocabulary spells ``text``, if there is one."""
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
        self,
        tokens: Sequence[int],
        *,
        first: int = 0,
        mix: Mix = (),
        check: Check | None = None,
    ) -> Iterator[Logits]:
        """See ``Engine``: there is no adapter."""
        assert not mix, "none can be added"
        with closing(self.session(len(tokens))) as session:
            yield from session.logits(tokens, first=first, check=check)

    def close(self) -> None:
        """Free the weights, once the last session that still has a cache is closed."""
        self._model.close()

    def tokenizer(self) -> LlamaCppTokenizer:
        """llama.cpp's own; not to be used after ``close``."""
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
        """See ``Engine``; a context of its own for each text.

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
    """The hidden states of the next ``tokens``, (n, D), the caller's own."""
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
