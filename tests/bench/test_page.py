import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor

from localrt.bench import plots
from localrt.bench.compare import compare
from localrt.bench.page import Page, page_of, read_report, to_html
from localrt.bench.plots import (
    DARK,
    LIGHT,
    Figure,
    _font,
    bars,
    drawn,
    heat_map,
    lines,
    number,
    table_figure,
    ticks,
)
from localrt.cli import main
from localrt.common.errors import OptionError
from tests.bench import reports

MAKE: list[Callable[[str], Page]] = [
    lambda name: page_of(reports.mix(name)),
    lambda name: page_of(reports.sweep(name)),
    lambda name: page_of(reports.card(name)),
    lambda name: compare(reports.mix(name), reports.mix(name, server="other"))[0],
    lambda name: compare(reports.sweep(name), reports.sweep("other"))[0],
]
HOSTILE = [
    "<script>alert(1)</script>",
    "</svg></style><img src=http://example.org/x onerror=alert(1)>",
    '" onload="alert(1)',
    "' onload='alert(1)",
    "{title} {0} %s url(http://example.org) @import",
    "a\x00\ud800\u202e\x1b]0;\ufffe&amp;",
]
VOID = {"meta"}


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


@pytest.fixture(autouse=True, scope="module")
def coarse() -> Iterator[None]:
    """Pictures have rough edges, as that takes a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_FINE", 2)
        yield


KNOWN_TAGS = {"html", "head", "meta", "title", "style", "body", "section", "h1", "h2", "p"}
KNOWN_TAGS |= {"div", "table", "tr", "th", "td", "svg"}
KNOWN_TAGS |= {"text", "rect", "line", "polyline", "polygon"}
KNOWN_ATTRIBUTES = {"lang", "charset", "name", "content", "class", "colspan", "viewbox", "role"}
KNOWN_ATTRIBUTES |= {"aria-label", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "points"}
KNOWN_ATTRIBUTES |= {"fill", "fill-opacity", "stroke", "stroke-width"}
KNOWN_ATTRIBUTES |= {"font-size", "font-weight", "text-anchor"}


def _check(page: Page) -> _Reader:
    html = to_html(page)
    reader = _Reader(html)
    # Nothing that loads or runs: neither elements, nor attributes, nor CSS that do.
    assert reader.tags <= KNOWN_TAGS
    assert reader.attributes.keys() <= KNOWN_ATTRIBUTES
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"http|url\(|@import", style)
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)
    for _, blocks in page.sections:
        for block in blocks:
            drawn(block if isinstance(block, Figure) else table_figure(block))
    return reader


@pytest.mark.parametrize("make", MAKE)
@given(name=st.one_of(st.text(max_size=60), st.sampled_from(HOSTILE)))
def test_well_formed_whatever_names_are(make: Callable[[str], Page], name: str) -> None:
    _check(make(name))


VALUES = st.one_of(
    st.none(),
    st.floats(),
    st.integers(),
    st.just(10**400),
    st.text(max_size=9),
    st.lists(st.none(), max_size=2),
    st.booleans(),
)


@given(data=st.data(), kind=st.sampled_from(["mix", "sweep", "card"]))
def test_damaged_reports(data: st.DataObject, kind: str) -> None:
    report = json.loads(json.dumps(getattr(reports, kind)()))
    at: Any = report
    while True:  # go down to some value, and replace it
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if key == "kind":
            return
        if not (isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans())):
            break
        at = at[key]
    at[key] = data.draw(VALUES)
    try:
        page = page_of(report) if kind == "card" else compare(report, getattr(reports, kind)())[0]
    except OptionError:
        return
    _check(page)


def test_mix_page() -> None:
    reader = _check(page_of(reports.mix("chat & co")))
    text = " ".join(reader.text)
    assert "localrt: 50 % of the requests met their goals" in text
    assert "chat & co" in text
    assert "at 6.0 s: first token 200 ms, 40 tokens, goals missed late" in text
    assert "p95 18.0 ms" in text
    assert "not measured" in text
    assert "Temperature" not in text, "nobody measured it"
    assert text.count("goals met") == 2, "the first run only, and the table's header"
    assert {"var(--good)", "var(--bad)"} <= reader.attributes["fill"]


def test_sweep_page() -> None:
    text = " ".join(_check(page_of(reports.sweep())).text)
    assert "Decoding, tok/s of all answers: batch / draft by prompt_tokens" in text
    assert "prompt_tokens=512 batch=4 threads=2 draft=off" in text
    assert "m does not fit" in text


def test_card_page() -> None:
    reader = _check(page_of(reports.card()))
    text = " ".join(reader.text)
    assert "+1.20 % ± 0.30 %" in text
    assert "What runs on a GPU and a CPU" in text
    assert "a GPU (8 GB of VRAM, driver 580.1)" in text
    assert "2 GB 7 GB not measured" in re.sub(r"\s+", " ", text), "RAM, VRAM, energy"
    assert "m, streamed" in text
    for word in ("tok/s: tokens per second", "Perplexity: how much", "Streamed: some weights are"):
        assert word in text
    assert reader.attributes["colspan"] == {"9"}, "the reason why a model did not run"


def test_light_and_dark() -> None:
    html = to_html(page_of(reports.card()))
    assert LIGHT.keys() == DARK.keys()
    used = set(re.findall(r"var\(--(\w+)\)", html))
    assert used <= LIGHT.keys()
    assert "prefers-color-scheme: dark" in html


def test_differences() -> None:
    page, table = compare(reports.mix(met=0.5), reports.mix(met=0.8, tokens_s=25.0, server="new"))
    rows = {row[1]: row for row in table.rows}
    assert rows["goals met"] == ["chat", "goals met", "50 %", "80 %", "+30 points"]
    assert rows["tokens_s"][2:] == ["12.5", "25.0", "+100.0 %"]
    assert [heading for heading, _ in page.sections] == [
        "Differences",
        "A: localrt: 50 % of the requests met their goals",
        "B: new: 80 % of the requests met their goals",
    ]
    _, table = compare(reports.sweep(), reports.sweep(rate=10.0))
    decode = [row for row in table.rows if row[1] == "decode_tok_s"]
    assert len(decode) == 7, "one point did not run in either"
    assert {row[4] for row in decode} == {"-50.0 %"}


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (reports.mix(), reports.sweep(), "two mixes or two sweeps can be compared, not a mix and"),
        (reports.card(), reports.card(), "two mixes or two sweeps can be compared, not a card and"),
        (reports.mix(), {"kind": "mix"}, "this mix is damaged"),
        (reports.mix(), {"results": []}, "is not a JSON report of `localrt bench`"),
        (reports.mix(), [], "is not a JSON report of `localrt bench`"),
        (reports.mix(), None, "is not a JSON report of `localrt bench`"),
    ],
)
def test_what_compare_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], a: object, b: object, words: str
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (a, b), strict=True):
        path.write_text("{" if report is None else json.dumps(report))
    page = tmp_path / "page.html"
    assert main(["bench", "--compare", *map(str, paths), "--html", str(page)]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert words in told
    assert len(told.splitlines()) == 1
    assert not page.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vary", "batch=1"], "--vary needs --sweep"),
        (["--text", "a.txt"], "--text needs --card"),
        (["--html", "a.html"], "--html needs a report: --sweep, --card, --compare or --mix"),
        (["--sweep", "a.json", "--card"], "--sweep and --card cannot be combined"),
        (["--sweep", "a.json", "--runs", "0"], "--runs must be at least 1, is 0"),
        (["--card", "--trace", "a.json"], "--trace and --card cannot be combined"),
        (["--compare", "a", "b", "c"], "--compare takes one file or two, not 3"),
        (["some.gguf", "--card"], "--card takes its models after it"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "a.json", tmp_path / "page.html"
    path.write_text(json.dumps(reports.mix("chat\x1b[31m")))
    assert main(["bench", "--compare", str(path), str(path), "--html", str(page)]) == 0
    out, told = capsys.readouterr()
    assert "+0 points" in out
    assert "\x1b" not in out
    assert f"wrote {page}" in told
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert main(["bench", "--compare", str(path)]) == 0
    assert "first token p50" in capsys.readouterr().out
    assert read_report(path)["kind"] == "mix"


@pytest.mark.parametrize("fonts", ["the system's", "none"])
def test_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fonts: str) -> None:
    if fonts == "none":
        folders = {"sys.platform": "linux", "os.walk": lambda path: iter(())}
        for name, value in folders.items():
            monkeypatch.setattr(f"PIL.ImageFont.{name}", value)
    monkeypatch.setattr(plots, "_FINE", 4)
    _font.cache_clear()
    path, file = tmp_path / "a.json", tmp_path / "page.png"
    path.write_text(json.dumps(reports.mix()))
    assert main(["bench", "--compare", str(path), "--png", str(file)]) == 0
    _font.cache_clear()
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    assert picture.width == 1560
    colours = {colour: count for count, colour in picture.getcolors(1 << 24) or []}
    for name in ("paper", "ink", "faint", "rule", "series0"):
        assert colours[ImageColor.getrgb(LIGHT[name])] > 100, name


@given(most=st.floats(allow_nan=True), count=st.integers(1, 9))
def test_ticks(most: float, count: int) -> None:
    values = ticks(most, count)
    assert values[0] == 0
    assert len(values) <= 2 * count + 1
    assert all(value <= most * 1.01 for value in values[1:])


def test_what_is_not_measured_is_left_out() -> None:
    assert [number(value) for value in (None, True, "1", float("nan"), 10**400, 2)] == [
        *[None] * 5,
        2.0,
    ]
    seconds = [(float(at), None if at == 3 else at) for at in range(5)]
    figure = lines("t", {"a": seconds}, seconds=4, show=str)
    points = re.search(r'points="([^"]*)"', figure.body)
    assert points is not None
    assert len(points[1].split()) == 8
    drawn(lines("t", {"a": seconds[:1]}, seconds=4, show=str))
    drawn(lines("t", {"a": seconds[:1]}, seconds=4, show=str, stacked=True))
    drawn(heat_map("t", ["c"] * 900, ["r"], [[1] * 900], str))
    stacked = lines("t", {"a": seconds, "b": seconds}, seconds=4, show=str, stacked=True)
    assert stacked.body.count("<polygon") == 2
    assert 'width="0.0"' in bars("t", [("a", None, "not measured")]).body
    assert ">-</text>" in heat_map("t", ["c"], ["r"], [[None]], str).body
