"""Whether a model is fast enough to chat with, in one line."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.planning.forecast import Prediction, judge

GB = 10**9


def predicted(*, read: int = 0, copied: int = 0, **changed: Any) -> Prediction:
    """A dense model of 5 GB in RAM, with this changed."""
    values = {"tok_s": 23.4, "page_s": 2.5, "weights": 5 * GB, "needed": 5 * GB, **changed}
    return Prediction(
        **{"on_gpu": 0, "by_cpu": 0, **values},
        ceiling_tok_s=100.0,
        bottleneck="cpu",
        efficiency=1.0,
        prefill_tok_s=200.0,
        held=0,
        full_context_tok_s=None,
        nbytes={"ssd": read, "link": copied, "ram": 0.0, "vram": 0.0},
        busy={},
        waits={},
        pass_s=0.04,
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "Good for chat: 23 tok/s, all of it in memory"),
        ({"on_gpu": 5 * GB}, "Good for chat: 23 tok/s, all of it in GPU memory"),
        ({"on_gpu": 2 * GB}, "Good for chat: 23 tok/s, 2 of 5 GB in GPU memory, the rest in RAM"),
        (
            {"read": 700_000_000},
            "Good for chat: 23 tok/s, 700 MB of 5 GB are read from the SSD for every token",
        ),
        (
            {"tok_s": 3.21},
            "Usable for chat: 3.2 tok/s, because the CPU has to go through 5 GB for every token",
        ),
        (
            {"tok_s": 5.0, "on_gpu": 2 * GB},
            "Usable for chat: 5.0 tok/s, because the CPU computes 3 of 5 GB for every token",
        ),
        (
            {"tok_s": 0.9, "weights": 40 * GB, "needed": 40 * GB, "read": 31 * GB},
            "Too slow for chat: 0.90 tok/s, because 31 of 40 GB are read from the SSD for every "
            "token",
        ),
        (
            {"tok_s": 1.5, "copied": 2 * GB},
            "Too slow for chat: 1.5 tok/s, because 2 of 5 GB are copied to the GPU for every token",
        ),
        (
            {"page_s": 25.0},
            "Usable for chat: 23 tok/s, all of it in memory; a page of text takes 25 s to read",
        ),
        (
            {"page_s": 100.0},
            "Too slow for chat: 23 tok/s, all of it in memory; a page of text takes 1 min 40 s to "
            "read",
        ),
    ],
)
def test_judge(changed: dict[str, Any], text: str) -> None:
    verdict = judge(predicted(**changed))
    assert str(verdict) == text
    assert verdict.level == {"Good": "good", "Usab": "usable", "Too ": "slow"}[text[:4]]
