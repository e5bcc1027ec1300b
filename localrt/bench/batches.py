"""Times passes with different numbers of rows, and recommends how many answers to batch.

Mind the Memory Gap (Recasens et al. 2025) finds the batch at which a GPU's throughput levels off;
here every machine and model is measured. The server takes its default from the result.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from localrt.common.errors import MemoryBudgetError
from localrt.common.files import read_cached, write_text
from localrt.common.formatting import table
from localrt.engine.protocol import Engine, EngineSession
from localrt.offload import hardware

SIZES = (1, 2, 4, 8, 16, 32, 64)
_RUNS = 7
_PROMPT = 16  # tokens of each sequence's prompt
_MOST_S = 60.0  # seconds of measuring, after which larger batches are skipped
_GAIN = 1.25  # the throughput gain that makes a larger size worthwhile, as each answer takes longer
_FILE = "batches.json"
_MOST_SAVED = 64  # models with saved advice


@dataclass(frozen=True, slots=True)
class PassTime:
    """The median ``seconds`` of a pass with one token of each of ``rows`` answers."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended batch: larger ones gain little. It reaches ``share`` of the highest measured
    throughput.

    ``limit`` is what limits larger batches: ``"computing"``, or ``"nothing measured"`` if the
    largest one still gained.
    """

    batch: int
    share: float
    limit: str


def time_passes(
    engine: Engine, *, runs: int = _RUNS, notify: Callable[[str], None] = lambda line: None
) -> list[PassTime]:
    """Time passes of increasing numbers of rows, until memory or a minute is used up."""
    sessions: list[EngineSession] = []
    found: list[PassTime] = []
    vocab, began = engine.info.vocab_size, time.monotonic()
    try:
        for rows in SIZES:
            if rows > 1 and (not engine.shares_passes or rows > engine.pass_rows):
                break
            try:
                while len(sessions) < rows:
                    sessions.append(engine.session(_PROMPT + len(SIZES) * (runs + 1)))
                    first = 7 * len(sessions)
                    sessions[-1].extend([(first + i) % vocab for i in range(_PROMPT)])
                times = [_time(engine, sessions, vocab) for _ in range(runs + 1)]
            except MemoryBudgetError:
                notify(f"the caches of {rows} answers do not fit")
                break
            found.append(PassTime(rows, median(times[1:])))  # the first one warms up
            notify(f"{rows} answers: {1e3 * found[-1].seconds:.1f} ms a pass")
            if time.monotonic() - began > _MOST_S:
                break
    finally:
        for session in sessions:
            session.close()
    return found


def _time(engine: Engine, sessions: Sequence[EngineSession], vocab: int) -> float:
    parts = [(one, [(31 * len(one.tokens)) % vocab]) for one in sessions]
    began = time.perf_counter()
    engine.extend_batch(parts, wanted=range(len(parts)), check=lambda: None)
    return time.perf_counter() - began


def advise(times: Sequence[PassTime]) -> Advice:
    """Return the batch at which passes stop gaining."""
    rates = [each.rows / each.seconds for each in times]
    last = len(times) - 1
    best = next((i for i in range(last) if rates[i + 1] < _GAIN * rates[i]), last)
    limit = "nothing measured" if best == last else "computing"
    return Advice(times[best].rows, rates[best] / max(rates), limit)


def to_table(times: Sequence[PassTime], advice: Advice) -> str:
    """Return the measurements and the advice as text."""
    rows = [
        [
            str(each.rows),
            f"{1e3 * each.seconds:.1f}",
            f"{each.rows / each.seconds:.1f}",
            f"{1 / each.seconds:.1f}",
            f"{each.seconds / times[0].seconds:.2f}",
        ]
        for each in times
    ]
    head = ["answers", "ms a pass", "tok/s together", "tok/s each", "vs. one alone"]
    if advice.limit == "computing":
        why = "Computing limits larger batches: each answer takes longer, and little is gained."
    else:
        why = "It is the largest that was measured: more may gain."
    shown = table(rows, head, "rrrrr")
    share = f"{100 * advice.share:.0f} %"
    return (
        f"{shown}\n\n{advice.batch} answers at a time: {share} of the highest throughput. {why}\n"
        "localrt serve MODEL takes this as its --max-running, 4 at least."
    )


# -- saved advice for a model on this machine ------------------------------------------------------


def save_advice(cache: Path, model: Path, times: Sequence[PassTime], advice: Advice) -> None:
    """Save the advice for the server.

    Raises:
        StorageError: it cannot be written.
    """
    known = read_cached(cache / _FILE)
    known.pop(_key(model), None)
    entry = {"batch": advice.batch, "times": [asdict(each) for each in times]}
    kept = dict([*known.items(), (_key(model), entry)][-_MOST_SAVED:])
    write_text(cache / _FILE, json.dumps(kept), folder=True)


def saved_batch(cache: Path, model: Path) -> int | None:
    """Return the batch that was advised for this model on this machine, if any."""
    entry = read_cached(cache / _FILE).get(_key(model))
    batch = entry.get("batch") if isinstance(entry, dict) else None
    return batch if isinstance(batch, int) and 1 <= batch <= SIZES[-1] else None


def _key(model: Path) -> str:
    status = model.stat()
    facts = [*hardware.identity(), str(model.resolve()), str(status.st_size), status.st_mtime_ns]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
