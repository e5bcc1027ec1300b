"""Small documents, written by hand: no library that reads them made them."""

from __future__ import annotations

import io
import json
import re
import zipfile

RED = "1 0 0 rg 0 0 2000 1000 re f"


def pdf_of(*objects: str) -> bytes:
    """A PDF file of these objects, the first of which is its catalog."""
    out, places = b"%PDF-1.7\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    start = len(out)
    out += f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    trailer = f"trailer << /Size {len(places) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return out + trailer.encode()


def stream(drawn: str, entries: str = "") -> str:
    return f"<< {entries} /Length {len(drawn)} >>\nstream\n{drawn}\nendstream"


FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def pdf(*pages: str) -> bytes:
    """A PDF file: a page has this text, or is a red rectangle (``RED``) or blank ("")."""
    objects, kids = ["<< /Type /Catalog /Pages 2 0 R >>", "", FONT], []
    for text in pages:
        lines = text.replace("(", r"\(").replace(")", r"\)").split("\n")
        shown = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 2000 1000] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {len(objects) + 2} 0 R >>"
        )
        drawn = text if text in (RED, "") else f"BT /F1 8 Tf 10 980 Td {shown} ET"
        objects.append(stream(drawn))
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    return pdf_of(*objects)


def one_page(drawn: str, *more: str, entries: str = "", catalog: str = "") -> bytes:
    """A PDF file of one page: object 3 is the page, 4 Helvetica, ``more`` are those from 6 on."""
    return pdf_of(
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Resources << "
        f"/Font << /F1 4 0 R >> /XObject << /I 6 0 R >> >> /Contents 5 0 R {entries} >>",
        FONT,
        stream(drawn),
        *more,
    )


def scan(line: str = "", covers: str = "600 0 0 800 0 0") -> bytes:
    """A page that a picture covers, with a digital line on it."""
    drawn = f"q {covers} cm /I Do Q" + (f" BT /F1 10 Tf 250 20 Td ({line}) Tj ET" if line else "")
    picture = "/Subtype /Image /Width 8 /Height 8 /ColorSpace /DeviceGray /BitsPerComponent 8"
    return one_page(drawn, stream("\x50\xa0" * 32, f"/Type /XObject {picture}"))


def turned(matrix: str, rotate: int = 0) -> bytes:
    """Three lines of text whose matrix begins with ``matrix``, on a page that is rotated."""
    a, b = map(float, matrix.split()[:2])
    lines = ("First line of it", "Second line of it", "Third line of it")
    drawn = " ".join(
        f"BT /F1 12 Tf {matrix} {300 + 15 * b * place} {400 - 15 * a * place} Tm ({line}) Tj ET"
        for place, line in enumerate(lines)
    )
    return one_page(drawn, "null", entries=f"/Rotate {rotate}")


def form(*, labels: bool = True, appearances: bool = True) -> bytes:
    """A filled form: a name, a country, a checked box, one that is not, a typed note, a comment."""
    drawn = "0 -50 Td".join(f" ({label}) Tj " for label in ("Name:", "Country:", "Agree:"))
    seen = "/Type /XObject /Subtype /Form /BBox [0 0 200 20] /Resources << /Font << "
    check = stream("BT /Za 12 Tf 2 5 Td (4) Tj ET", f"{seen}/Za 7 0 R >> >>")
    texts = ("Ada Lovelace", "Norway", "Typed note")
    shown = [f"/Tx BMC BT /F1 10 Tf 2 5 Td ({text}) Tj ET EMC" for text in texts]
    looks = [stream(each, f"{seen}/F1 4 0 R >> >>") for each in shown]

    def widget(kind: str, box: str, rest: str) -> str:
        return (
            f"<< /Type /Annot /Subtype /Widget /FT /{kind} /T ({kind}{box}) /Rect [{box}] /F 4 "
            f"/DA (/F1 10 Tf 0 g) {rest} >>"
        )

    looking = [f"/AP << /N {number} 0 R >>" if appearances else "" for number in (9, 10, 11)]
    boxes = "/MK << /CA (4) >> /AP << /N << /Yes 8 0 R >> >>"
    note = f"/Rect [300 500 500 520] /Contents (Typed note) /DA (/F1 10 Tf 0 g) {looking[2]}"
    return one_page(
        f"BT /F1 10 Tf 50 700 Td {drawn} ET" if labels else "",
        "null",
        "<< /Type /Font /Subtype /Type1 /BaseFont /ZapfDingbats >>",
        check,
        *looks,
        widget("Tx", "100 695 300 715", f"/V (Ada Lovelace) {looking[0]}"),
        widget("Ch", "100 645 300 665", f"/V (Norway) /Ff 131072 /Opt [(Norway)] {looking[1]}"),
        widget("Btn", "100 595 120 615", f"/V /Yes /AS /Yes {boxes}"),
        widget("Btn", "200 595 220 615", f"/V /Off /AS /Off {boxes}"),
        f"<< /Type /Annot /Subtype /FreeText /F 4 {note} >>",
        "<< /Type /Annot /Subtype /Text /Rect [10 10 30 30] /Contents (Is this right?) /F 4 >>",
        entries="/Annots [12 0 R 13 0 R 14 0 R 15 0 R 16 0 R 17 0 R]",
        catalog="/AcroForm << /Fields [12 0 R 13 0 R 14 0 R 15 0 R] /DA (/F1 10 Tf 0 g) /DR << "
        "/Font << /F1 4 0 R /ZaDb 7 0 R >> >> >>",
    )


OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_NAMES = (
    f'xmlns:w="{_W}" xmlns:r="{OFFICE}" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape" '
    'xmlns:v="urn:schemas-microsoft-com:vml" '
    'xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
)
_WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml."


def zipped(parts: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():  # of the same time always: bytes are tests' ids
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def package(
    types: dict[str, str], links: dict[str, dict[str, str]], parts: dict[str, str]
) -> bytes:
    """An Office file: ``types`` of its parts, and ``links`` of a part: kinds and targets."""
    overrides = "".join(
        f'<Override PartName="/{name}" ContentType="{kind}+xml"/>' for name, kind in types.items()
    )
    made = {
        "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Default Extension="xml" ContentType="application/xml"/>{overrides}</Types>'
    }
    for name, targets in links.items():
        folder, _, file = name.rpartition("/")
        rows = "".join(
            f'<Relationship Id="rId{place}" Type="{OFFICE}/{kind}" Target="{target}"/>'
            for place, (target, kind) in enumerate(targets.items(), 1)
        )
        where = f"{folder}/_rels/{file}.rels" if folder else f"_rels/{file}.rels"
        made[where] = f'<Relationships xmlns="{PACKAGE}/relationships">{rows}</Relationships>'
    return zipped(made | parts)


def strict(data: bytes) -> bytes:
    """An Office file as "Strict Open XML", whose names for XML differ."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    usual = re.compile(r"http://schemas.openxmlformats.org/((?!package)\w+)/2006/")
    return zipped(
        {name: usual.sub(r"http://purl.oclc.org/ooxml/\1/", text) for name, text in parts.items()}
    )


def docx(body: str, **parts: str) -> bytes:
    """A Word document with this body, and ``numbering``, ``styles``, ``footnotes`` and others."""
    main = "word/document.xml"
    types = {main: f"{_WORD}document.main"} | {f"word/{kind}.xml": _WORD + kind for kind in parts}
    links = {"": {main: "officeDocument"}, main: {f"{kind}.xml": kind for kind in parts}}
    made = {main: f"<w:document {_NAMES}><w:body>{body}<w:sectPr/></w:body></w:document>"}
    for kind, text in parts.items():
        made[f"word/{kind}.xml"] = f"<w:{kind} {_NAMES}>{text}</w:{kind}>"
    return package(types, links, made)


def paragraph(text: str, style: str = "") -> str:
    return f"<w:p>{style}<w:r><w:t xml:space='preserve'>{text}</w:t></w:r></w:p>"


HEADING = '<w:pPr><w:pStyle w:val="Heading2"/></w:pPr>'
ITEM = '<w:pPr><w:numPr><w:ilvl w:val="0"/><w:numId w:val="1"/></w:numPr></w:pPr>'
BULLETS = (
    '<w:abstractNum w:abstractNumId="1"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/>'
    '<w:lvlText w:val="\u2022"/></w:lvl></w:abstractNum>'
    '<w:num w:numId="1"><w:abstractNumId w:val="1"/></w:num>'
)
WORD = docx(
    paragraph("Plan", HEADING)
    + paragraph("Fish &amp; chips")
    + paragraph("one", ITEM)
    + "<w:p><w:pPr><w:tabs><w:tab w:val='left'/></w:tabs></w:pPr>"
    + "<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r>"
    + "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
    + f"<w:tbl><w:tr><w:tc>{paragraph('x')}</w:tc><w:tc>{paragraph('y')}</w:tc></w:tr></w:tbl>"
    + paragraph("end"),
    numbering=BULLETS,
    styles='<w:style w:type="paragraph" w:styleId="Heading2"><w:name w:val="heading 2"/></w:style>',
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
OPEN = "urn:oasis:names:tc:opendocument:xmlns:"
_OPEN_NAMES = " ".join(f'xmlns:{each}="{OPEN}{each}:1.0"' for each in ("office", "text", "table"))


def spreadsheet(body: str) -> bytes:
    """An OpenDocument spreadsheet."""
    media_type = "application/vnd.oasis.opendocument.spreadsheet"
    entries = "".join(
        f'<manifest:file-entry manifest:full-path="{path}" manifest:media-type="{of}"/>'
        for path, of in (("/", media_type), ("content.xml", "text/xml"))
    )
    names = f'xmlns:manifest="{OPEN}manifest:1.0" manifest:version="1.2"'
    return zipped(
        {
            "mimetype": media_type,
            "META-INF/manifest.xml": f"<manifest:manifest {names}>{entries}</manifest:manifest>",
            "content.xml": f'<office:document-content {_OPEN_NAMES} office:version="1.2">'
            f"<office:body><office:spreadsheet>{body}</office:spreadsheet></office:body>"
            "</office:document-content>",
        }
    )


def book(*chapters: str) -> bytes:
    """An EPUB, whose files are named in another order than its chapters have."""
    names = [f"c{len(chapters) - place}.xhtml" for place in range(len(chapters))]
    items = "".join(f'<item id="{name}" href="../OEBPS/text/{name}"/>' for name in sorted(names))
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title>T</title></head><body>'
    return zipped(
        {
            "META-INF/container.xml": "<container><rootfiles>"
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
            "OEBPS/book.opf": f"<package><manifest>{items}</manifest>"
            f"<spine>{spine}</spine></package>",
            **{
                f"OEBPS/text/{name}": f"{page}{text}</body></html>"
                for name, text in zip(names, chapters, strict=True)
            },
        }
    )


def xlsx(*sheets: tuple[str, str, str]) -> bytes:
    """A workbook of sheets: name, state and rows; the cells' style 1 is a date."""
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml."
    ns = f'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main" xmlns:r="{OFFICE}"'
    files = {f"worksheets/sheet{place}.xml": "worksheet" for place in range(1, len(sheets) + 1)}
    tabs = "".join(
        f'<sheet name="{name}" state="{state}" sheetId="{place}" r:id="rId{place}"/>'
        for place, (name, state, _) in enumerate(sheets, 1)
    )
    one = "<{0}s count='1'><{0}/></{0}s>".format
    styles = f"<styleSheet {ns}>{one('font')}{one('fill')}{one('border')}<cellStyleXfs count='1'>"
    styles += "<xf/></cellStyleXfs><cellXfs count='2'><xf numFmtId='0'/><xf numFmtId='14' "
    styles += "applyNumberFormat='1'/></cellXfs></styleSheet>"
    parts = {"xl/workbook.xml": f"<workbook {ns}><sheets>{tabs}</sheets></workbook>"}
    for name, (_, _, rows) in zip(files, sheets, strict=True):
        parts[f"xl/{name}"] = f"<worksheet {ns}><sheetData>{rows}</sheetData></worksheet>"
    types = {"xl/workbook.xml": f"{kind}sheet.main", "xl/styles.xml": f"{kind}styles"}
    types |= {f"xl/{name}": f"{kind}worksheet" for name in files}
    links = {"": {"xl/workbook.xml": "officeDocument"}}
    links["xl/workbook.xml"] = files | {"styles.xml": "styles"}
    return package(types, links, parts | {"xl/styles.xml": styles})


def pptx(*slides: str, notes: str = "") -> bytes:
    """A presentation of slides with these shapes; the first has ``notes``."""
    kind = "application/vnd.openxmlformats-officedocument.presentationml."
    main = "http://schemas.openxmlformats.org/presentationml/2006/main"
    drawing = "http://schemas.openxmlformats.org/drawingml/2006/main"
    ns = f'xmlns:p="{main}" xmlns:a="{drawing}" xmlns:r="{OFFICE}"'
    head = (
        '<p:nvGrpSpPr><p:cNvPr id="1" name=""/><p:cNvGrpSpPr/><p:nvPr/></p:nvGrpSpPr><p:grpSpPr/>'
    )
    names = [f"slides/slide{len(slides) - place}.xml" for place in range(len(slides))]
    ids = "".join(f'<p:sldId id="{255 + n}" r:id="rId{n}"/>' for n in range(1, len(slides) + 1))
    types = {"ppt/presentation.xml": f"{kind}presentation.main"}
    links = {"": {"ppt/presentation.xml": "officeDocument"}}
    links["ppt/presentation.xml"] = dict.fromkeys(names, "slide")
    parts = {
        "ppt/presentation.xml": f"<p:presentation {ns}><p:sldIdLst>{ids}</p:sldIdLst>"
        "</p:presentation>"
    }
    trees = {"slideLayouts/slideLayout1.xml": ("sldLayout", "")}
    trees |= {name: ("sld", shapes) for name, shapes in zip(names, slides, strict=True)}
    for name in names:
        links[f"ppt/{name}"] = {"../slideLayouts/slideLayout1.xml": "slideLayout"}
    if notes:
        trees["notesSlides/notesSlide1.xml"] = ("notes", shape(notes, "body"))
        links[f"ppt/{names[0]}"]["../notesSlides/notesSlide1.xml"] = "notesSlide"
    for name, (tag, shapes) in trees.items():
        tree = f"<p:cSld><p:spTree>{head}{shapes}</p:spTree></p:cSld>"
        parts[f"ppt/{name}"] = f"<p:{tag} {ns}>{tree}</p:{tag}>"
        types[f"ppt/{name}"] = kind + {"sldLayout": "slideLayout", "notes": "notesSlide"}.get(
            tag, "slide"
        )
    return package(types, links, parts)


def shape(text: str, place: str = "") -> str:
    held = f'<p:ph type="{place}"/>' if place else ""
    lines = "".join(f"<a:p><a:r><a:t>{line}</a:t></a:r></a:p>" for line in text.split("\n"))
    return (
        f'<p:sp><p:nvSpPr><p:cNvPr id="2" name="t"/><p:cNvSpPr/><p:nvPr>{held}</p:nvPr></p:nvSpPr>'
        f"<p:spPr/><p:txBody><a:bodyPr/>{lines}</p:txBody></p:sp>"
    )


MAIL = (
    "From: =?utf-8?q?J=C3=B6rg?= <j@x.example>\r\nTo: a@b.example\r\n"
    "Subject: =?utf-8?b?R3LDvMOfZQ==?=\r\nMIME-Version: 1.0\r\n"
    'Content-Type: multipart/mixed; boundary="B"\r\n\r\n--B\r\n'
    'Content-Type: multipart/alternative; boundary="C"\r\n\r\n--C\r\n'
    "Content-Type: text/plain; charset=iso-8859-1\r\n"
    "Content-Transfer-Encoding: quoted-printable\r\n\r\nHallo W=F6rld\r\n--C\r\n"
    "Content-Type: text/html\r\n\r\n<p>Hallo <b>World</b></p>\r\n--C--\r\n--B\r\n"
    'Content-Type: application/pdf; name="bill.pdf"\r\n'
    'Content-Disposition: attachment; filename="bill.pdf"\r\n'
    "Content-Transfer-Encoding: base64\r\n\r\nJVBERg==\r\n--B--\r\n"
).encode("ascii")
RICH = (
    rb"{\rtf1\ansi\ansicpg1251{\fonttbl{\f0\fcharset204 Arial;}}\f0 Caf\u233?\par "
    rb"\'ca\'e2\'e0\'f0\par\b Bold\b0  text\par{\*\generator Foo;}{\*\shppict{\pict\pngblip 0089}}"
    rb"{\nonshppict{\pict\wmetafile8 0089}}"
    rb"{\listtext \u61589\'3f\tab}dot\par{\listtext \u61694?\tab}box\par "
    rb"\trowd\cellx1000\cellx2000\intbl C1\cell C2\cell\row}"
)
SAVED_PAGE = (
    b"From: <Saved by Blink>\r\nSubject: =?utf-8?Q?=C3=9Cbersicht?=\r\nMIME-Version: 1.0\r\n"
    b'Content-Type: multipart/related;\r\n\ttype="text/html";\r\n\tboundary="----B"\r\n\r\n\r\n'
    b"------B\r\nContent-Type: text/html\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n"
    b'<meta http-equiv=3D"Content-Type" content=3D"text/html; charset=3DUTF-8"><h1>=C3=9Cber=\r\n'
    b"sicht</h1><p>5 =3D five\r\n------B\r\nContent-Type: text/css\r\n\r\np { color: red }\r\n"
    b"------B--\r\n"
)
SEEDS: dict[str, bytes | str] = {
    ".pdf": pdf("Text (a)", RED, ""),
    ".docx": WORD,
    ".html": "<h1>A</h1><pre>b</pre><li>c<script>d</script><!-- e --><td>f &amp; g",
    ".ipynb": NOTEBOOK,
    ".txt": "caf\u00e9".encode("utf-16"),
    ".xlsx": xlsx(("Sales", "visible", '<row r="1"><c r="A1"><v>1</v></c></row>')),
    ".pptx": pptx(shape("Title", "title"), notes="Thanks"),
    ".epub": book("<p>One</p>"),
    ".eml": MAIL,
    ".mhtml": SAVED_PAGE,
    ".rtf": RICH,
}
"""A small document of each kind."""
