"""A model behind a server with OpenAI's protocol, used like a local one."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localrt.client.model import RemoteModel, connect

__all__ = ["RemoteModel", "connect"]


def __getattr__(name: str) -> Any:
    """Import a name on use: every command looks for servers here, few ask one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from localrt.client import model

    return getattr(model, name)
