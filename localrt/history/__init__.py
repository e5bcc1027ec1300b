"""Conversations that outlive the app: branches of turns in one SQLite file, saved as they grow.

It knows text only: neither models nor their caches.
"""

from localrt.history.conversation import Conversation, Turn
from localrt.history.history import ConversationInfo, History
from localrt.history.writer import AnswerWriter

__all__ = ["AnswerWriter", "Conversation", "ConversationInfo", "History", "Turn"]
