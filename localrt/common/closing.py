"""The ``with`` statement for what has a ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, Self


class Closing(ABC):
    """Is closed at the end of a ``with`` block, however the block ends."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held; safe to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled at once, not after walking all that it holds."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: each process opens its own"
        )
