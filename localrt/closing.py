"""The ``with`` statement for what has a ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closing"]


class Closing(ABC):
    """Closed at the end of a ``with`` block, however it ends."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held; safe to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
