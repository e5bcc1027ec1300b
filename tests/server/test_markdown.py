"""Markdown as HTML: formulas, code, lists and links, and that nothing else comes through."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.server.markdown import HtmlParts, to_html

_TAGS = {
    *("p", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "a", "em", "strong", "s"),
    *("ul", "ol", "li", "blockquote", "hr", "br", "span", "h1", "h2", "h3"),
    *("math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "msub", "msup"),
    *("msubsup", "mover", "munder", "munderover", "mtable", "mtr", "mtd", "mstyle", "menclose"),
}
_NAMES = {"class", "href", "start", "display", "stretchy", "fence", "form", "columnalign"}
_NAMES |= {"displaystyle", "scriptlevel", "width", "notation", "mathvariant", "accent"}


class _Reader(HTMLParser):
    """Gathers the tags, the names of attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.names, self.links, self.text = set[str](), set[str](), set[str](), ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names.update(name for name, _ in attrs)
        self.links.update(value or "" for name, value in attrs if name == "href")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("text", "mathml"),
    [
        (r"\(a^2 \, b_1\)", "<msup><mi>a</mi><mn>2</mn></msup>"),
        (r"$\frac{1}{2}$", "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>"),
        ("$2 + 2 = 4$", "<mo>=</mo>"),
        (r"$$ \sum_{i=1}^n i $$", "<munderover><mo>∑</mo>"),
        ("so\n\\[\n\\begin{aligned}\na &= b \\\\\n- c &= d\n\\end{aligned}\n\\]\n", "<mtable "),
        ("\\[ x\n\n= \\mathbb{R} \\].", "<mi>ℝ</mi></mrow></math>.</p>"),
        ("1. a\n   $$\n   x = 1\n   $$\n2. b", '<li>a<p><math display="block">'),
        ("> $$x\n> = 1$$", "<blockquote>\n<p><math"),
        (r"$f(x) = \begin{dcases} 1 & x > 0 \\ 0 & \text{else} \end{dcases}$", "<mo>&gt;</mo>"),
        (r"$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$", "<mtr><mtd><mn>3</mn></mtd>"),
        (r"$\boxed{42}$", '<menclose notation="box">'),
        (r"$\text{if } a < b$", "<mtext>if\xa0</mtext><mi>a</mi><mo>&lt;</mo>"),
        ("| a |\n|---|\n| $x_1$ |", "<td><math"),
    ],
)
def test_formulas(text: str, mathml: str) -> None:
    html = to_html(text)
    assert mathml in html
    assert "\\" not in html


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"`\(x\)` \\(*a*\\)", r"<code>\(x\)</code> \(<em>a</em>\)"),
        ("from $5 to *$6* or \\$7-$8*x*", "from $5 to <em>$6</em> or $7-$8<em>x</em>"),
        ("$20 (or 25$) and US$5, A$6 *x*", "$20 (or 25$) and US$5, A$6 <em>x</em>"),
        (r"\(\unknown *x*\)", r"\(\unknown *x*\)"),
        (r"$a & b$ and \(\frac{1}\) $x^x^x$", r"$a &amp; b$ and <math"),
        (r"$x_{" + "{" * 5000 + "1$", "$x_{" + "{" * 5000 + "1$"),
        (r"so \(x", "so (x"),
    ],
)
def test_what_is_no_formula_stays_as_it_is_written(text: str, shown: str) -> None:
    assert to_html(text).startswith(f"<p>{shown}")


def test_code() -> None:
    code = '\ndef f(x: int) -> "<a>":\n    return 1  # b\n'
    html = to_html(f"```python\n{code}```")
    assert '<code class="language-python">' in html
    assert '<span class="h-k">return</span> <span class="h-m">1</span>' in html
    assert _Reader(html).text == f"{code}\n"
    assert "<span" not in to_html(f"```python\n{code}"), "it is still written"
    for language in ("", "nothing-known", 'a"<b>'):
        assert "<span" not in to_html(f"```{language}\n{code}```")


def test_task_lists() -> None:
    html = to_html("- [ ] a *b*\n- [X] c\n- [y] d")
    assert re.findall(r'<li class="task">(.) ', html) == ["☐", "☑"]
    assert "<li>[y] d" in html


@pytest.mark.parametrize(
    ("text", "links"),
    [
        (
            "see https://x.y/a?b=1&c=2, or <http://z.example>.",
            {"https://x.y/a?b=1&c=2", "http://z.example"},
        ),
        ("mailto:a@b.example", {"mailto:a@b.example"}),
        ("foo.py 3.14 a@b.c www.x.com ftp://x.y //x.y example.com `https://x.y`", set()),
    ],
)
def test_bare_addresses(text: str, links: set[str]) -> None:
    assert _Reader(to_html(text)).links == links


