"""The path that a client means, where its base URL has a slash or a ``/v1`` too many or too few."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Paths"]

_PREFIX = "v1"


class Paths:
    """``known`` are the server's, as routes write them."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = frozenset(known)
        parts = [path.split("/")[1:] for path in self.known]
        self._under = {names[1] for names in parts if names[0] == _PREFIX and len(names) > 1}
        self._outside = {names[0] for names in parts if names[0] != _PREFIX}

    def meant(self, path: str) -> str:
        """``//v1/v1/models/`` and ``/models`` are ``/v1/models``, ``/v1/api/tags`` is
        ``/api/tags``; a path that means nothing here stays what it is, but for its slashes.
        """
        names = [name for name in path.split("/") if name]
        prefixed = names[:1] == [_PREFIX]
        while names[:1] == [_PREFIX]:
            del names[0]
        if names and (names[0] in self._under) != (names[0] in self._outside):
            prefixed = names[0] in self._under
        return "/" + "/".join([_PREFIX, *names] if prefixed else names)
