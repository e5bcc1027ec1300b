"""What a PC runs well, of the models with short names; and how long conversations may be."""

from __future__ import annotations

import socket

import pytest

import localrt
from localrt.common.settings import Settings
from localrt.hub.names import KNOWN_MODELS
from localrt.planning.measure import Hardware
from localrt.planning.recommend import what_runs

pytestmark = pytest.mark.usefixtures("quiet_machine")


def test_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("the network is not asked")

    monkeypatch.setattr(socket, "create_connection", refused)
    settings = Settings.from_environment()
    found = what_runs(Hardware(pc="gaming-pc"), settings)
    assert sorted(each.model.name for each in found.models) == sorted(
        model.name for model in KNOWN_MODELS
    )
    best = found.best
    assert len({each.model.family for each in best}) == len(best)
    assert best[0].level == "good"
    assert best[0].expected is not None
    assert not best[0].expected.read  # what is in memory comes before what is streamed
    large = next(each for each in found.models if each.model.name == "llama3.3:70b")
    assert large.level == "slow"
    assert large not in best
    (others,) = (line for line in found.report().splitlines() if line.startswith("Too slow"))
    assert "llama3.3:70b" in others.partition("large: ")[2].split(", ")
    poor = what_runs(Hardware(pc="4GB, SATA SSD, 2 cores"), settings)
    assert len(poor.best) < len(best)
    assert set(found.machine.sources.values()) <= {"given", "typical"}


@pytest.mark.usefixtures("quiet_machine")
def test_same_rates_as_plans() -> None:
    found = what_runs(Hardware(ram="8GB"), Settings.from_environment())
    plan = localrt.plan("llama3.2:3b", ram="8GB", advise=False)
    assert found.machine.ssd_bytes_s == plan.request.machine.ssd_bytes_s
    assert found.machine.kernels == plan.request.machine.kernels
    assert found.machine.sources["kernels"] == "measured"
    assert found.hypothetical in ((), ("--ram",))  # as this machine has them or not
    assert "What this PC runs well" in found.report() or found.hypothetical


@pytest.mark.parametrize("pc", ["office-laptop", "32GB, RTX 4060", "8GB", "23GB, 2 cores"])
def test_best_first(pc: str) -> None:
    """With room and speed to spare, then the largest, then what hardly fits."""
    found = what_runs(Hardware(pc=pc), Settings.from_environment())
    memory = found.budgets.ram + found.budgets.vram
    first = found.best[0].expected
    assert first is not None
    assert first.level == "good"
    assert first.weights <= 0.75 * memory
    assert first.tok_s >= 1.25 * first.enough_tok_s
    spare = [
        each.expected is not None
        and each.expected.has_room(memory)
        and each.expected.tok_s >= 1.25 * each.expected.enough_tok_s
        for each in found.best
        if each.level == "good"
    ]
    assert spare == sorted(spare, reverse=True)
    assert not found.best[0].model.family.startswith(("laguna", "mellum", "ornith", "apertus"))


def test_nothing_runs() -> None:
    found = what_runs(Hardware(pc="1GB, HDD, 2 cores, DDR3"), Settings.from_environment())
    if not found.best:
        assert "localrt chat smollm2" in found.report()


def test_contexts() -> None:
    found = localrt.plan("qwen3:8b", pc="office-laptop", format="int4-g32")
    largest, fast = found.contexts
    assert (largest.tokens, largest.whole) == (40_960, True)
    assert largest.tok_s < fast.tok_s
    assert fast.tokens < largest.tokens
    assert largest.command == "localrt chat qwen3:8b --ctx 40960"
    assert "all that the model has" in found.report
    tight = localrt.plan("qwen3:8b", pc="8GB", format="int4-g32", advise=True)
    assert not tight.contexts[0].whole
    assert "the most that fits" in tight.report
    assert not localrt.plan("qwen3:8b", pc="office-laptop", advise=False).contexts
