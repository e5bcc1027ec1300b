"""Lists which models with short names a PC runs well: ``localrt plan`` without a model.

Estimates use the configs that come with localrt: all models take seconds, without the network. For
each model, the estimate is for the file that ``localrt chat`` would choose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from localrt.common.formatting import format_bytes, format_seconds, table
from localrt.common.settings import Settings
from localrt.hub.known_models import KNOWN_MODELS, KnownModel, repo_thinks
from localrt.offload.account import Budgets
from localrt.offload.memory import ram_budget
from localrt.planning.forecast import PROMPT_TOKENS, Level, Prediction, meanings, speed
from localrt.planning.machine import MachineProfile
from localrt.planning.measure import Hardware, budgets_of, machine_on_device, planned_hardware
from localrt.planning.recommending import Recommendation, recommend_on, usual_offer
from localrt.planning.report import figures, gpu_room, other_gpu_line

_ORDER: dict[Level, int] = {"good": 0, "usable": 1, "slow": 2}
_WORDS: dict[Level, str] = {"good": "good", "usable": "usable", "slow": "too slow"}
_WELL_KNOWN = ("llama", "qwen", "gemma", "gpt-oss", "mistral", "ministral", "devstral", "phi")
_LESS_KNOWN = 1 / 3  # a model of another family counts as one of this part of its size
_MARGIN = 1.25  # forecasts err: only what is faster than enough by this is surely so


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model in one ``quantization`` and its ``expected`` speed; both None if it cannot run."""

    model: KnownModel
    quantization: str | None
    expected: Prediction | None

    @property
    def level(self) -> Level:
        """How good the model is for chat; ``"slow"`` if it does not fit."""
        return "slow" if self.expected is None else self.expected.level

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        found = self.expected
        expected: dict[str, object] = {}
        if found is not None:
            expected = {
                "tok_s": found.tok_s,
                "prefill_tok_s": PROMPT_TOKENS / found.page_s,
                "nbytes": found.weights,
                "needed": found.needed,
                "read": found.read,
                "copied": found.copied,
                "on_gpu": found.on_gpu,
                "by_cpu": found.by_cpu,
                "thinks": found.thinks,
                "gpu_unused": found.gpu_unused,
            }
        return {
            "name": self.model.name,
            "repo": self.model.repo,
            "parameters": round(self.model.parameters * 1e9),
            "quantization": self.quantization,
            "verdict": self.level,
            "fits": self.expected is not None,
            **expected,
        }


@dataclass(frozen=True, slots=True)
class WhatRuns:
    """All known models on ``machine`` within ``budgets``, the best first."""

    machine: MachineProfile
    budgets: Budgets
    models: tuple[Runnable, ...]
    hypothetical: tuple[str, ...] = ()
    note: str = ""

    @property
    def best(self) -> tuple[Runnable, ...]:
        """The best model of each family that is good or usable for chat."""
        found: dict[str, Runnable] = {}
        for each in self.models:
            if each.level != "slow":
                found.setdefault(each.model.family, each)
        return tuple(found.values())

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {
            "simulated": True,
            "hypothetical": list(self.hypothetical),
            "machine": self.machine.to_dict(),
            "budgets": asdict(self.budgets),
            "models": [each.to_dict() for each in self.models],
        }

    def report(self) -> str:
        """Return the table of models, and commands to type."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        where = "a PC like that" if self.hypothetical else "this PC"
        best = self.best
        if not best:
            yield f"None of the known models runs well on {where}. The smallest is smollm2:"
            yield "  localrt chat smollm2"
            return
        yield f"What {where} runs well, the best first: of each family one, with 4,096 tokens"
        yield ""
        rows = [(*_row(each),) for each in best]
        headers = ("MODEL", "FILE", "SIZE", "TOK/S", "FIRST TOKEN", "WEIGHTS IN", "FOR CHAT")
        shown_table = table(rows, headers, "llrrr")
        yield shown_table
        yield ""
        shown = {each.model.family for each in best}
        slow = dict.fromkeys(
            each.model.name for each in self.models if each.model.family not in shown
        )
        if slow:
            yield f"Too slow or too large: {', '.join(slow)}"
        yield f"Forecasts from {', '.join(figures(self.machine))}"
        memory = f"{format_bytes(self.budgets.ram)} of RAM{gpu_room(self.machine, self.budgets)}"
        yield f"Memory for a model: {memory}; sizes of files are estimates."
        yield from meanings(shown_table)
        if self.note:
            yield f"Note: {self.note}"
        yield ""
        first = best[0].model.name
        yield f"  localrt chat {first}    downloads it, and chats"
        yield f"  localrt plan {first}    says more about it, or about any other model"


def what_runs(wanted: Hardware, settings: Settings) -> WhatRuns:
    """Estimate all known models.

    Raises:
        OptionError: a description of hardware that cannot be understood.
    """
    machine, budgets, note = planned_hardware(wanted, settings)
    note = ". ".join(filter(None, (note, other_gpu_line(machine))))
    return WhatRuns(machine, budgets, _ranked(machine, budgets), wanted.hypothetical, note)


def best_here(settings: Settings) -> Runnable | None:
    """The first of ``what_runs`` on this PC if it is good, by saved rates: nothing is measured."""
    machine, vram = machine_on_device(settings.hub_cache, settings, "auto", None)
    budgets = budgets_of(machine, ram_budget(None), vram)
    best = next(iter(WhatRuns(machine, budgets, _ranked(machine, budgets)).best), None)
    return best if best is not None and best.level == "good" else None


def _ranked(machine: MachineProfile, budgets: Budgets) -> tuple[Runnable, ...]:
    found: dict[tuple[object, ...], Recommendation] = {}  # some models differ only in their weights
    models = []
    for model in KNOWN_MODELS:
        key = model.shape, model.parameters, repo_thinks(model.repo)
        if key not in found:
            found[key] = recommend_on(usual_offer(model), machine, budgets)
        best = found[key]
        models.append(Runnable(model, best.name if best.expected else None, best.expected))
    return tuple(sorted(models, key=lambda each: _rank(each, budgets.ram + budgets.vram)))


def _rank(each: Runnable, memory: int) -> tuple[int, bool, bool, float]:
    """Sort key: the better level first, then models with room in ``memory`` and time to spare, then
    those in memory, then the larger ones, of which those of well-known families count more.
    """
    size, found = each.model.parameters, each.expected
    size *= 1 if each.model.family.startswith(_WELL_KNOWN) else _LESS_KNOWN
    quick = found is not None and found.tok_s >= _MARGIN * found.enough_tok_s
    spare = quick and found is not None and found.has_room(memory)
    return _ORDER[each.level], not spare, found is None or found.read > 0, -size


def _row(each: Runnable) -> Iterable[str]:
    assert each.expected is not None, "it runs"
    yield each.model.name
    yield each.quantization or ""
    yield format_bytes(each.expected.weights)
    yield speed(each.expected.tok_s).removesuffix(" tok/s")
    yield format_seconds(each.expected.page_s)
    yield each.expected.place
    yield _WORDS[each.level]
