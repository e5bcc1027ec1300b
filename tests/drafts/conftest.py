"""What tests of drafts share: a tiny target and a tiny draft, and the place that is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localrt.drafts import gpu_placement
from localrt.drafts.placement import PairPlan
from tests.conftest import write_tiny_model

Choose = Callable[[str], list[PairPlan]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        (folder / name).mkdir()
        write_tiny_model(folder / name, context=256)
    return folder / "target", folder / "draft"


@pytest.fixture
def choose_place(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Have the planner choose the place of that name; what was planned since."""
    plan_pair = gpu_placement.plan_pair

    def choose(place: str) -> list[PairPlan]:
        plans = list[PairPlan]()

        def planned(*args: Any, **options: Any) -> PairPlan:
            plan = plan_pair(*args, **options)
            assert plan is not None
            best = next(each for each in plan.candidates if each.place == place)
            assert best.plan is not None, best.problem
            plans.append(replace(plan, best=best))
            return plans[-1]

        monkeypatch.setattr(gpu_placement, "plan_pair", planned)
        return plans

    return choose
