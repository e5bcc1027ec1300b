"""How the time of each change grows: ``python -m tests.history.growth`` prints a table.

A conversation has four turns of 60 words. Medians of five, in milliseconds; the first row has no
other conversations.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from localrt import History
from localrt.common.formatting import table
from localrt.history.operations import Begin, TurnData

SIZES, TURNS, RUNS = (300, 2_000, 20_000), 3_000, 5
_CHOICE = random.Random(1)
_WORDS = [f"word{number}" for number in range(30_000)]


def turns(count: int) -> list[TurnData]:
    """Turns of a conversation."""
    texts = (" ".join(_CHOICE.choices(_WORDS, k=60)) for _ in range(count))
    return [TurnData(role=("user", "assistant")[n % 2], content=t) for n, t in enumerate(texts)]


def write(history: History, ids: Iterator[str], count: int) -> None:
    """Write conversations with these ids."""
    with history._database.transaction() as connection:
        for id in ids:
            made = Begin(conversation=id, model="m", system=None, options={}, turns=turns(count))
            made.apply(connection)


def median(do: Callable[[int], object]) -> str:
    """The median time of ``do`` with 0, 1, ..., in milliseconds."""
    took = []
    for number in range(RUNS):
        began = time.perf_counter()
        do(number)
        took.append(1000 * (time.perf_counter() - began))
    return f"{statistics.median(took):.1f}"


def row(folder: Path, size: int) -> list[str]:
    """A row of the table: with so many other conversations."""
    with History(folder / f"{size}.db") as history:
        write(history, (f"other {number}" for number in range(size)), 4)
        write(history, (f"short {number}" for number in range(RUNS)), 4)
        write(history, (f"long {number}" for number in range(2 * RUNS)), TURNS)
        history.delete("short 0")  # imports what deleting needs
        longs = [history.open(f"long {number}") for number in range(2 * RUNS)]
        tops = [talk.turns[TURNS // 3].id for talk in longs]
        answers = [talk.turns[-1].id for talk in longs]
        message = longs[0].add("user", "another one").id
        exported = [[{"role": "user", "content": each.content} for each in turns(4)]] * 100
        file = folder / "exported.json"
        file.write_text(json.dumps(exported))
        return [
            f"{size:,}",
            median(lambda n: history.list()),
            median(lambda n: history.list(f"{_WORDS[n]} {_WORDS[n + 1]}")),
            median(lambda n: longs[0].add("user", "more", after=message)),
            median(lambda n: longs[n].edit_answer(answers[n], "better")),
            median(lambda n: history.delete(f"short {n + 1}")),
            median(lambda n: longs[n].remove(tops[n])),
            median(lambda n: history.delete(f"long {RUNS + n}")),
            f"{float(median(lambda n: history.load_file(file))) / len(exported):.2f}",
        ]


def main() -> None:
    """Print the table."""
    heads = ("others", "list", "search", "message", "edit", "delete", "remove 2,000 turns")
    heads += ("delete 3,000 turns", "import, each")
    with tempfile.TemporaryDirectory() as folder:
        print(table([row(Path(folder), size) for size in SIZES], heads, "r" * len(heads)))


if __name__ == "__main__":
    main()
