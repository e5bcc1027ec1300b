"""Word documents and slides as Markdown, by all2md and python-docx."""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from typing import Any

import all2md
import docx
import pptx
from all2md.ast import Image, extract_nodes
from all2md.options import MarkdownRendererOptions
from all2md.parsers.docx import DocxToAstConverter
from all2md.parsers.pptx import PptxToAstConverter
from all2md.transforms import RemoveImagesTransform
from docx.oxml import OxmlElement
from docx.oxml.ns import nsmap, qn

from localrt.documents.kinds import WINGDINGS, Page

# The characters of the font Symbol from 0x20 on, where Word has no others for them.
_SYMBOL = (
    " !∀#∃%&∋()∗+,−./0123456789:;<=>?"
    "≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_"
    "‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼ "
    "                                "
    "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵"
    "ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓"
    "◊⟨®©™∑"
)
# Namespaces of "Strict Open XML".
_STRICT = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/")


def _symbol(font: str, code: int) -> str:
    low = code & 0xFF if 0xF000 <= code < 0xF100 else code
    if font == "Symbol":
        return _SYMBOL[low - 0x20 : low - 0x1F]
    return WINGDINGS.get(low, "•") if font.startswith("Wingdings") else chr(low)


def _usual(data: bytes) -> io.BytesIO:
    """An Office file with the usual namespaces, which are all that its libraries know."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as given:
        if b"purl.oclc.org/ooxml" not in given.read("_rels/.rels"):
            return io.BytesIO(data)
        with zipfile.ZipFile(made, "w") as usual:
            for name in given.namelist():
                names = rb"http://schemas.openxmlformats.org/\1/2006/"
                usual.writestr(name, _STRICT.sub(names, given.read(name)))
    return made


def read_word(data: bytes) -> Page:
    """A Word document: equations as LaTeX, numbers of lists as Word shows them, tables, notes, and
    tracked changes as if accepted.
    """
    document = docx.Document(_usual(data))
    # all2md leaves out symbols, and words with readings.
    for each in [*document.element.iter(qn("w:sym"), qn("w:ruby"))]:
        text: Any = OxmlElement("w:t")
        if each.tag == qn("w:sym"):
            code = int(each.get(qn("w:char"), "0"), 16)
            text.text = _symbol(each.get(qn("w:font"), ""), code)
        else:
            base = each.find(qn("w:rubyBase"))
            text.text = "".join(each.text or "" for each in base.iter(qn("w:t")))
        each.getparent().replace(each, text)
    kinds = Counter(each.get("uri") for each in document.element.iter(qn("a:graphicData")))
    left_out = Counter({"comment": len(document.comments), "chart": kinds[nsmap["c"]]})
    left_out["diagram"] = kinds[nsmap["dgm"]]
    left_out["embedded object"] = len([*document.element.iter(qn("w:object"))])
    return _page(DocxToAstConverter().parse(document), left_out)


def read_slides(data: bytes) -> Page:
    """The slides of a presentation in order, with their notes."""
    show = pptx.Presentation(_usual(data))
    for slide in show.slides:
        parts = [slide.element, *([slide.notes_slide.element] if slide.has_notes_slide else [])]
        for line in [line for part in parts for line in part.iter(qn("a:br"))]:
            # all2md would join the words around it.
            line.getparent().replace(line, line.getparent().add_r(" "))
    return _page(PptxToAstConverter().parse(show), Counter())


def _page(tree: Any, left_out: Counter[str]) -> Page:
    left_out["picture"] = len(extract_nodes(tree, Image))
    shown = RemoveImagesTransform().transform(tree)
    options = MarkdownRendererOptions(escape_special=False)
    text = all2md.from_ast(shown, "markdown", renderer_options=options)
    return Page(str(text), left_out=left_out)
