"""The ``with`` statement for classes that have a ``close`` method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, Self


class Closing(ABC):
    """Base class: closed at the end of a ``with`` block, also after an exception."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; safe to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse pickling at once, before pickle walks all attributes."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: each process opens its own"
        )
