"""The grammar of MODEL: what a name on the command line or in ``localrt.load`` refers to.

    smollm2                     the demo model
    org/name                    a repository of the hub
    org/name:Q4_K_M             one quantization of its GGUF files, or one file by name
    org/name@revision[:Q4_K_M]  at a branch, tag or commit
    ./folder  file.gguf  ...    anything on disk

Pure string work, except for the look at the disk that suggests close file names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "HubRef",
    "client_name",
    "close_files",
    "close_to",
    "is_revision",
    "looks_like_path",
    "parse_hub_ref",
    "shown_path",
]

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_REF = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^:@\s]+))?(?::(?P<variant>[^:@\s]+))?"
)
_PROGRAM = re.compile(r"^(?:ollama|lmstudio|llamacpp):")
_PART_OF_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_WEB_PREFIXES = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/", "hf://")


@dataclass(frozen=True, slots=True)
class HubRef:
    """A repository of the hub, maybe at a revision, maybe one variant (a GGUF quantization)."""

    repo: str
    revision: str | None = None
    variant: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.repo}{revision}{variant}"


def parse_hub_ref(model: str) -> HubRef | None:
    """``model`` as a hub reference, or None when it is not one."""
    for prefix in _WEB_PREFIXES:
        if model.startswith(prefix):
            model = model.removeprefix(prefix).rstrip("/")
            break
    match = _HUB_REF.fullmatch(model)
    # The hub forbids these two in names, and the cache folder's name relies on it.
    if match is None or "--" in match["repo"] or ".." in match["repo"]:
        return None
    if match["revision"] is not None and not is_revision(match["revision"]):
        return None
    return HubRef(match["repo"], match["revision"], match["variant"])


def is_revision(text: str) -> bool:
    """Whether ``text`` can name a branch, tag or commit; it becomes a file name in the cache."""
    return re.fullmatch(r"\w[\w./+-]*", text) is not None and ".." not in text


def looks_like_path(model: str) -> bool:
    """Whether ``model`` can only be meant as a path, so that "no such file" is the right answer."""
    if model.startswith(("./", "../", "/", "~")) or model in {".", ".."} or "\\" in model:
        return True
    ref = parse_hub_ref(model)
    return model.lower().endswith(".gguf") and (ref is None or ref.variant is None)


def client_name(model: str) -> str:
    """``model`` as a server's clients know it: a file or folder by its own name, without where it
    lies; other names without the program that keeps it.
    """
    name = _PROGRAM.sub("", model)
    is_file = name.lower().endswith(".gguf")
    if is_file or looks_like_path(name):
        name = re.split(r"[/\\:]", name.rstrip("/\\"))[-1]
    return _PART_OF_SPLIT.sub("", name[:-5] if is_file else name) or "model"


def close_to(name: str, names: Iterable[str]) -> list[str]:
    """Up to three of ``names`` that have ``name`` as a part, or are spelt much like it, with or
    without the program or publisher before them.
    """
    name = name.strip().lower()
    having: list[str] = []
    spelt: dict[str, str] = {}
    for each in names:
        plain = _PROGRAM.sub("", each).lower()
        if name in re.split("[/:@]", plain):
            having.append(each)
        for form in (plain.rpartition("/")[2], plain, each.lower()):
            spelt.setdefault(form, each)
    close = [spelt[form] for form in difflib.get_close_matches(name, spelt, n=6, cutoff=0.6)]
    return list(dict.fromkeys([*having, *close]))[:3]


def close_files(path: Path) -> list[str]:
    """Up to three entries beside the missing ``path`` whose names are close to it."""
    try:
        entries = list(path.parent.iterdir())
        names = [e.name for e in entries if e.is_dir() or e.suffix.lower() == ".gguf"]
    except (OSError, ValueError):  # ValueError: a name that the file system cannot encode
        return []
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(path.name.lower(), by_lower, n=3, cutoff=0.6)
    return [str(path.parent / by_lower[name]) for name in close]


def shown_path(path: Path) -> str:
    """``path`` below ``~`` where it lies there: ``resolve`` takes both."""
    home = Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else str(path)
