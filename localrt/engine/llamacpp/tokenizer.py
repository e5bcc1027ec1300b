"""llama.cpp's own tokenizer behind the tokenizer contract.

For GGUF models whose tokenizer localrt cannot build itself. It reads the vocabulary of a model that
is loaded, and must not be used after that is closed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property

from localrt.engine.llamacpp.model import LlamaCppModel
from localrt.errors import TokenizerError
from localrt.models.tokenizers.base import Tokenizer, Watch, ignore_count

__all__ = ["LlamaCppTokenizer"]

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
