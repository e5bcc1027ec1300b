"""The page: what it shows, and that nothing in a name becomes a part of it."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.bench.page import to_html
from localrt.bench.workload import BenchOptions, Outcome, Result, Skipped, Workload
from localrt.offload.hardware import GpuFacts, Machine, probe

HOSTILE = [
    "<script>alert(1)</script>",
    "</svg></style><img src=http://example.org/x onerror=alert(1)>",
    '" onload="alert(1)',
    "' onload='alert(1)",
    "{title} {0} %s url(http://example.org) @import",
    "a\x00\ud800\u202e\x1b]0;\ufffe&amp;",
]
VOID = {"meta"}
OPTIONS = BenchOptions(path=Path("m"), engines=("native",), workload=Workload(20, 5, 2))
MACHINE = probe()
object.__setattr__(MACHINE, "gpus", (GpuFacts("a GPU", 8 << 30, driver="580.1"),))
METRICS: dict[str, Any] = {
    "completion_tokens": 5,
    "ttft_s": 1.3,
    "tpot_s": 0.05,
    "prefill_tok_s": 400.0,
    "decode_tok_s": 25.0,
    "peak_ram_bytes": 2 * 10**9,
    "peak_vram_bytes": 7 * 10**9,
    "joules_per_token": None,
}
INFO = {"device": "cuda:0", "streamed": True, "weight_bytes": 10**9, "parameters": 2 * 10**9}


class _Reader(HTMLParser):
    """Checks that tags are closed in order; collects tags, attributes and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str | None]] = {}
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


KNOWN_TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "p"}
KNOWN_TAGS |= {"div", "table", "tr", "th", "td", "svg", "text", "rect"}
KNOWN_ATTRIBUTES = {"lang", "charset", "name", "content", "class", "colspan", "viewbox", "role"}
KNOWN_ATTRIBUTES |= {"aria-label", "x", "y", "width", "height"}


def _read(name: str, varied: str = "", machine: Machine = MACHINE) -> _Reader:
    result = Result("native", name, METRICS, [METRICS, METRICS], 0.1, INFO)
    failed = Skipped("native", name, f"{name} does not fit")
    outcome = Outcome([result], [failed], interleaved=False, varied=varied)
    html = to_html(outcome, OPTIONS, name=name, machine=machine)
    reader = _Reader(html)
    # Nothing that loads or runs: neither elements, nor attributes, nor CSS that do.
    assert reader.tags <= KNOWN_TAGS
    assert reader.attributes.keys() <= KNOWN_ATTRIBUTES
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"http|url\(|@import", style)
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)
    return reader


@given(name=st.one_of(st.text(max_size=60), st.sampled_from(HOSTILE)))
def test_well_formed_whatever_names_are(name: str) -> None:
    _read(name)


@pytest.mark.parametrize("varied", ["", "threads", "model"])
def test_what_it_shows(varied: str) -> None:
    reader = _read("a & b", varied)
    text = " ".join(reader.text)
    assert "a & b: 20 prompt and 5 answer tokens, median of 2, on " in text
    assert "a GPU (8.6 GB of VRAM, driver 580.1)" in text
    for title in ("Decoding, tok/s", "First token (less is better)", "Peak VRAM (less is better)"):
        assert title in text
    assert "Energy per token" not in text, "nobody measured it"
    assert "a & b does not fit" in text
    assert "tok/s: tokens per second" in text
    assert ("Streamed: some weights are" in text) == ("1 GB 4.00" in text) == (varied == "model")
    assert (" with " in text) == (varied != "threads")
    assert len(reader.attributes["colspan"]) == 1, "the reason why one did not run"


def test_bars() -> None:
    fast = Result("native", "q4", METRICS, [METRICS], 0.1, INFO)
    slow = {**METRICS, "decode_tok_s": 5.0, "peak_vram_bytes": None}
    outcome = Outcome([fast, Result("llamacpp", "plain", slow, [slow], 0.1, INFO)], [], False)
    html = to_html(outcome, OPTIONS, name="m", machine=MACHINE)
    plots = {svg.split('aria-label="')[1].split('"')[0]: svg for svg in html.split("<svg ")[1:]}
    widths = re.findall(r'width="([\d.]+)"', plots["Decoding, tok/s"])
    assert float(widths[0]) == pytest.approx(5 * float(widths[1]), rel=0.01)
    assert 'width="0.0"' in plots["Peak VRAM (less is better)"]
    assert "not measured" in plots["Peak VRAM (less is better)"]
    assert "llamacpp plain" in html
    variables = set(re.findall(r"var\((--\w+)\)", html))
    assert all(html.count(f"{each}: #") == 2 for each in variables), "light, and dark"
