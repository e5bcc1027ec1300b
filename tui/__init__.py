"""The terminal app. It sits on localrt's public API and knows nothing below it."""

from localrt.tui.app import ChatApp, run_chat

__all__ = ["ChatApp", "run_chat"]
