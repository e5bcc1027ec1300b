"""A model whose status the test decides, and the status of a streamed one in the middle of work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localrt import Change, Outlook, Status
from localrt.engine.types import Metrics
from localrt.service.status import LaneUse, MemoryUse, PassTrace
from localrt.tui.chat.panel_lines import PanelData
from tests.tui.fakes import FakeModel

__all__ = ["BEFORE", "OUTSTYLES", "STREAMED", "VIEW", "WatchedModel"]

PASS = PassTrace(
    seconds=0.02,
    lanes=(LaneUse("ssd", ((0.0, 0.019),)), LaneUse("cpu", ((0.0, 0.002), (0.01, 0.014)))),
    waited_s=0.014,
)
STREAMED = Status(
    clock_s=10.0,
    streamed=True,
    generating=True,
    ram=MemoryUse(138_000_000, 145_000_000),
    vram=None,
    kv=MemoryUse(3_200_000, 189_000_000),
    weight_bytes=96_000_000,
    tokens=40,
    passes=40,
    ssd_read_bytes=1_760_000_000,
    link_bytes=0,
    busy_s={"ssd": 0.97, "cpu": 0.3},
    ceiling_tok_s=66.0,
    metrics=Metrics(
        completion_tokens=40,
        decode_tok_s=41.2,
        accepted_per_pass=1.8,
        accepted_by_source={"ngram": 0.41},
        speculation="speculation: ngram",
    ),
    last_pass=PASS,
)
BEFORE = replace(
    STREAMED, clock_s=9.0, tokens=0, passes=0, ssd_read_bytes=0, busy_s={"ssd": 0.0, "cpu": 0.0}
)
OUTSTYLES = Outlook(
    66.0,
    96_000_000,
    (
        Change("110 MB more RAM", 210.0, 3.8),
        Change("a disk twice as fast", 80.0, 2.0),
    ),
)
VIEW = PanelData(
    status=STREAMED,
    flow=STREAMED.since(BEFORE),
    rates=(30.0, 38.0, 41.0, 40.0),
    outlook=OUTSTYLES,
    hide="F3",
)


class WatchedModel(FakeModel):
    """``now`` is its status, ``looks`` are the wishes that came with each question."""

    def __init__(self, *arguments: Any, **info: Any) -> None:
        super().__init__(*arguments, **info)
        self.now = BEFORE
        self.looks: list[bool | None] = []
        self.advised = 0
        self.unloaded = False

    def status(self, *, lanes: bool | None = None) -> Status:
        self.looks.append(lanes)
        return self.now

    def advise(self) -> Outlook:
        self.advised += 1
        return OUTSTYLES

    def unload(self) -> None:
        self.unloaded = self.closed = True
