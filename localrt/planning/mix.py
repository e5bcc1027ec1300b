"""Chooses a format for each group of matrices, with the least loss for a number of bits per weight.

``LossTable`` has the loss of each group in each format; ``losses.py`` measures it. It is saved next
to the stores, by its model's fingerprint, so that other sizes need no new measurement and plans can
predict their loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import parse_json, write_text
from localrt.quant.formats import FORMATS

MIX_FORMATS = ("q2_k", "q3_k", "iq4_nl", "int6-g32")
"""The formats of a mix, from few bits to many."""

MIX_METHOD = "gptq"


@dataclass(frozen=True, slots=True)
class GroupLoss:
    """A group of matrices that get one format: ``weights`` is their number of weights, ``nats`` the
    loss per token in each possible format.

    ``tensors`` are their names, with ``*`` for an expert's number.
    """

    tensors: tuple[str, ...]
    weights: int
    nats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossTable:
    """Losses of the model with ``fingerprint``, measured on ``tokens`` tokens of the text with
    digest ``calibration``.

    ``scale`` is the measured loss of the last written mix divided by the loss in this table, which
    is for rounded weights: calibrated ones lose less.
    """

    fingerprint: str
    calibration: str
    tokens: int
    groups: tuple[GroupLoss, ...]
    scale: float = 1.0

    @property
    def least_bits(self) -> float:
        """Bits per weight of the smallest mix."""
        return self.bits([min(group.nats, key=_bits) for group in self.groups])

    def bits(self, formats: list[str]) -> float:
        """Bits per weight of the layers, with a format for each group."""
        pairs = list(zip(self.groups, formats, strict=True))
        return sum(g.weights * _bits(f) for g, f in pairs) / sum(g.weights for g, _ in pairs)

    def nats(self, formats: list[str]) -> float:
        """The loss per token: the sum over groups."""
        return sum(group.nats[f] for group, f in zip(self.groups, formats, strict=True))

    def loss(self, bits: float) -> float | None:
        """The loss of a mix of ``bits`` per weight; None if no mix is that small."""
        if bits < self.least_bits:
            return None
        return self.scale * self.nats(self.choose(bits))

    def choose(self, bits: float) -> list[str]:
        """Choose a format for each group, with the least loss for at most ``bits`` per weight.

        Steps to larger formats are taken in order of the loss saved per bit, if they fit. The
        result is at most one step worse than the best choice (Shoham and Gersho 1988).

        Raises:
            OptionError: the smallest mix takes more bits.
        """
        if self.least_bits > bits + 1e-9:
            raise OptionError(
                f"{bits:g} bits per weight are too few: the smallest mix has {self.least_bits:.2f}"
            )
        hulls = [_hull(group) for group in self.groups]
        chosen = [hull[0] for hull in hulls]
        room = (bits - self.bits(chosen)) * sum(group.weights for group in self.groups) + 0.5
        steps = sorted(
            (-_saved(group, low, high), number, high, group.weights * (_bits(high) - _bits(low)))
            for number, (group, hull) in enumerate(zip(self.groups, hulls, strict=True))
            for low, high in pairwise(hull)
        )
        full: set[int] = set()
        for _, number, high, size in steps:
            if number in full or size > room:
                full.add(number)  # the group's next formats are larger still
                continue
            chosen[number] = high
            room -= size
        return chosen

    def to_json(self) -> str:
        """The table as the text of a JSON file."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, written: str) -> LossTable:
        """The inverse of ``to_json``.

        Raises:
            LocalrtError: the text is not a valid table.
        """
        try:
            fields = parse_json(written)
            groups = tuple(
                GroupLoss(
                    tuple(map(str, group["tensors"])),
                    int(group["weights"]),
                    {f: float(nats) for f, nats in group["nats"].items() if f in FORMATS},
                )
                for group in fields["groups"]
            )
            mark, text = str(fields["fingerprint"]), str(fields["calibration"])
            scale = float(fields["scale"])
            table = cls(mark, text, int(fields["tokens"]), groups, scale)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LocalrtError(f"the table of losses is damaged: {error}") from None
        numbers = [scale, *(nats for group in groups for nats in group.nats.values())]
        if not all(group.nats and group.weights > 0 for group in groups) or not all(
            isfinite(number) and number >= 0 for number in numbers
        ):
            raise LocalrtError("the table of losses is damaged: it lacks formats or numbers")
        return table

    def save(self, folder: Path) -> None:
        """Save the table in ``folder``, where ``known_losses`` finds it."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(table_path(folder, self.fingerprint), self.to_json())


def table_path(folder: Path, fingerprint: str) -> Path:
    """The path of a model's table."""
    return folder / f"{fingerprint[:32]}.json"


def known_losses(folder: Path, fingerprint: str) -> LossTable | None:
    """The saved table of a model, if there is one and it can be read."""
    try:
        table = LossTable.from_json(table_path(folder, fingerprint).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, LocalrtError):
        return None
    return table if table.fingerprint == fingerprint and table.groups else None


def _bits(format_: str) -> float:
    return FORMATS[format_].bits_per_weight


def _saved(group: GroupLoss, low: str, high: str) -> float:
    """The loss saved per additional bit, in nats."""
    more = group.weights * (_bits(high) - _bits(low))
    return (group.nats[low] - group.nats[high]) / more


def _hull(group: GroupLoss) -> list[str]:
    """The formats worth choosing (the convex hull), smallest first: each step saves less per bit
    than the last.
    """
    hull: list[str] = []
    for high in sorted(group.nats, key=_bits):
        if hull and group.nats[high] >= group.nats[hull[-1]]:
            continue
        while len(hull) > 1 and _saved(group, hull[-2], hull[-1]) <= _saved(group, hull[-1], high):
            hull.pop()
        hull.append(high)
    return hull
