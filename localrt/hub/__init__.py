"""Finds a model's files on this machine by its name, and downloads missing ones.

The cache is the hub's own, so that models are shared with other tools. This package knows files and
names; it does not open a model. Start reading at ``names`` and ``resolving``. Importing it is
cheap: modules that import huggingface_hub are imported only when the hub is asked.
"""

from localrt.hub.listing import LocalModel, list_models, remove_model
from localrt.hub.names import DEMO_NAME, HubRef
from localrt.hub.resolving import ResolvedModel, resolve, resolve_adapter

__all__ = [
    "DEMO_NAME",
    "HubRef",
    "LocalModel",
    "ResolvedModel",
    "list_models",
    "remove_model",
    "resolve",
    "resolve_adapter",
]
