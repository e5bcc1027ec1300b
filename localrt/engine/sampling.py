"""Turn logits into a token with pure functions; computing probabilities and drawing are separate.

Order: repetition penalty, frequency and presence penalties, logit bias, DRY, temperature, top-k,
typical, top-p, min-p, XTC; each filter renormalizes for the next. It knows no engine or session.

DRY ("don't repeat yourself", Weidmann 2024; llama.cpp's names and defaults): if the last ``length``
tokens occurred before, the token that followed them there is penalized by ``dry_multiplier *
dry_base ** (length - dry_allowed_length)``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.quant.ops.protocol import BEST_COUNT, is_best

if TYPE_CHECKING:
    from localrt.models.tokenizers.base import Tokenizer

Logits = npt.NDArray[np.float32]
# Different logits are never this close; dividing by a smaller number overflows.
_GREEDY_BELOW = 1e-8
_NEVER = -1e9  # a bias that JSON can say, too
_MIDDLE_TOP_K, _MIDDLE_TOP_P, _MIDDLE_WEIGHT = 40, 0.99, 3
# The best k of all logits are sought among those that reach the best of some groups of them.
_GROUP, _GROUPS_PER_TOKEN = 64, 4
_BREAKERS = ("\n", ":", '"', "*")
_MOST_BREAKERS, _LONGEST_BREAKER = 64, 40


def bounded(default: float | None, low: float, high: float) -> Any:
    """A field of options: integers if the bounds are; None is allowed where it is the default."""
    return field(default=default, metadata={"bounds": (low, high)})


def check_bounds(options: Any) -> None:
    """Raise ``OptionError`` unless the ``bounded`` fields of ``options`` are within bounds."""
    for each in fields(options):
        value, bounds = getattr(options, each.name), each.metadata.get("bounds")
        if bounds is None or (value is None and each.default is None):
            continue
        check = check_integer if isinstance(bounds[0], int) else check_number
        check(each.name, value, *bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. ``temperature=0`` is greedy, as is one below 1e-8.

    ``top_k=0``, ``top_p=1``, ``min_p=0`` and ``typical_p=1`` switch a filter off.
    ``repetition_penalty`` covers prompt and answer (Keskar et al. 2019), ``frequency_penalty`` and
    ``presence_penalty`` the answer alone (OpenAI's definition). ``typical_p`` is locally typical
    sampling (Meister et al. 2022), ``min_p`` a floor relative to the best token.

    ``dry_multiplier`` above 0 switches DRY on (``localrt.engine.sampling``): it penalizes a token
    that would extend a repetition of at least ``dry_allowed_length`` tokens within the last
    ``dry_penalty_last_n`` (-1: all), by a factor ``dry_base`` more for every further token;
    ``dry_sequence_breakers`` end a repetition. ``xtc_probability`` is how often XTC ("exclude top
    choices", Weidmann 2024) removes all tokens whose probability before the temperature is at least
    ``xtc_threshold``, except the least likely of them; above 0.5 it removes none. Both have
    llama.cpp's names and defaults.
    """

    temperature: float = bounded(0.8, 0.0, 100.0)
    top_k: int = bounded(40, 0, 1 << 31)
    top_p: float = bounded(0.95, 0.0, 1.0)
    min_p: float = bounded(0.05, 0.0, 1.0)
    typical_p: float = bounded(1.0, 0.0, 1.0)
    repetition_penalty: float = bounded(1.0, 0.01, 100.0)
    frequency_penalty: float = bounded(0.0, -100.0, 100.0)
    presence_penalty: float = bounded(0.0, -100.0, 100.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    dry_multiplier: float = bounded(0.0, 0.0, 100.0)
    dry_base: float = bounded(1.75, 1.0, 100.0)
    dry_allowed_length: int = bounded(2, 1, 1 << 31)
    dry_penalty_last_n: int = bounded(-1, -1, 1 << 31)
    dry_sequence_breakers: Sequence[str] = _BREAKERS
    xtc_probability: float = bounded(0.0, 0.0, 1.0)
    xtc_threshold: float = bounded(0.1, 0.0, 1.0)
    seed: int | None = bounded(None, 0, (1 << 64) - 1)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.temperature < _GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(
                f"{option('logit_bias')} must map token ids to numbers, is {self.logit_bias!r:.80}"
            )
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias", token, 0, 1 << 31, what=" token")
            is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not is_number or math.isnan(bias) or bias == math.inf:
                raise OptionError(
                    f"{option('logit_bias')} of token {token} must be a finite number, or -inf, "
                    f"is {bias!r:.80}"
                )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def avoids_repetition(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def excludes_top(self) -> bool:
        """Whether XTC is on: each token then takes one more random number."""
        return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5 and not self.greedy


def best_suffice(sampling: Sampling) -> bool:
    """Whether the best logits give the same tokens as all of them."""
    s = sampling
    penalized = s.repetition_penalty != 1.0 or s.frequency_penalty or s.presence_penalty
    adjusted = bool(penalized or s.logit_bias) or s.avoids_repetition
    return not adjusted and (s.greedy or 0 < s.top_k <= BEST_COUNT)


def _breakers(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or len(texts) > _MOST_BREAKERS:
        raise OptionError(
            f"{option('dry_sequence_breakers')} must be at most {_MOST_BREAKERS} strings, "
            f"is {given!r:.80}"
        )
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_BREAKER:
            raise OptionError(
                f"{option('dry_sequence_breakers')} must be strings of 1 to {_LONGEST_BREAKER} "
                f"characters, has {text!r:.80}"
            )
    return tuple(texts)


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise ``OptionError`` unless ``value`` is a number within these bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise OptionError(
            f"{option(name)} must be a number from {low:g} to {high:g}, is {value!r:.80}"
        )


def check_integer(name: str, value: object, low: int, high: int, *, what: str = "") -> None:
    """Raise ``OptionError`` unless a value, or ``what`` in it, is an integer within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(
            f"{option(name)}{what} must be an integer from {low} to {high}, is {value!r:.80}"
        )


def sampling_defaults(
    generation_config: Mapping[str, object], vocab_size: int = 1 << 31
) -> dict[str, object]:
    """Return the sampling options of a model's ``generation_config.json``.

    A config that names any of them gets Hugging Face's neutral values for the rest; one that says
    ``do_sample: false`` is greedy; one that says nothing keeps localrt's own defaults. Its
    ``suppress_tokens`` are never drawn.
    """
    known = {f.name for f in fields(Sampling)} - {"seed", "logit_bias", "dry_sequence_breakers"}
    named = {k: v for k, v in generation_config.items() if k in known and v is not None}
    never = generation_config.get("suppress_tokens")
    never = never if isinstance(never, list) else []
    ids = [each for each in never if type(each) is int and 0 <= each < vocab_size]
    bias: dict[str, object] = {"logit_bias": dict.fromkeys(ids, _NEVER)} if ids else {}
    if generation_config.get("do_sample") is False:
        return {"temperature": 0.0, **bias}
    if not named:
        return bias
    return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **named, **bias}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Candidates by descending probability (ties by id): ``tokens`` (n,), ``probs`` (n,), sum 1."""

    tokens: npt.NDArray[np.intp]
    probs: npt.NDArray[np.float64]


def adjust_logits(
    logits: Logits, prompt: Sequence[int], generated: Sequence[int], sampling: Sampling
) -> Logits:
    """Apply penalties and bias to logits (V,); return a copy if anything changes."""
    s = sampling
    penalized = s.repetition_penalty != 1.0 and (prompt or generated)
    counted = bool(s.frequency_penalty or s.presence_penalty) and bool(generated)
    if not (penalized or counted or s.logit_bias):
        return logits
    out = logits.copy()
    if penalized:
        seen = np.unique(np.asarray([*prompt, *generated], np.intp))
        values = out[seen]
        out[seen] = np.where(
            values > 0, values / s.repetition_penalty, values * s.repetition_penalty
        )
    if counted:
        counts = Counter(generated)
        ids = np.fromiter(counts, np.intp, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        out[ids] -= times * s.frequency_penalty + s.presence_penalty
    for token, bias in s.logit_bias.items():
        if token >= len(out):
            raise OptionError(
                f"{option('logit_bias')} names token {token}; the model has {len(out)}"
            )
        out[token] += bias
    return out


def distribution(logits: npt.NDArray[Any], sampling: Sampling, chance: float = 1.0) -> Distribution:
    """Return the distribution that ``sampling`` draws from, given adjusted logits (V,), or ``BEST``
    if these suffice.

    ``chance``, uniform in [0, 1), decides whether XTC applies to this token.
    """
    if is_best(logits):
        found = distribution(logits["value"], sampling, chance)
        return Distribution(logits["token"].astype(np.intp)[found.tokens], found.probs)
    if sampling.greedy:
        return Distribution(np.array([int(logits.argmax())], np.intp), np.ones(1))
    # Sorting all logits is faster than sorting their ids: those that stay are found at the end.
    tokens = None
    if sampling.top_k or sampling.typical_p < 1.0:
        tokens = _top_k(logits, sampling.top_k)
    values = np.sort(logits)[::-1] if tokens is None else logits[tokens]
    scaled = values.astype(np.float64)
    scaled = (scaled - scaled[0]) / sampling.temperature
    probs = np.exp(scaled)
    probs /= probs.sum()
    if tokens is not None and sampling.typical_p < 1.0:
        kept = _typical(probs, sampling.typical_p)
        tokens, values, probs = tokens[kept], values[kept], _renormalized(probs[kept])
    if sampling.top_p < 1.0:
        # The smallest set that reaches top_p: keep a token if the ones before it fall short.
        keep = max(1, int(np.searchsorted(np.cumsum(probs), sampling.top_p, side="left")) + 1)
        probs = _renormalized(probs[:keep])
    if sampling.min_p > 0.0:
        keep = int(np.count_nonzero(probs >= sampling.min_p * probs[0]))
        probs = _renormalized(probs[:keep])
    skip, keep = 0, len(probs)
    if sampling.excludes_top and chance < sampling.xtc_probability:
        skip = max(0, _top_choices(values[:keep], sampling.xtc_threshold) - 1)
        if skip:
            probs = _renormalized(probs[skip:])
    if tokens is None:
        tokens = _top_k(logits, keep)
    return Distribution(tokens[skip:keep], probs)


def constrained(
    logits: Logits, ids: npt.NDArray[np.intp], sampling: Sampling, chance: float = 1.0
) -> Distribution:
    """Return the ``distribution`` of adjusted logits (V,), with only ``ids`` allowed."""
    found = distribution(logits[ids], sampling, chance)
    return Distribution(ids[found.tokens], found.probs)


def _top_k(logits: Logits, k: int) -> npt.NDArray[np.intp]:
    """Return the ids of the k best logits (all if k is 0), best first, ties by id."""
    if 0 < k < len(logits):
        # At least k of them reach what k of the groups' best ones do.
        groups = len(logits) // _GROUP
        best = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        some = best if _GROUPS_PER_TOKEN * k <= groups else logits
        ids = np.flatnonzero(logits >= np.partition(some, len(some) - k)[len(some) - k])
    else:
        k = len(logits)
        ids = np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")
    return np.asarray(ids[order[:k]])


def _typical(probs: npt.NDArray[np.float64], mass: float) -> npt.NDArray[np.intp]:
    """Return the indices of the most typical of ``probs`` (n,) that reach ``mass``."""
    surprise = -np.log(np.maximum(probs, 1e-300))
    distance = np.abs(surprise - (probs * surprise).sum())
    order = np.argsort(distance, kind="stable")
    keep = max(1, int(np.searchsorted(np.cumsum(probs[order]), mass, side="left")) + 1)
    return np.sort(order[:keep])


def _top_choices(logits: Logits, threshold: float) -> int:
    """Return how many candidates with these logits (n,) have at least ``threshold``."""
    probs = np.exp(logits.astype(np.float64) - float(logits[0]))  # the best comes first
    return int(np.count_nonzero(probs >= threshold * probs.sum()))


def _renormalized(probs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total: float = probs.sum()
    if total == 0.0:  # so small beside those taken out that only the best is left
        probs = np.zeros_like(probs)
        probs[0] = total = 1.0
    return probs / total


def ends_middle(logits: Logits, ends: Collection[int]) -> bool:
    """Whether text that fills a gap ends where the next token has these logits (V,).

    llama.cpp's rule for editors: the less certain the next token is, the sooner the text ends.
    Without it, small models and chat models repeat the text after the gap.
    """
    tokens = _top_k(logits, _MIDDLE_TOP_K)
    probs = np.exp(logits[tokens].astype(np.float64) - float(logits[tokens[0]]))
    probs /= probs.sum()
    keep = int(np.searchsorted(np.cumsum(probs), _MIDDLE_TOP_P, side="left")) + 1
    ending = float(probs[:keep][[int(token) in ends for token in tokens[:keep]]].sum())
    return _MIDDLE_WEIGHT * ending * keep > float(probs[:keep].sum()) - ending


def draw(candidates: Distribution, uniform: float) -> int:
    """Return the token for ``uniform`` in [0, 1), by the inverse cumulative distribution."""
    index = int(np.searchsorted(np.cumsum(candidates.probs), uniform, side="right"))
    return int(candidates.tokens[min(index, len(candidates.tokens) - 1)])


def log_probabilities(
    logits: Logits, token: int, top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return log-probabilities of ``token`` and of the ``top`` best, from raw logits (V,)."""
    best = float(logits.max())
    total = best + math.log(float(np.exp(logits.astype(np.float64) - best).sum()))
    ids = _top_k(logits, top) if top else np.empty(0, np.intp)
    return float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in ids)


Ids: TypeAlias = npt.NDArray[np.int32]
_LONGEST_TAIL = 20  # the most tokens of a breaker after the one that it begins in
# A power beyond float32 excludes a token anyway.
_MOST_LOG = math.log(float(np.finfo(np.float32).max))
_LEAST_LOGIT = float(np.finfo(np.float32).min)


class Dry:
    """The DRY penalties of one answer to ``prompt``. Each token takes one numpy pass over the
    window.
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
        """Append ``token``."""
        self._tokens, self._lengths = grown(self._tokens, self._lengths, token)
        if self._most is not None:
            self._tokens = self._tokens[-self._most :]
            self._lengths = self._lengths[-self._most :]
        found = self._breakers.since(self._tokens, _LONGEST_TAIL + 1)
        self._since = self._since + 1 if found is None else found

    def applied(self, logits: Logits) -> Logits:
        """Return ``logits`` (V,) less the penalties; a copy if there are any."""
        s = self._sampling
        # Repetitions lie within the window and after the last breaker.
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
    """Return, for each index, how many tokens before it equal the last ones of ``tokens`` (n,).

    The Z-algorithm (Gusfield 1997) on the reversed tokens, in O(n).
    """
    back: list[int] = tokens[::-1].tolist()
    size = len(back)
    lengths = [0] * size
    left = right = 0  # the matched window that ends farthest
    for start in range(1, size):
        length = min(right - start, lengths[start - left]) if start < right else 0
        while start + length < size and back[length] == back[start + length]:
            length += 1
        lengths[start] = length
        if start + length > right:
            left, right = start, start + length
    # A match ``start`` tokens before the end continues at that index.
    return np.array([0, *lengths[:0:-1]][:size], np.int32)


def grown(tokens: Ids, lengths: Ids, token: int) -> tuple[Ids, Ids]:
    """Append ``token`` to ``tokens``; return them and their ``repeat_lengths``."""
    longer = np.where(tokens == token, lengths + 1, 0)
    first = np.zeros(1, np.int32)
    return np.append(tokens, np.int32(token)), np.concatenate((first, longer), dtype=np.int32)


class Breakers:
    """Find the strings ``breakers`` in a sequence of tokens: no repetition spans them.

    A breaker lies in one token, or begins at a token's end and continues in the next ones.
    """

    def __init__(self, tokenizer: Tokenizer | None, breakers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._breakers = [text.encode("utf-8", "surrogateescape") for text in breakers]
        self._known: dict[int, tuple[tuple[int, ...], ...]] = {}

    def breaks(self, token: int) -> bool:
        """Whether ``token`` contains a whole breaker."""
        return () in self._tails(token)

    def since(self, tokens: Ids, most: int) -> int | None:
        """Count the tokens after the last breaker; None if the last ``most`` tokens have none."""
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
        """Return the token sequences that complete a breaker after ``token``; () completes one."""
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
