"""What tests of drafts share: a tiny target and a tiny draft, and a way that the planner takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localrt.offload.planner import pair
from localrt.offload.planner.pair import PairPlan, PairRequest
from tests.conftest import write_tiny_model

Choose = Callable[[str], list[PairRequest]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        (folder / name).mkdir()
        write_tiny_model(folder / name, context=256)
    return folder / "target", folder / "draft"


@pytest.fixture
def choose_way(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Have the planner's choice be the way of that name; what was planned for since."""
    plan_pair = pair.plan_pair

    def choose(way: str) -> list[PairRequest]:
        requests = list[PairRequest]()

        def planned(request: PairRequest) -> PairPlan | None:
            plan = plan_pair(request)
            requests.append(request)
            assert plan is not None
            found = plan.way(way)  # type: ignore[arg-type]
            assert found is not None
            assert found.plan is not None, found.problem
            return replace(plan, best=found)

        monkeypatch.setattr(pair, "plan_pair", planned)
        return requests

    return choose
