"""``localrt bench --gpu-memory 8GB`` without a GPU: a named card, planned and simulated.

This machine's disk, memory and processor are as measured, the card and its link are the table's,
and nothing runs on it. What comes out has the form of a measurement and says ``simulated``
throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localrt.bench.card_use import CardUse, what_helps
from localrt.bench.outcome import BenchOptions, Outcome, Result
from localrt.engine.types import Metrics
from localrt.errors import OptionError
from localrt.formatting import format_bytes
from localrt.machine import hardware
from localrt.offload.memory.process import ram_budget
from localrt.offload.planner import Plan, PlanRequest, make_plan
from localrt.offload.planner.cards import CARDS, DEFAULT_CARD, Card
from localrt.offload.planner.explain import explain
from localrt.offload.shapes import parse_kv_format
from localrt.planning.inputs import Hardware, budgets_of, machine_of, with_card
from localrt.planning.models import shape_of
from localrt.settings import Settings

__all__ = ["CardRun", "card_for", "simulate_card", "wants_card"]


@dataclass(frozen=True, slots=True)
class CardRun:
    """A plan for a card that is not here, and its prediction in the form of a measurement."""

    card: Card
    plan: Plan
    outcome: Outcome

    @property
    def text(self) -> str:
        """The whole for people, labelled."""
        link = f"{self.card.link_bytes_s / 1e9:.3g} GB/s"
        return (
            f"SIMULATED: no GPU here. A named card, {self.card.name} (link {link}), its memory "
            f"capped at {format_bytes(self.plan.request.budgets.vram)}; nothing ran on it.\n\n"
            + explain(self.plan)
        )

    def to_dict(self) -> dict[str, Any]:
        """What a report has beside the results: the card and the plan."""
        card = self.card
        return {
            "simulated": True,
            "card": {
                "name": card.name,
                "vram_bytes": card.vram_bytes,
                "link_bytes_s": card.link_bytes_s,
                "memory_bytes_s": card.bytes_s,
                "flops": card.flops,
            },
            "plan": self.plan.to_dict(),
        }


def wants_card(options: BenchOptions) -> bool:
    """Whether GPU memory was asked for, of whatever card there is, and there is none."""
    any_card = options.gpu_memory is not None and options.device in (None, "auto")
    return any_card and not hardware.gpus()


def card_for(gpu_memory: int) -> Card:
    """The smallest card of the table with that much memory; of several, the usual one.

    Raises:
        OptionError: none has it.
    """
    large = [card for card in CARDS.values() if card.vram_bytes >= gpu_memory]
    if not large:
        most = max(card.vram_bytes for card in CARDS.values())
        raise OptionError(
            f"there is no GPU here, and no card with {format_bytes(gpu_memory)} in the table (up to"
            f" {format_bytes(most)}): try one that is made up, such as"
            " --device virtual:24GB@25GB/s,900GB/s,80TFLOPS"
        )
    return min(large, key=lambda card: (card.vram_bytes, card.name != DEFAULT_CARD))


def simulate_card(options: BenchOptions, settings: Settings) -> CardRun:
    """Plan the model for the card that ``options.gpu_memory`` means, and predict the workload.

    Raises:
        MemoryBudgetError: it does not fit card, RAM and disk.
        LocalrtError: the model cannot be read, or no such card is known.
    """
    assert options.gpu_memory is not None
    work, card = options.workload, card_for(options.gpu_memory)
    shape = shape_of(options.path)
    machine, _ = machine_of(options.path, settings, shape)
    machine, vram = with_card(machine, Hardware(gpu=card.name, gpu_memory=options.gpu_memory))
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets_of(machine, ram_budget(options.ram, rss=0), vram),
        ctx=options.ctx or work.ctx,
        kv_format=parse_kv_format(options.kv_format or "bf16"),
        held=work.prompt_tokens + work.tokens // 2,
    )
    plan = make_plan(request, advise=True)
    found = plan.prediction
    busy: dict[str, float] = {
        name: seconds * found.tok_s for name, seconds in found.busy.items() if seconds
    }
    use = CardUse(busy, what_helps(busy, plan.changes))
    metrics = Metrics(
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.tokens,
        ttft_s=work.prompt_tokens / found.prefill_tok_s,
        tpot_s=1 / found.tok_s,
        prefill_tok_s=found.prefill_tok_s,
        decode_tok_s=found.tok_s,
        peak_vram_bytes=plan.memory.total("vram"),
        peak_ram_bytes=plan.memory.total("ram"),
        pipeline_efficiency=found.efficiency,
        ceiling_tok_s=found.ceiling_tok_s,
        predicted_tok_s=found.tok_s,
        exactness="approximate",
        simulated=True,
    )
    result = Result(
        engine="native",
        setting=card.name,
        metrics={
            **metrics.to_dict(),
            "read_bytes_per_token": None,
            "peak_cgroup_bytes": None,
            "long_ttft_s": work.long_prompt_tokens / found.prefill_tok_s or None,
            **use.to_dict(),
        },
        samples=(),
        load_s=0.0,
        info={"device": card.name, "architecture": shape.architecture},
    )
    return CardRun(card, plan, Outcome([result], [], interleaved=False))