def test_lines_in_a_cell() -> None:
    html = to_html("| a |\n|---|\n| 1<br/>**2** `<br>` |\n")
    assert "<td>1<br />\n<strong>2</strong> <code>&lt;br&gt;</code></td>" in html


def test_pictures_ask_nobody() -> None:
    assert to_html("![a <b>](https://x.y)") == '<p>!<a href="https://x.y">a &lt;b&gt;</a></p>\n'


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt&colon;alert(1))",
        "[a](//elsewhere.example)",
        "![a](x onerror=alert(1))",
        '```"><script>alert(1)</script>\nx\n```',
        "```html\n<script>alert(1)</script>\n```",
        "| a |\n| - |\n| <b onmouseover=alert(1)>x |",
        r"\(\text{<script>alert(1)</script>}\) $\text{&lt;script&gt;}$",
        r"$\href{javascript:alert(1)}{y}$ $\style{color:red}{x}$ $\class{a}{x}$ $\color{red}{x}$",
    ],
)
def test_markup_is_text(text: str) -> None:
    read = _Reader(to_html(text))
    assert read.tags <= _TAGS - {"a"}
    assert read.names <= _NAMES - {"href"}


_PIECES = [
    *"ab1 \n*_`$<>\"'&|-#[]()\\{}^!~:.=", "\n\n", "\\[", "\\]", "\\(", "\\)", "$$", "```",
    *(f"\\{name}" for name in ("frac", "text{", "sqrt", "left(", "right)", "begin{align*}", "hat")),
    *("<script>", "```py\n", "https://a.b", "onerror=", 'style="', "&lt;", "| - |\n", "- [x] "),
    *("\\end{align*}", "\\href{", "\\style{", "<br>", "\\color{red}", "\\\\"),
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=40).map("".join))
def test_only_known_tags_and_attributes(text: str) -> None:
    read = _Reader(to_html(text))
    assert read.tags <= _TAGS | {"h4", "h5", "h6", "mpadded", "mroot", "mphantom"}
    assert read.names <= _NAMES | {"accentunder", "lspace", "minsize", "maxsize"}
    assert all(re.match("https?://|mailto:", link.lower()) for link in read.links)


def long_answer(count: int = 5000) -> str:
    text = "\n\n".join(f"Part {n} is *long* {'word ' * (n % 20)}[x]" for n in range(count))
    return f"{text}\n\n[x]: http://x.example\n"


def test_long_answer_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end first, then what precedes it; each part is made once."""
    rendered = list[str]()
    monkeypatch.setattr(
        "localrt.server.markdown.to_html",
        lambda text, links=None: (rendered.append(text), to_html(text, links))[1],
    )
    text = long_answer()
    for _ in range(2):
        found = HtmlParts().take(text)
        assert len("".join(found["html"])) < len(text) / 4
        assert "Part 4999" in found["html"][-1]
    assert sum(map(len, rendered)) < len(text) / 4
    html = found["html"]
    while found["first"]:
        found = HtmlParts().take(text, before=found["first"])
        html = found["html"] + html
    assert "".join(html) == to_html(text)
    assert HtmlParts().take("") == HtmlParts().take(text, before=0) == {"first": 0, "html": []}


def test_growing_answer_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text, parts, html, sent = long_answer(500).replace("[x]", ""), HtmlParts(), list[str](), 0
    for end in range(0, len(text) + 100, 100):
        told = parts.take(text[:end], grows=True)
        html[told["first"] :] = told["html"]
        sent = max(sent, len("".join(told["html"])))
        assert "".join(html) == to_html(text[:end])
    assert sent < len(to_html(text)) / 4
    assert parts.take("<b>shorter", grows=True)["html"] == ["<p>&lt;b&gt;shorter</p>\n"]


@pytest.mark.parametrize(
    "piece", ["\\[\n", "$a ", "\\(x", "$$\n", "$1 ", "$x$ ", "https://", "- [ ] ", "x^", "<"]
)
def test_time_is_bounded(piece: str) -> None:
    begun = time.perf_counter()
    to_html(piece * (20_000 // len(piece)) + "\\]")
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(("times", "linked"), [(3, True), (2000, False)])
def test_many_addresses(times: int, linked: bool) -> None:
    """Each would be looked for in all of the text."""
    html = to_html("https://example.org " * times)
    assert ("<a " in html) is linked
    assert html.count("https://example.org") >= times


def test_code_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it has no colours, and all of its text."""
    monkeypatch.setattr("localrt.common.markdown_parts._LEXER_SECONDS", -1.0)
    html = to_html("```python\nif x:\n    return 'unusual'\n```")
    assert html.count("<span") == 1
    assert "unusual" in html
