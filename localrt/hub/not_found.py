"""What is said of a name that no model has: what it was taken for, and what may have been meant."""

from __future__ import annotations

import json
from errno import ELOOP
from pathlib import Path

from localrt.formatting import one_line
from localrt.hub.aliases import read_aliases
from localrt.hub.demo import DEMO_NAME
from localrt.hub.known_models import close_names
from localrt.hub.names import close_files, close_to, looks_like_path
from localrt.settings import Settings

__all__ = ["not_found"]


def not_found(model: str, path: Path, settings: Settings) -> str:
    """The one line for ``model``, which is not at ``path`` and nothing else."""
    from localrt.hub.listing import list_models  # which resolves names

    model = one_line(model)
    here = [each.name for each in list_models(settings)]
    if looks_like_path(model):
        if path.is_symlink():
            return f"{model} is a link that leads to no file or folder: {_target(path)}"
        close = close_files(path) or close_to(path.name, here)
        return f"no such file or folder: {model}{_hint(close)}"
    if " " in model:
        return (
            f"no model {model!r}: it was taken for a model's name, which comes before the prompt: "
            f"{DEMO_NAME} {json.dumps(model, ensure_ascii=False)}"
        )
    close = close_names(model, [DEMO_NAME, *read_aliases(settings), *here]) or close_files(path)
    return (
        f"no model {model!r}{_hint(close)}: give a short name such as llama3.2, org/name of the "
        "hub, a folder or a .gguf (`localrt list` shows what is here)"
    )


def _target(path: Path) -> str:
    """Where a broken link points, or that it leads back to itself."""
    target = one_line(str(path.readlink()))
    try:
        path.stat()
    except OSError as error:
        return "it leads back to itself" if error.errno == ELOOP else f"{target} is not there"
    return target


def _hint(close: list[str]) -> str:
    return f" (did you mean {' or '.join(close)}?)" if close else ""
