"""Conversations that outlive the app: branches of turns in one SQLite file, saved as they grow.

It knows text only: neither models nor their caches.
"""

from localrt.history.conversation import Conversation, Turn
from localrt.history.database import AnswerWriter
from localrt.history.history import ConversationInfo, History

__all__ = ["AnswerWriter", "Conversation", "ConversationInfo", "History", "Turn"]
