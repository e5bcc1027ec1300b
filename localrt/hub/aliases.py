"""Names that people give to models: the table ``[models]`` of ``config.toml``.

    [models]
    fast = "llama3.2:1b"
    work = "~/models/work.gguf"

What a name stands for is any MODEL, also another of these names. They come before the short names
that localrt knows (``known_models.py``). ``*`` is the model that a server of several uses for names
that it does not know.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.errors import ModelNotFoundError, OptionError
from localrt.formatting import one_line
from localrt.hub.demo import DEMO_NAME
from localrt.hub.names import looks_like_path, shown_path
from localrt.settings import Settings

if TYPE_CHECKING:
    from localrt.toml_file import TomlFile

__all__ = ["expand_alias", "read_aliases", "remove_alias", "write_alias"]

_FILE, _TABLE = "config.toml", "models"
_NAME = re.compile(r"\*|[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")


def read_aliases(settings: Settings) -> dict[str, str]:
    """What each name stands for.

    Raises:
        StorageError: the file is not TOML, or cannot be read.
        OptionError: an entry is not a text.
    """
    entries = _file(settings).read().get(_TABLE, {})
    if not isinstance(entries, dict):
        raise OptionError(f"{_FILE}: models must be a table of names, is {entries!r:.60}")
    for name, model in entries.items():
        if not isinstance(model, str) or not model.strip():
            raise OptionError(f"{_FILE}, [models]: {name} must be a MODEL in quotes")
    return dict(entries)


def expand_alias(model: str, settings: Settings) -> str:
    """What ``model`` stands for; ``model`` itself where it is no such name.

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
    """Have ``name`` stand for ``model``; comments and other lines of the file stay.

    Returns what it stands for: a path is written so that it is right from every folder.

    Raises:
        OptionError: not a name, or the demo's, or one that would stand for itself.
        StorageError: the file cannot be read or written.
    """
    if name == DEMO_NAME or _NAME.fullmatch(name) is None:
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
    """Forget ``name``. The model stays.

    Raises:
        ModelNotFoundError: there is no such name.
        StorageError: the file cannot be read or written.
    """
    if name not in read_aliases(settings):
        raise ModelNotFoundError(f"{one_line(name, 60)} is no name of yours (see `localrt alias`)")
    _file(settings).change({name: None}, table=_TABLE)


def _from_everywhere(model: str) -> str:
    path = Path(os.path.expanduser(model))  # noqa: PTH111  Path's own fails on "~nobody"
    is_path = looks_like_path(model) or os.path.exists(path)  # noqa: PTH110  as in resolving
    return shown_path(path.absolute()) if is_path else model


def _file(settings: Settings) -> TomlFile:
    from localrt.toml_file import TomlFile  # a parser that names of the hub do without

    return TomlFile(settings.config_dir / _FILE)
