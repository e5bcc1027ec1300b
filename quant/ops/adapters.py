"""Low-rank adapters as the steps see them: by tensor, and combined in adapter sets for a pass.

An adapter makes a matrix's products ``factors * (W x) + b @ (a @ x)`` (LoRA, arXiv:2106.09685; the
factors are DoRA's, arXiv:2402.09353). Sequences of one pass may have different adapters, or several
at once: each cache names the adapter set of its tokens (``KVCache.mix``), so that sessions,
batches, branches and saved conversations only compare it, and weights are read once for all
sequences (Punica, arXiv:2310.18547). Weights know only their tensor's name: adapters come and go
without reading weights, and streamed weights find their adapters by name. Rows without an adapter
give the same bits as without this module. Nothing here knows files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.quant.formats.packed import Floats

_MIXES = 8  # combined adapters, kept for the next pass

Rows: TypeAlias = npt.NDArray[np.intp]

Mix: TypeAlias = tuple[tuple[str, float], ...]
"""Adapters by their keys, and what each one's change is times; empty: none."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change of a matrix (out, in): ``a`` (rank, in), ``b`` (out, rank) with its scale.

    ``factors`` (out,) multiply W's own products; None is 1.
    """

    a: Floats
    b: Floats
    factors: Floats | None = None

    def of_rows(self, rows: Rows) -> LowRank:
        """The change of these rows alone."""
        factors = None if self.factors is None else self.factors[rows]
        return LowRank(self.a, np.ascontiguousarray(self.b[rows]), factors)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.a.nbytes + self.b.nbytes + (0 if self.factors is None else self.factors.nbytes)


class _Part(Protocol):
    @property
    def nbytes(self) -> int: ...


Part = TypeVar("Part", bound=_Part)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter(Generic[Part]):
    """One adapter: ``key`` names its contents, ``matrices`` are by the tensor that they change.

    ``Part`` is ``LowRank``, or what an implementation makes of it. The embedding's adds
    ``b @ a[:, token]`` to a token's row.
    """

    key: str
    matrices: Mapping[str, Part]
    embedding: LowRank | None = None
    head: LowRank | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        ends = [part.nbytes for part in (self.embedding, self.head) if part is not None]
        return sum(part.nbytes for part in self.matrices.values()) + sum(ends)


class AdapterTable(Generic[Part]):
    """The adapters that a model has loaded, by their keys.

    ``pack`` makes the implementation's parts; ``joined`` combines several, each with its weight.
    ``pieces`` of matrices, under names of their own, have some rows of a matrix's.
    """

    def __init__(
        self,
        pack: Callable[[Mapping[str, LowRank]], Mapping[str, Part]],
        joined: Callable[[Sequence[tuple[Part, float]]], Part],
    ) -> None:
        self._pack, self._joined = pack, joined
        self.used = False  # whether it has ever held an adapter
        self.pieces: dict[str, dict[str, Rows]] = {}  # by the matrix
        self._known: dict[str, Adapter[Part]] = {}
        self._mixed: dict[Mix, Adapter[Part]] = {}  # the latest is the last

    def __bool__(self) -> bool:
        return bool(self._known)

    def packed(self, adapter: Adapter[LowRank]) -> Adapter[Part]:
        """The adapter in the implementation's form."""
        matrices = dict(adapter.matrices)
        for name, part in adapter.matrices.items():
            for piece, rows in self.pieces.get(name, {}).items():
                matrices[piece] = part.of_rows(rows)
        return Adapter(adapter.key, self._pack(matrices), adapter.embedding, adapter.head)

    def add(self, packed: Adapter[Part]) -> None:
        """Make an adapter available to passes."""
        self.used = True
        self._known[packed.key] = packed

    def remove(self, key: str) -> None:
        """Remove an adapter that no sequence needs."""
        self._known.pop(key, None)
        self._mixed = {mix: a for mix, a in self._mixed.items() if key not in dict(mix)}

    def mixed(self, mix: Mix) -> Adapter[Part]:
        """The adapter set ``mix`` as one adapter: the same object if the next pass has it too.

        Raises:
            OptionError: one of the adapters is no longer loaded.
        """
        if any(key not in self._known for key, _ in mix):
            raise OptionError("the adapter was removed: the answer cannot go on without it")
        if len(mix) == 1 and mix[0][1] == 1.0:
            return self._known[mix[0][0]]
        found = self._mixed.pop(mix, None)
        if found is None:
            parts = [(self._known[key], weight) for key, weight in mix]
            names = {name: None for part, _ in parts for name in part.matrices}
            found = Adapter(
                repr(mix),
                {
                    name: self._joined(
                        [(p.matrices[name], w) for p, w in parts if name in p.matrices]
                    )
                    for name in names
                },
                _sum_of_some([(p.embedding, w) for p, w in parts]),
                _sum_of_some([(p.head, w) for p, w in parts]),
            )
        self._mixed[mix] = found
        while len(self._mixed) > _MIXES:
            del self._mixed[next(iter(self._mixed))]
        return found


def _sum_of_some(parts: Sequence[tuple[LowRank | None, float]]) -> LowRank | None:
    there = [(part, weight) for part, weight in parts if part is not None]
    return joined(there) if there else None


def joined(parts: Sequence[tuple[LowRank, float]]) -> LowRank:
    """Several changes of one matrix as one: their ranks side by side."""
    a = np.concatenate([part.a for part, _ in parts])
    b = np.concatenate([np.float32(weight) * part.b for part, weight in parts], axis=1)
    return LowRank(a, b, joined_factors([(part.factors, weight) for part, weight in parts]))


def joined_factors(parts: Iterable[tuple[Floats | None, float]]) -> Floats | None:
    """The factors of W's own products: each adapter's change of them, weighted."""
    factors: Floats | None = None
    for own, weight in parts:
        if own is not None:
            change = np.float32(weight) * (own - np.float32(1))
            factors = change + (np.float32(1) if factors is None else factors)
    return factors


def adapted_rows(
    table: AdapterTable[Part], spans: Iterable[tuple[Mix, int]]
) -> list[tuple[slice, Adapter[Part]]]:
    """The adapters of a pass's rows, if any; ``spans`` are adapter sets and row counts."""
    found, at = [], 0
    for mix, rows in spans:
        if mix:
            found.append((slice(at, at + rows), table.mixed(mix)))
        at += rows
    return found


def head_deltas(
    of_rows: Sequence[tuple[slice, Adapter[Part]]],
    logit_rows: npt.NDArray[np.intp],
    normed: Callable[[int], Floats],
    first_row: int,
    logits: Floats,
) -> None:
    """Add to ``logits`` (logit rows, V) the adapters' changes of a head, from one of its rows on.

    ``normed`` gives a row's inputs (D,).
    """
    for at, row in enumerate(logit_rows.tolist()):
        for part, adapter in of_rows:
            if adapter.head is not None and part.start <= row < part.stop:
                b = adapter.head.b[first_row : first_row + logits.shape[1]]
                if (factors := adapter.head.factors) is not None:
                    logits[at] *= factors[first_row : first_row + logits.shape[1]]
                logits[at] += b @ (adapter.head.a @ normed(row))
