"""What a server's clients call the models of this machine: short names, never a path."""

from __future__ import annotations

from collections.abc import Iterable

from localrt.hub.listing import LocalModel
from localrt.hub.names import client_name

__all__ = ["client_names"]


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
