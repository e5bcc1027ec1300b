"""Byte-level BPE (GPT-2, Llama 3, Qwen, ...) from a vocabulary and its merges.

The ``tokenizers`` package cuts words and merges; added tokens are found here, before it sees the
text, because whether a control token counts is decided call by call. Does not know where the
vocabulary was stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localrt.errors import TokenizerError
from localrt.models.tokenizers.bytelevel import BYTE_TO_CHAR, piece_bytes
from localrt.models.tokenizers.matcher import TokenMatcher
from localrt.models.tokenizers.pretokenizers import PreType
from localrt.models.tokenizers.vocabulary import Vocabulary, VocabularyTokenizer

__all__ = ["ByteLevelTokenizer"]


class ByteLevelTokenizer(VocabularyTokenizer):
    """``words`` maps the pieces that merges may build to ids; ``added`` are matched as a whole.

    Of ``added``, those in the vocabulary's ``special`` count only with ``parse_special``.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        words: Mapping[str, int],
        merges: Sequence[str],
        added: Mapping[str, int],
        pre: PreType,
    ) -> None:
        super().__init__(vocabulary)
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        pairs = [_merge_pair(merge) for merge in merges]
        try:
            model = models.BPE(dict(words), pairs, ignore_merges=pre.whole_words)
        except Exception as error:  # noqa: BLE001 - the package raises nothing more precise
            reason = " ".join(str(error).split())
            raise TokenizerError(f"the model's BPE vocabulary cannot be used: {reason}") from None
        self._backend = Backend(model)
        self._backend.pre_tokenizer = pre.pre_tokenizer()
        if (normalizer := pre.normalizer()) is not None:
            self._backend.normalizer = normalizer
        self._words = words
        self._literal = frozenset(added.values())
        self._added = TokenMatcher(added)
        self._always = TokenMatcher(
            {text: token for text, token in added.items() if token not in vocabulary.special}
        )

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in (self._added if parse_special else self._always).split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._backend.encode(part, add_special_tokens=False).ids
        return ids

    def _byte_id(self, byte: int) -> int | None:
        return self._words.get(BYTE_TO_CHAR[byte])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``: an added token's name, nothing for an unknown id."""
        if token in self._literal:
            return self.token_text(token).encode("utf-8", "surrogateescape")
        return piece_bytes(self.token_text(token))


def _merge_pair(merge: str) -> tuple[str, str]:
    """The two sides of ``"left right"``."""
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise TokenizerError(f"the model's BPE merge {merge!r} does not name two pieces")
    return left, right
