"""An HTTP server that speaks OpenAI's protocol, for programs in other languages or places.

It stands on the public API (``Model.live``, ``Model.embed``) and on Starlette and uvicorn, which
the extra ``server`` brings; ``localrt serve`` starts it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localrt.serve.app import create_app as create_app
    from localrt.serve.options import ServeOptions as ServeOptions
    from localrt.serve.server import open_socket as open_socket
    from localrt.serve.server import serve as serve

__all__ = ["ServeOptions", "create_app", "open_socket", "serve"]

_HOME = {"create_app": "app", "ServeOptions": "options", "open_socket": "server", "serve": "server"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"localrt.serve.{_HOME[name]}"), name)
    raise AttributeError(f"module 'localrt.serve' has no attribute {name!r}")
