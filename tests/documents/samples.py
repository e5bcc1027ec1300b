"""Small documents, written by hand: no library that reads them made them."""

from __future__ import annotations

import io
import json
import zipfile

RED = "1 0 0 rg 0 0 2000 1000 re f"


def pdf(*pages: str) -> bytes:
    """A PDF file: a page has this text, or is a red rectangle (``RED``) or blank ("")."""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    kids = []
    for text in pages:
        lines = text.replace("(", r"\(").replace(")", r"\)").split("\n")
        shown = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
        drawn = text if text in (RED, "") else f"BT /F1 8 Tf 10 980 Td {shown} ET"
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 2000 1000] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {len(objects) + 2} 0 R >>"
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    start = len(out)
    out += f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    trailer = f"trailer << /Size {len(places) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return out + trailer.encode()


def docx(body: str) -> bytes:
    """A Word document with this body."""
    made = io.BytesIO()
    names = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        text = f"<w:document {names}><w:body>{body}</w:body></w:document>"
        part = zipfile.ZipInfo("word/document.xml")  # of the same time always: bytes are tests' ids
        archive.writestr(part, text, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def paragraph(text: str, style: str = "") -> str:
    return f"<w:p>{style}<w:r><w:t xml:space='preserve'>{text}</w:t></w:r></w:p>"


HEADING = '<w:pPr><w:pStyle w:val="Heading2"/></w:pPr>'
ITEM = '<w:pPr><w:numPr><w:ilvl w:val="0"/></w:numPr></w:pPr>'
WORD = docx(
    paragraph("Plan", HEADING)
    + paragraph("Fish &amp; chips")
    + paragraph("one", ITEM)
    + "<w:p><w:pPr><w:tabs><w:tab w:val='left'/></w:tabs></w:pPr>"
    + "<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r>"
    + "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
    + f"<w:tbl><w:tr><w:tc>{paragraph('x')}</w:tc><w:tc>{paragraph('y')}</w:tc></w:tr></w:tbl>"
    + "<mc:AlternateContent><mc:Choice><w:t>Box</w:t></mc:Choice>"
    + "<mc:Fallback><w:t>Box</w:t></mc:Fallback></mc:AlternateContent>"
)
NOTEBOOK = json.dumps(
    {
        "metadata": {"language_info": {"name": "julia"}},
        "cells": [
            {"cell_type": "markdown", "source": ["# Title\n", "Words"]},
            {
                "cell_type": "code",
                "source": "1 + 1",
                "outputs": [{"data": {"text/plain": ["2"]}}, {"text": "printed\n"}],
            },
        ],
    }
).encode()
SEEDS: dict[str, bytes | str] = {
    ".pdf": pdf("Text (a)", RED, ""),
    ".docx": WORD,
    ".html": "<h1>A</h1><pre>b</pre><li>c<script>d</script><!-- e --><td>f &amp; g",
    ".ipynb": NOTEBOOK,
    ".txt": "caf\u00e9".encode("utf-16"),
}
"""A small document of each kind."""
