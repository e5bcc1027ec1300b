"""Documents as people have them: a row each, with what models must get of it and must not."""

from __future__ import annotations

import json

import pytest

from localrt import OptionError, read_document
from tests.documents.samples import (
    MAIL,
    RICH,
    SAVED_PAGE,
    book,
    docx,
    pptx,
    shape,
    spreadsheet,
    strict,
    xlsx,
    zipped,
)


def run(text: str) -> str:
    return f"<w:r><w:t xml:space='preserve'>{text}</w:t></w:r>"


def para(inner: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{inner if inner.startswith('<') else run(inner)}</w:p>"


def number(of: int, level: int = 0) -> str:
    return f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{of}"/></w:numPr>'


def level(at: int, kind: str, text: str, start: int = 1) -> str:
    return (
        f'<w:lvl w:ilvl="{at}"><w:start w:val="{start}"/><w:numFmt w:val="{kind}"/>'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
    )


def abstract(of: int, *levels: str) -> str:
    return f'<w:abstractNum w:abstractNumId="{of}">{"".join(levels)}</w:abstractNum>'


def list_of(of: int, kind: int, override: str = "") -> str:
    return f'<w:num w:numId="{of}"><w:abstractNumId w:val="{kind}"/>{override}</w:num>'


NUMBERING = "".join(
    [
        abstract(
            0,
            level(0, "decimal", "%1."),
            level(1, "decimal", "%1.%2"),
            level(2, "lowerLetter", "(%3)"),
        ),
        abstract(1, level(0, "bullet", "•")),
        abstract(2, level(0, "upperRoman", "Article %1 -", 3)),
        *[list_of(1, 0), list_of(2, 1), list_of(3, 2)],
        list_of(4, 0, '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'),
    ]
)


def style(name: str, title: str, properties: str) -> str:
    return (
        f'<w:style w:type="paragraph" w:styleId="{name}"><w:name w:val="{title}"/>'
        f"<w:pPr>{properties}</w:pPr></w:style>"
    )


STYLES = (
    style("berschrift2", "heading 2", '<w:outlineLvl w:val="1"/>')
    + style("Heading1", "heading 1", number(1) + '<w:outlineLvl w:val="0"/>')
    + style("Clause", "Clause", number(1, 1))
)


def named(style: str) -> str:
    return f'<w:pStyle w:val="{style}"/>'


def letters(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


FRACTION = (
    f"<m:oMath><m:f><m:num>{letters('a+1')}</m:num><m:den>{letters('b')}</m:den></m:f></m:oMath>"
)


def cell(*inner: str) -> str:
    return f"<w:tc>{''.join(inner)}</w:tc>"


def row(*cells: str) -> str:
    return f"<w:tr>{''.join(cells)}</w:tr>"


def box(text: str) -> str:
    """A text box, and what old programs show for it, with such a pair inside."""
    new = f"<w:txbxContent>{para(text)}</w:txbxContent>"
    inner = "<w:r><mc:AlternateContent><mc:Choice Requires='wps'><w:t>In</w:t></mc:Choice>"
    inner += "<mc:Fallback><w:t>In</w:t></mc:Fallback></mc:AlternateContent></w:r>"
    old = f"<w:txbxContent>{para(inner)}{para(text)}</w:txbxContent>"
    return (
        "<w:r><mc:AlternateContent><mc:Choice Requires='wps'><w:drawing><wp:inline><a:graphic>"
        f"<a:graphicData><wps:wsp><wps:txbx>{new}</wps:txbx></wps:wsp></a:graphicData></a:graphic>"
        "</wp:inline></w:drawing></mc:Choice><mc:Fallback><w:pict><v:shape><v:textbox>"
        f"{old}</v:textbox></v:shape></w:pict></mc:Fallback></mc:AlternateContent></w:r>"
    )


def drawn(kind: str) -> str:
    names = "http://schemas.openxmlformats.org/drawingml/2006"
    return (
        f"<w:r><w:drawing><wp:inline><a:graphic><a:graphicData uri='{names}/{kind}'/></a:graphic>"
        "</wp:inline></w:drawing></w:r>"
    )


def field(code: str, shown: str) -> str:
    marks = [f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate")]
    end = '<w:r><w:fldChar w:fldCharType="end"/></w:r>'
    return f"{marks[0]}<w:r><w:instrText>{code}</w:instrText></w:r>{marks[1]}{run(shown)}{end}"


WORD: dict[str, tuple[bytes, list[str], list[str]]] = {
    "fraction": (
        docx(para(run("The rate is ") + FRACTION + run(" for each."))),
        [r"The rate is $\frac{a+1}{b}$ for each."],
        [],
    ),
    "symbols": (
        docx(
            para('<w:r><w:sym w:font="Symbol" w:char="F0B1"/><w:t>5 mm</w:t></w:r>')
            + para('<w:r><w:sym w:font="MS Gothic" w:char="2612"/><w:t> Yes</w:t></w:r>')
            + para('<w:r><w:sym w:font="Wingdings" w:char="F0FC"/><w:t> Done</w:t></w:r>')
        ),
        ["±5 mm", "☒ Yes", "✓ Done"],
        [],
    ),
    "changed": (
        docx(
            para(
                f'<w:ins w:id="3" w:author="a">{run("new")}</w:ins><w:del w:id="4" w:author="a">'
                "<w:r><w:delText>old</w:delText></w:r></w:del>"
            )
        ),
        ["new"],
        ["old"],
    ),
    "text box": (docx(para("Intro") + para(box("Boxed"))), ["Intro\n\nBoxed\n"], ["In\n", "InIn"]),
    "numbers": (
        docx(
            para("Scope", number(1))
            + para("Rates", number(1))
            + para("Two per cent.", number(1, 1))
            + para("in cash", number(1, 2))
            + para("Three.", number(1, 1))
            + para("Term", number(1))
            + para("bullet", number(2))
            + para("Parties", number(3))
            + para("Last", number(4)),
            numbering=NUMBERING,
        ),
        [
            *["1. Scope", "2. Rates", "2.1 Two per", "(a) in cash", "2.2 Three", "3. Term"],
            *["* bullet", "Article III - Parties", "7. Last"],
        ],
        [],
    ),
    "numbers of styles": (
        docx(
            para("General", named("Heading1"))
            + para("Fees", named("Heading1"))
            + para("monthly", named("Clause"))
            + para("Überblick", named("berschrift2")),
            numbering=NUMBERING,
            styles=STYLES,
        ),
        ["# 1. General", "# 2. Fees", "2.1 monthly", "## Überblick"],
        [],
    ),
    "table": (
        docx(
            "<w:tbl>"
            + row(cell(para("Name")), cell(para("Qty")))
            + row(cell(para("Bolt"), para("M4")), cell(para("12")))
            + row(
                cell(f"<w:tbl>{row(cell(para('a')), cell(para('b')))}</w:tbl>"), cell(para("c|d"))
            )
            + "</w:tbl>"
        ),
        ["| Name | Qty |", "| Bolt<br>M4 | 12 |", "a<br>b", "c\\|d"],
        [],
    ),
    "notes": (
        docx(
            para(
                run("Claim")
                + '<w:r><w:footnoteReference w:id="2"/></w:r>'
                + '<w:r><w:endnoteReference w:id="3"/></w:r>'
            ),
            footnotes=f'<w:footnote w:id="2">{para("See p. 7.")}</w:footnote>',
            endnotes=f'<w:endnote w:id="3">{para("Final note.")}</w:endnote>',
        ),
        ["Claim[^2]", "[^2]: See p. 7.", "Final note."],
        [],
    ),
}
RUSSIAN = "Квартальный отчёт"


def page(
    encoding: str, text: str, meta: str = '<meta charset="{}">'
) -> tuple[bytes, list[str], list[str]]:
    html = f"<html><head>{meta.format(encoding)}</head><body><p>{text}</p></body></html>"
    return html.encode(encoding), [text], []


HTTP_EQUIV = '<meta http-equiv="Content-Type" content="text/html; charset={}">'
WEB: dict[str, tuple[bytes, list[str], list[str]]] = {
    "windows-1251": page("windows-1251", RUSSIAN),
    "gbk": page("gbk", "季度报告", HTTP_EQUIV),
    "shift_jis": page("shift_jis", "四半期報告", HTTP_EQUIV),
    "utf-16": page("utf-16", "Grüße"),
    "unnamed": page("windows-1251", RUSSIAN, ""),
    "as browsers": (b"<meta charset=iso-8859-1><p>\x93quoted\x94 \x80 5", ["“quoted” € 5"], []),
    "script": (
        b'<p>A</p><script>var s = "<!-- x";</script><p>B</p><svg class="i"/><p>C</p></svg><p>D',
        ["A", "B", "D"],
        ["var s"],
    ),
    "comments": (b"<p>A</p><!--><p>B</p><!-- x --!><p>C", ["A\n\nB\n\nC"], ["x"]),
    "form": (
        b'<input value="Ada"><input type=checkbox checked>Yes<input type=checkbox>No'
        b'<input type=hidden value="token"><input type=password value="secret">',
        ["Ada", "[x] Yes", "[ ] No"],
        ["token", "secret"],
    ),
    "table": (
        b"<table><caption>Cap</caption><tr><th>A<th>B<tr><td rowspan=2>r<td>1<tr><td>2"
        b"<tr><td colspan=2>w</table>",
        ["Cap\n\n| A | B |\n| --- | --- |\n| r | 1 |\n|  | 2 |\n| w |  |"],
        ["<"],
    ),
    "layout": (
        b"<table><tr><td><table><tr><td><p>Dear Jo,</p><p>Bye</p></table><td><h2>Side</h2>"
        b"<ul><li>q</ul></table>",
        ["Dear Jo,\n\nBye", "## Side\n\n- q"],
        ["|"],
    ),
    "table with lists": (
        b"<table><tr><th>Option<th>Meaning<tr><td>-a<td><h4>All</h4><ul><li>x<li>y</ul>"
        b"<tr><td>-b<td><p>one</p><p>two</p></table>",
        ["| Option | Meaning |\n| --- | --- |\n| -a | All * x * y |\n| -b | one two |"],
        [],
    ),
    "lists": (b"<ol start=3><li>c<li>d</ol><dl><dt>T<dd>D</dl>", ["3. c\n4. d", "T\n\nD"], []),
    "text": (
        b"<pre>def f():\n    return 1</pre><p>x<br>y</p><h2>Head</h2><p>a   b\n c 2*3 a_b #",
        ["def f():\n    return 1", "x\ny", "## Head", "a b c 2*3 a_b #"],
        [],
    ),
    "hidden": (
        b'<p hidden>no</p><p style="display:none">no</p><noscript>no</noscript>'
        b"<template>no</template><p style='DISPLAY:NONE !important'>no</p>"
        b"<p style='max-height:0;overflow:hidden'>no</p><p>yes",
        ["yes"],
        ["no"],
    ),
    "emphasis": (
        b"<p><b>From:</b> Jo, <i>yes!</i> <b>Tel.:</b>030<b> </b>or <del>9.</del> 8</p>"
        b"<b style='font-weight:normal'><h2>Head</h2><p>one</b>",
        ["**From:** Jo, *yes!* **Tel.:**030  or ~~9.~~ 8\n\n## Head\n\n**one**"],
        ["<"],
    ),
    "mathematics": (
        rb"<p>So <math><mi>a</mi><annotation encoding=application/x-tex>\frac{a}{b}</annotation>"
        rb"</math> holds",
        [r"So $\frac{a}{b}$ holds"],
        [],
    ),
}


def notebook(*outputs: object) -> bytes:
    cells = [
        {"cell_type": "markdown", "source": ["# T\n", "words"]},
        {"cell_type": "code", "source": "1 / 0", "outputs": outputs},
    ]
    return json.dumps({"nbformat": 4, "metadata": {}, "cells": cells}).encode()


def result(**forms: object) -> dict[str, object]:
    data = {name.replace("_", "/", 1): form for name, form in forms.items()}
    return {"output_type": "execute_result", "data": data}


ERROR = {
    "output_type": "error",
    "ename": "ZeroDivisionError",
    "evalue": "division by zero",
    "traceback": ["\x1b[31mline 1\x1b[0m", "ZeroDivisionError: division by zero"],
}
NOTEBOOKS: dict[str, tuple[bytes, list[str], list[str]]] = {
    "error": (notebook(ERROR), ["line 1\nZeroDivisionError: division by zero"], ["\x1b"]),
    "table": (
        notebook(result(text_html="<table><tr><td>a<td>b</table>", text_plain="<Table>")),
        ["| a | b |"],
        ["<Table>"],
    ),
    "frame": (notebook(result(text_html="<b>x</b>", text_plain="   a\n0  1")), ["a\n0  1"], ["x"]),
    "markdown": (notebook(result(text_markdown=["**bold**"], text_plain="<M>")), ["**bold**"], []),
    "printed": (notebook({"output_type": "stream", "text": ["print", "ed"]}), ["printed"], []),
    "progress": (
        notebook({"text": "\r 0%|   |\r100%|###|\n"}, {"text": "a\r\n\x1b[1mb\x1b[0m"}),
        ["Output:\n100%|###|\n", "Output:\na\nb"],
        [" 0%", "\r", "\x1b"],
    ),
}
SHEET = (
    '<row r="1"><c r="A1" t="inlineStr"><is><t>Region</t></is></c><c r="B1" t="inlineStr"><is>'
    '<t>Sum|All</t></is></c></row><row r="2"><c r="A2" s="1"><v>46000</v></c><c r="B2">'
    "<f>SUM(C2:C9)</f><v>42.500000000000007</v></c></row>"
    '<row r="3"><c r="B3"><v>1000000</v></c></row>'
)
TABLE = (
    '<p:graphicFrame><p:nvGraphicFramePr><p:cNvPr id="4" name="t"/><p:cNvGraphicFramePr/><p:nvPr/>'
    '</p:nvGraphicFramePr><p:xfrm><a:off x="0" y="0"/><a:ext cx="1" cy="1"/></p:xfrm><a:graphic>'
    '<a:graphicData uri="http://schemas.openxmlformats.org/drawingml/2006/table"><a:tbl><a:tblGrid>'
    '<a:gridCol w="1"/><a:gridCol w="1"/></a:tblGrid><a:tr h="1">'
    + "".join(
        f"<a:tc><a:txBody><a:bodyPr/><a:p><a:r><a:t>{text}</a:t></a:r></a:p></a:txBody></a:tc>"
        for text in "XY"
    )
    + "</a:tr></a:tbl></a:graphicData></a:graphic></p:graphicFrame>"
)
ODS = spreadsheet(
    '<table:table table:name="Tab"><table:table-row><table:table-cell office:value-type="string">'
    '<text:p>k</text:p></table:table-cell><table:table-cell office:value-type="float" '
    'office:value="7" table:formula="of:=1+6"><text:p>7</text:p></table:table-cell>'
    "</table:table-row></table:table>",
)
OTHERS: dict[str, tuple[bytes, list[str], list[str]]] = {
    "a.xlsx": (
        xlsx(("Sales", "visible", SHEET), ("Rates", "hidden", SHEET)),
        [
            "## Sales",
            "| Region | Sum\\|All |\n| --- | --- |\n| 2025-12-09 | 42.5 |\n|  | 1000000 |",
        ],
        ["SUM(", "Rates"],
    ),
    "a.ods": (ODS, ["## Tab", "| k | 7 |"], ["1+6"]),
    "a.pptx": (
        pptx(
            shape("First", "title") + shape("Opening"),
            shape("Second", "title") + shape("Alpha\nBeta") + TABLE,
            notes="Say thanks",
        ),
        ["## First\n\nOpening", "Say thanks", "## Second\n\nAlpha\n\nBeta", "X", "Y"],
        ["AlphaBeta", "XY"],
    ),
    "strict.docx": (
        strict(docx(para("Strict", named("berschrift2")) + para("words"), styles=STYLES)),
        ["## Strict\n\nwords"],
        [],
    ),
    "strict.xlsx": (strict(xlsx(("A", "visible", SHEET))), ["| 2025-12-09 | 42.5 |"], []),
    "a.epub": (
        book("<script src='a'/><h1>One</h1><a id='p'/><p>It was dark.", "<h1>Two</h1><p>Light."),
        ["# One\n\nIt was dark.\n\n# Two\n\nLight."],
        ["T\n"],
    ),
    "a.mhtml": (SAVED_PAGE, ["# Übersicht\n\n5 = five"], ["Blink", "color"]),
    "a.rtf": (RICH, ["Café\nКвар\nBold text\n•\tdot\n☒\tbox\nC1|C2"], ["Foo", "0089", "Arial"]),
    "a.eml": (
        MAIL,
        ["From: Jörg <j@x.example>", "Subject: Grüße", "Attachment: bill.pdf", "\n\nHallo Wörld"],
        ["World", "JVBERg"],
    ),
    "sjis.txt": ("四半期の報告です。".encode("shift_jis"), ["四半期の報告です。"], []),
    "cp1251.txt": (f"{RUSSIAN} за этот год".encode("cp1251"), [RUSSIAN], []),
    "marked.txt": ("é".encode("utf-8-sig"), ["é"], ["\ufeff"]),
    "unmarked utf-16-le.txt": ("naïve\n".encode("utf-16-le"), ["naïve"], ["\0"]),
    "quotes.txt": ("“naïve” — 5 €".encode("cp1252"), ["“naïve” — 5 €"], []),
}
ROWS = {
    **{f"{name}.docx": row for name, row in WORD.items()},
    **{f"{name}.html": row for name, row in WEB.items()},
    **{f"{name}.ipynb": row for name, row in NOTEBOOKS.items()},
    **OTHERS,
}


@pytest.mark.parametrize("name", ROWS)
def test_what_models_get(name: str) -> None:
    data, wanted, unwanted = ROWS[name]
    text = read_document(data, name=name).text.split("\n", 2)[2]
    for each in wanted:
        assert each in text
    for each in unwanted:
        assert each not in text
    assert text.count("Boxed") <= 1


@pytest.mark.parametrize(
    ("name", "data", "note"),
    [
        ("a.xlsx", xlsx(("A", "hidden", ""), ("B", "visible", SHEET)), "left out: 1 hidden sheet"),
        ("a.html", b"<img><img><p>x", "left out: 2 pictures"),
        ("a.eml", MAIL, "left out: 1 attachment"),
        (
            "a.docx",
            docx(para("x"), comments=f'<w:comment w:id="0">{para("c")}</w:comment>'),
            "1 comment",
        ),
        (
            "a.docx",
            docx(para(f"{drawn('chart')}{drawn('diagram')}<w:r><w:object/></w:r>")),
            "1 chart, 1 diagram, 1 embedded object",
        ),
        (
            "a.ipynb",
            notebook({"data": {"image/png": "", "text/plain": "<F>"}}),
            "left out: 1 picture",
        ),
        ("a.rtf", RICH, "left out: 1 picture."),
        ("a.txt", "naïve café".encode("cp1252"), "a.txt is not UTF-8: it was read as cp1252."),
    ],
)
def test_what_is_left_out_is_said(name: str, data: bytes, note: str) -> None:
    assert note in read_document(data, name=name).note


def test_text_as_the_system_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda setlocale: "shift_jis")
    read = read_document("日本語".encode("shift_jis"), name="a.txt")
    assert "日本語" in read.text
    assert "shift_jis" in read.note


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.doc", b"\xd0\xcf\x11\xe0\0", r"\.doc files are not read: save a\.doc as \.docx or PDF"),
        ("a.odt", b"PK\0", r"\.odt files are not read: save a\.odt as \.docx or PDF"),
        ("a.xlsx", b"PK no", "damaged, locked by a password, or no .xlsx file"),
        ("a.epub", zipped({"META-INF/rights.xml": ""}), "no .epub"),
        ("a.rtf", b"plain", "no .rtf"),
        ("a.mht", b"From: a\n\nplain", "no .mhtml"),
    ],
)
def test_what_cannot_be_read(name: str, data: bytes, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        read_document(data, name=name)
