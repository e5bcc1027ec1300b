"""DRY ("don't repeat yourself"): a token that would continue a repetition becomes less likely.

Where the text ends in something that it has had before, the token that followed there loses
``dry_multiplier * dry_base ** (length - dry_allowed_length)``; ``length`` counts the tokens that
repeat. The sampler is Weidmann's (2024), with llama.cpp's names, defaults and sequence breakers. It
knows tokens and their bytes, no model and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.engine.sampling import Logits, Sampling
from localrt.models.tokenizers.base import Tokenizer

Ids: TypeAlias = npt.NDArray[np.int32]

_LONGEST_TAIL = 20  # tokens of a breaker behind the one that it begins in
# A power beyond float32 takes a token out anyway.
_MOST_LOG = math.log(float(np.finfo(np.float32).max))
_LEAST_LOGIT = float(np.finfo(np.float32).min)


class Dry:
    """The penalties of one answer that grows behind ``prompt``. A token takes one pass of numpy
    over the tokens looked at.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        self._sampling = sampling
        self._most = None if sampling.dry_penalty_last_n < 0 else sampling.dry_penalty_last_n
        self._tokens: Ids = np.asarray(prompt if self._most is None else prompt[-self._most :])
        self._tokens = self._tokens.astype(np.int32)
        self._lengths = repeat_lengths(self._tokens)
        self._breakers = Breakers(tokenizer, sampling.dry_sequence_breakers)
        found = self._breakers.since(self._tokens, len(self._tokens))
        self._since = len(self._tokens) if found is None else found

    def push(self, token: int) -> None:
        """``token`` comes next."""
        self._tokens, self._lengths = grown(self._tokens, self._lengths, token)
        if self._most is not None:
            self._tokens = self._tokens[-self._most :]
            self._lengths = self._lengths[-self._most :]
        found = self._breakers.since(self._tokens, _LONGEST_TAIL + 1)
        self._since = self._since + 1 if found is None else found

    def applied(self, logits: Logits) -> Logits:
        """``logits`` (V,) less the penalties: a copy if there are any, else the array itself."""
        s = self._sampling
        # What repeats lies within the tokens looked at, and behind the last breaker.
        most = np.minimum(np.arange(len(self._tokens)), self._since)
        lengths = np.minimum(self._lengths, most)
        ends = np.flatnonzero(lengths >= s.dry_allowed_length)
        if not len(ends):
            return logits
        ids, which = np.unique(self._tokens[ends], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, which, lengths[ends])
        free = [not self._breakers.breaks(int(token)) for token in ids]
        ids, power = ids[free], longest[free] - s.dry_allowed_length
        if s.dry_base > 1.0:
            power = np.minimum(power, _MOST_LOG / math.log(s.dry_base))
        out = logits.copy()
        lowered = out[ids].astype(np.float64) - s.dry_multiplier * s.dry_base**power
        out[ids] = np.maximum(lowered, _LEAST_LOGIT)
        return out


def repeat_lengths(tokens: Ids) -> Ids:
    """For each index, how many tokens in front of it are also the last ones of ``tokens`` (n,).

    The Z-algorithm (Gusfield 1997) on the reversed tokens, in O(n).
    """
    back: list[int] = tokens[::-1].tolist()
    size = len(back)
    lengths = [0] * size
    left = right = 0  # of the window that reaches farthest and equals the beginning
    for start in range(1, size):
        length = min(right - start, lengths[start - left]) if start < right else 0
        while start + length < size and back[length] == back[start + length]:
            length += 1
        lengths[start] = length
        if start + length > right:
            left, right = start, start + length
    # What lies ``start`` tokens before the end goes on at that index.
    return np.array([0, *lengths[:0:-1]][:size], np.int32)


def grown(tokens: Ids, lengths: Ids, token: int) -> tuple[Ids, Ids]:
    """``tokens`` with ``token`` behind them, and their ``repeat_lengths``."""
    longer = np.where(tokens == token, lengths + 1, 0)
    first = np.zeros(1, np.int32)
    return np.append(tokens, np.int32(token)), np.concatenate((first, longer), dtype=np.int32)


class Breakers:
    """Where the strings ``breakers`` end in a text of tokens: no repetition reaches beyond.

    A breaker is in one token, or begins at the end of one and goes on in the tokens behind it.
    """

    def __init__(self, tokenizer: Tokenizer | None, breakers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._breakers = [text.encode("utf-8", "surrogateescape") for text in breakers]
        self._known: dict[int, tuple[tuple[int, ...], ...]] = {}

    def breaks(self, token: int) -> bool:
        """Whether ``token`` has a whole breaker in it."""
        return () in self._tails(token)

    def since(self, tokens: Ids, most: int) -> int | None:
        """The tokens behind the last breaker; None where none begins in the last ``most``."""
        if not self._breakers or self._tokenizer is None:
            return None
        last: list[int] = tokens[-most:].tolist() if most else []
        for behind in range(len(last)):
            at = len(last) - 1 - behind
            tails = [
                len(tail)
                for tail in self._tails(last[at])
                if len(tail) <= behind and tuple(last[at + 1 : at + 1 + len(tail)]) == tail
            ]
            if tails:
                return behind - max(tails)
        return None

    def _tails(self, token: int) -> tuple[tuple[int, ...], ...]:
        """The tokens that, behind ``token``, complete a breaker; () is nothing."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = tuple(dict.fromkeys(self._find(token)))
        return found

    def _find(self, token: int) -> list[tuple[int, ...]]:
        if self._tokenizer is None:
            return []
        word = self._tokenizer.token_bytes(token)
        found: list[tuple[int, ...]] = []
        for breaker in self._breakers:
            if breaker in word:
                found.append(())
                continue
            for size in range(min(len(word), len(breaker) - 1), 0, -1):
                if word.endswith(breaker[:size]):
                    rest = breaker[size:].decode("utf-8", "surrogateescape")
                    ids = self._tokenizer.encode(rest, add_special=False)
                    found.append(tuple(ids[:_LONGEST_TAIL]))
        return found
