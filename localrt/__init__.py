"""localrt runs language models that are bigger than your GPU, on the machine you already own.

    import localrt
    model = localrt.load("smollm2")
    for chunk in model.stream("Why is the sky blue?", max_tokens=64):
        print(chunk.text, end="")

The names to begin with; ``help(localrt.load)`` and so on say more:

- ``load``: a model, downloaded first if need be
- ``Model``: ``stream``, ``generate``, ``chat``, ``live``, ``embed``, each for asyncio too
- ``ChatSession``: a conversation; ``History`` keeps conversations on disk
- ``Chunk``, ``Answer``, ``Metrics``, ``Status``: what comes back, how fast, what it takes
- ``Options``, ``Sampling``, ``GenerateOptions``: the options of an answer
- ``recommended``, ``plan``, ``preview``: how fast a model would be, before it is downloaded
- ``list_models``, ``search_models``, ``pull``, ``remove_model``: the models on this machine
- ``Batch``: many prompts, on many machines
- ``LocalrtError``: the root of all errors

Names are imported on first use, so that ``import localrt`` stays cheap.

.. include:: ../docs/embedding.md
"""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from localrt.common.version import __version__

if TYPE_CHECKING:
    from localrt.api import Model as Model
    from localrt.api import embedder as embedder
    from localrt.api import load as load
    from localrt.batch import Batch as Batch
    from localrt.chat import ChatModel as ChatModel
    from localrt.chat import ChatSession as ChatSession
    from localrt.chat_format.thinking import Thinking as Thinking
    from localrt.chat_format.thinking import split_thinking as split_thinking
    from localrt.common.errors import CancelledError as CancelledError
    from localrt.common.errors import CheckpointError as CheckpointError
    from localrt.common.errors import ContextOverflowError as ContextOverflowError
    from localrt.common.errors import GatedModelError as GatedModelError
    from localrt.common.errors import HubError as HubError
    from localrt.common.errors import LocalrtError as LocalrtError
    from localrt.common.errors import MemoryBudgetError as MemoryBudgetError
    from localrt.common.errors import MissingExtraError as MissingExtraError
    from localrt.common.errors import ModelNotFoundError as ModelNotFoundError
    from localrt.common.errors import OfflineError as OfflineError
    from localrt.common.errors import OptionError as OptionError
    from localrt.common.errors import StorageError as StorageError
    from localrt.common.errors import TemplateError as TemplateError
    from localrt.common.errors import TokenizerError as TokenizerError
    from localrt.common.errors import UnsupportedModelError as UnsupportedModelError
    from localrt.common.progress import Progress as Progress
    from localrt.common.settings import Settings as Settings
    from localrt.documents.index import DocumentIndex as DocumentIndex
    from localrt.documents.reading import read_document as read_document
    from localrt.drafts.discovery import DraftOffer as DraftOffer
    from localrt.engine.batch.live import LiveAnswer as LiveAnswer
    from localrt.engine.options import BatchOptions as BatchOptions
    from localrt.engine.options import GenerateOptions as GenerateOptions
    from localrt.engine.options import Options as Options
    from localrt.engine.options import PromptOptions as PromptOptions
    from localrt.engine.options import SendOptions as SendOptions
    from localrt.engine.sampling import Sampling as Sampling
    from localrt.engine.types import Answer as Answer
    from localrt.engine.types import Chunk as Chunk
    from localrt.engine.types import Message as Message
    from localrt.engine.types import Metrics as Metrics
    from localrt.engine.types import TokenLogprob as TokenLogprob
    from localrt.engine.types import ToolCall as ToolCall
    from localrt.history import AnswerWriter as AnswerWriter
    from localrt.history import Conversation as Conversation
    from localrt.history import ConversationInfo as ConversationInfo
    from localrt.history import History as History
    from localrt.history import KeptPicture as KeptPicture
    from localrt.history import LoadedFile as LoadedFile
    from localrt.history import Turn as Turn
    from localrt.hub import LocalModel as LocalModel
    from localrt.hub import ResolvedModel as ResolvedModel
    from localrt.hub.searching import FoundModel as FoundModel
    from localrt.hub.searching import Variant as Variant
    from localrt.library import find_draft as find_draft
    from localrt.library import list_models as list_models
    from localrt.library import list_variants as list_variants
    from localrt.library import plan as plan
    from localrt.library import pull as pull
    from localrt.library import remove_model as remove_model
    from localrt.library import search_models as search_models
    from localrt.library import uses as uses
    from localrt.planning.forecast import Change as Change
    from localrt.planning.forecast import PlannedContext as PlannedContext
    from localrt.planning.forecast import Verdict as Verdict
    from localrt.planning.plan import Plan as Plan
    from localrt.planning.recommend import Outlook as Outlook
    from localrt.planning.recommend import Preview as Preview
    from localrt.planning.recommend import Runnable as Runnable
    from localrt.planning.recommend import preview as preview
    from localrt.planning.recommend import preview_size as preview_size
    from localrt.planning.recommend import recommended as recommended
    from localrt.service.live import LiveModel as LiveModel
    from localrt.service.status import Flow as Flow
    from localrt.service.status import LaneUse as LaneUse
    from localrt.service.status import MemoryUse as MemoryUse
    from localrt.service.status import ModelInfo as ModelInfo
    from localrt.service.status import PassTrace as PassTrace
    from localrt.service.status import Status as Status

_NAMES = {
    "localrt.service.status": "Flow LaneUse MemoryUse ModelInfo PassTrace Status",
    "localrt.api": "Model embedder load",
    "localrt.batch": "Batch",
    "localrt.chat": "ChatModel ChatSession",
    "localrt.engine.batch.live": "LiveAnswer",
    "localrt.engine.options": "BatchOptions GenerateOptions Options PromptOptions SendOptions",
    "localrt.engine.sampling": "Sampling",
    "localrt.engine.types": "Answer Chunk Message Metrics TokenLogprob ToolCall",
    "localrt.common.errors": (
        "CancelledError CheckpointError ContextOverflowError GatedModelError HubError"
        " LocalrtError MemoryBudgetError MissingExtraError ModelNotFoundError"
        " OfflineError OptionError StorageError TemplateError TokenizerError UnsupportedModelError"
    ),
    "localrt.history": (
        "AnswerWriter Conversation ConversationInfo History KeptPicture LoadedFile Turn"
    ),
    "localrt.hub": "LocalModel ResolvedModel",
    "localrt.hub.searching": "FoundModel Variant",
    "localrt.documents.index": "DocumentIndex",
    "localrt.documents.reading": "read_document",
    "localrt.drafts.discovery": "DraftOffer",
    "localrt.library": (
        "find_draft list_models list_variants plan pull remove_model search_models uses"
    ),
    "localrt.service.live": "LiveModel",
    "localrt.planning.forecast": "Change PlannedContext Verdict",
    "localrt.planning.plan": "Plan",
    "localrt.planning.recommend": "Outlook Preview Runnable preview preview_size recommended",
    "localrt.common.progress": "Progress",
    "localrt.common.settings": "Settings",
    "localrt.chat_format.thinking": "Thinking split_thinking",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME)]

# In a checkout the packages models/, quant/, ... are beside this folder; installed, inside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "models" / "__init__.py").is_file():
    __path__.append(str(_root))

if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'localrt' has no attribute {name!r}")
        return getattr(_import_module(_HOME[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
