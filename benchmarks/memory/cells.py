"""The matrix: models, formats, budgets, contexts, drafts, ways to run. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

_PROCESS = 70_000_000  # what a budget has beside its share of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """``ram`` is a share of the model's file beside the process, ``"least"`` what the refusal of
    a smaller budget says that would do, None no budget.

    ``way`` is ``"generate"`` (several prompts, one with an answer of ``long_answer`` tokens),
    ``"fill"`` (a prompt and a long answer that together fill the context), ``"text"`` (as much text
    as the context holds), ``"chat"``, ``"json"`` (an answer under a schema), ``"run"`` (the
    command) or ``"serve"`` (several clients).
    ``cold``: nothing was measured on this machine before.
    """

    model: str
    way: str = "generate"
    ram: float | str | None = None
    ctx: int | None = None
    format: str | None = None
    kv_format: str | None = None
    draft: str = "auto"
    long_answer: int = 400
    cold: bool = False

    @property
    def name(self) -> str:
        """All that is not usual."""
        ram = f"ram {self.ram:g}" if isinstance(self.ram, float) else f"ram {self.ram or 'free'}"
        words = [self.model, self.way, ram]
        words += [f"ctx {self.ctx}"] if self.ctx else []
        words += [f"kv {self.kv_format}"] if self.kv_format else []
        words += [self.format] if self.format else []
        words += [f"draft {self.draft}"] if self.draft != "auto" else []
        return ", ".join([*words, "first run"] if self.cold else words)

    def budget(self, file_nbytes: int) -> int | None:
        """Bytes, where they are a share of the file."""
        return round(_PROCESS + self.ram * file_nbytes) if isinstance(self.ram, float) else None


def _cells() -> Iterator[Cell]:
    for model, shares in (
        ("smollm2", (None, 1.5, 1.0, 0.7, 0.4, 0.25, "least")),
        ("qwen0.5b", (None, 1.3, 0.9, 0.5, 0.2, "least")),
        ("qwen1.5b", (None, 0.7, 0.3, "least")),
    ):
        # What is mostly read from the disk for each token takes its time.
        long = {"long_answer": 100} if model == "qwen1.5b" else {}
        for ram in shares:
            for ctx in (1024, 4096) if ram == "least" else (2048,):
                yield Cell(model=model, ram=ram, ctx=ctx, **long)
                yield Cell(model=model, ram=ram, ctx=ctx, way="fill", **long)
            yield Cell(model=model, ram=ram, way="chat")
        for ram in (0.5, "least"):
            yield Cell(model=model, ram=ram, ctx=2048, way="text")
            yield Cell(model=model, ram=ram, ctx=2048, draft="off", **long)
            yield Cell(model=model, ram=ram, ctx=2048, kv_format="int8", way="fill", **long)
        yield Cell(model=model, ram=0.5, ctx=2048, kv_format="int4", way="fill", **long)
        for ram in (None, 1.5, 0.5, "least"):
            yield Cell(model=model, ram=ram, ctx=2048, way="serve")
        yield Cell(model=model, ram=0.5, ctx=2048, way="json")
        for ram in (0.1, 0.25, 0.5, 1.0, 2.5):
            yield Cell(model=model, ram=ram, ctx=1024, way="run")
            yield Cell(model=model, ram=ram, ctx=1024, way="run", cold=True)
    for ram in (None, 1.6, 1.0, 0.5):
        yield Cell(model="qwen1.5b", ram=ram, ctx=2048, draft="qwen0.5b", long_answer=100)
    for format_ in ("bf16", "f32"):
        yield Cell(model="smollm2", ctx=2048, format=format_)


CELLS = {cell.name: cell for cell in _cells()}
"""All of them, by name."""

_TESTED = (
    "smollm2, generate, ram free, ctx 2048",
    "smollm2, generate, ram 1.5, ctx 2048",
    "smollm2, generate, ram 0.4, ctx 2048",
    "smollm2, fill, ram 0.7, ctx 2048",
    "smollm2, fill, ram least, ctx 1024",
    "smollm2, fill, ram least, ctx 2048, kv int8",
    "smollm2, chat, ram 0.25",
    "smollm2, text, ram least, ctx 2048",
    "smollm2, json, ram 0.5, ctx 2048",
    "smollm2, serve, ram 0.5, ctx 2048",
    "smollm2, run, ram 0.25, ctx 1024, first run",
)
TESTED = tuple(
    cell if cell.ram in (None, 1.5) else replace(cell, long_answer=40)  # read for each token
    for cell in map(CELLS.__getitem__, _TESTED)
)
"""Those that are tests."""
