"""Saved conversations: branches of turns in one SQLite file, written as they grow.

Knows texts and pictures, neither models nor KV caches.
"""

from localrt.history.answer_writer import AnswerWriter
from localrt.history.conversation import Conversation, Turn
from localrt.history.history import ConversationInfo, History, LoadedFile
from localrt.history.pictures import KeptPicture

__all__ = [
    "AnswerWriter",
    "Conversation",
    "ConversationInfo",
    "History",
    "KeptPicture",
    "LoadedFile",
    "Turn",
]
