"""What the site has besides the docs: the pages of the root, and the reference of the API."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pdoc
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import localrt

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.name for path in ROOT.glob("*.md")} | {"README.md": "index.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and those of the public API."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for name in localrt.__all__:  # imported on use, which pdoc does not wait for
        setattr(localrt, name, getattr(localrt, name))
    pdoc.render.configure(docformat="google", show_source=False)
    with tempfile.TemporaryDirectory() as folder:
        modules = ("localrt", "localrt.common.errors", r"!localrt\.(?!common.errors)")
        pdoc.pdoc(*modules, output_directory=Path(folder))
        for path in Path(folder).rglob("*.*"):
            page = f"api/{path.relative_to(folder).as_posix()}"
            files.append(File.generated(config, page, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to pages of the root lead to their places in the site."""
    links = re.compile(r"\]\((?:\.\./)?(\w+\.md)")
    return links.sub(lambda link: f"]({PAGES.get(link[1], link[1])}", markdown)
