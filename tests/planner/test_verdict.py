"""Whether a model is fast enough to chat with, in one line."""

from __future__ import annotations

import pytest

from localrt.planning.verdict import Expected, judge

GB = 10**9
FITS = Expected(tok_s=23.4, prefill_tok_s=200, nbytes=5 * GB, needed=5 * GB)


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
            {"tok_s": 0.9, "nbytes": 40 * GB, "needed": 40 * GB, "read": 31 * GB},
            "Too slow for chat: 0.90 tok/s, because 31 of 40 GB are read from the SSD for every "
            "token",
        ),
        (
            {"tok_s": 1.5, "copied": 2 * GB},
            "Too slow for chat: 1.5 tok/s, because 2 of 5 GB are copied to the GPU for every token",
        ),
        (
            {"prefill_tok_s": 20.0},
            "Usable for chat: 23 tok/s, all of it in memory; a page of text takes 25 s to read",
        ),
        (
            {"prefill_tok_s": 5.0},
            "Too slow for chat: 23 tok/s, all of it in memory; a page of text takes 1 min 40 s to "
            "read",
        ),
    ],
)
def test_judge(changed: dict[str, float], text: str) -> None:
    values = {name: getattr(FITS, name) for name in Expected.__slots__}
    verdict = judge(Expected(**{**values, **changed}))
    assert str(verdict) == text
    assert verdict.level == {"Good": "good", "Usab": "usable", "Too ": "slow"}[text[:4]]
