"""localrt runs language models that are bigger than your GPU, on the machine you already own.

    import localrt
    model = localrt.load("smollm2")
    for chunk in model.stream("Why is the sky blue?", max_tokens=64):
        print(chunk.text, end="")

Names below are imported on first use (PEP 562), so that ``import localrt`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localrt.api import Model as Model
    from localrt.api import ModelInfo as ModelInfo
    from localrt.api import load as load
    from localrt.chat import ChatSession as ChatSession
    from localrt.chat import Message as Message
    from localrt.engine.types import Chunk as Chunk
    from localrt.engine.types import Metrics as Metrics
    from localrt.errors import CancelledError as CancelledError
    from localrt.errors import CheckpointError as CheckpointError
    from localrt.errors import ContextOverflowError as ContextOverflowError
    from localrt.errors import HubError as HubError
    from localrt.errors import LocalrtError as LocalrtError
    from localrt.errors import MemoryBudgetError as MemoryBudgetError
    from localrt.errors import MissingExtraError as MissingExtraError
    from localrt.errors import OptionError as OptionError
    from localrt.errors import StorageError as StorageError
    from localrt.errors import TemplateError as TemplateError
    from localrt.errors import TokenizerError as TokenizerError
    from localrt.errors import UnsupportedModelError as UnsupportedModelError
    from localrt.history import AnswerWriter as AnswerWriter
    from localrt.history import Conversation as Conversation
    from localrt.history import ConversationInfo as ConversationInfo
    from localrt.history import History as History
    from localrt.history import Turn as Turn

__version__ = "0.1.0"

_HOME = {
    "ChatSession": "localrt.chat",
    "Chunk": "localrt.engine.types",
    "Message": "localrt.chat",
    "Metrics": "localrt.engine.types",
    "Model": "localrt.api",
    "ModelInfo": "localrt.api",
    "load": "localrt.api",
    "CancelledError": "localrt.errors",
    "CheckpointError": "localrt.errors",
    "ContextOverflowError": "localrt.errors",
    "HubError": "localrt.errors",
    "LocalrtError": "localrt.errors",
    "MemoryBudgetError": "localrt.errors",
    "MissingExtraError": "localrt.errors",
    "OptionError": "localrt.errors",
    "StorageError": "localrt.errors",
    "TemplateError": "localrt.errors",
    "TokenizerError": "localrt.errors",
    "UnsupportedModelError": "localrt.errors",
    "AnswerWriter": "localrt.history",
    "Conversation": "localrt.history",
    "ConversationInfo": "localrt.history",
    "History": "localrt.history",
    "Turn": "localrt.history",
}

__all__ = [
    "AnswerWriter",
    "CancelledError",
    "ChatSession",
    "CheckpointError",
    "Chunk",
    "ContextOverflowError",
    "Conversation",
    "ConversationInfo",
    "History",
    "HubError",
    "LocalrtError",
    "MemoryBudgetError",
    "Message",
    "Metrics",
    "MissingExtraError",
    "Model",
    "ModelInfo",
    "OptionError",
    "StorageError",
    "TemplateError",
    "TokenizerError",
    "Turn",
    "UnsupportedModelError",
    "__version__",
    "load",
]

# In a checkout the rooms models/, quant/, ... lie beside this folder; installed, they lie in it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "models" / "__init__.py").is_file():
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'localrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
