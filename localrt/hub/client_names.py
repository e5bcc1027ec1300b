"""What a server's clients call the models of this machine: short names, never a path."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from localrt.hub.listing import LocalModel
from localrt.hub.names import looks_like_path, parse_hub_ref

__all__ = ["client_name", "client_names"]

_PART_OF_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def client_name(model: str) -> str:
    """``model`` as clients know it: a name stays, a file or folder is called after itself."""
    path = Path(model)
    if not looks_like_path(model) and (parse_hub_ref(model) or not path.is_absolute()):
        return model
    name = path.name[:-5] if path.name.lower().endswith(".gguf") else path.name
    return _PART_OF_SPLIT.sub("", name) or "model"


def client_names(models: Iterable[LocalModel]) -> dict[str, LocalModel]:
    """Models by their names for clients; of two that are called the same, one gets a number."""
    found: dict[str, LocalModel] = {}
    for model in models:
        name = plain = client_name(model.name)
        count = 1
        while name in found:
            count += 1
            name = f"{plain}-{count}"
        found[name] = model
    return found
