"""Tools of MCP servers (Model Context Protocol) for a chat.

``config.py`` reads the servers of ``config.toml``, ``servers.py`` runs them with the official SDK
in its own thread, ``toolbox.py`` offers tools to a model and says which calls need a question.
"""

ROUNDS = 20
"""Rounds of calls for a message; then the model must answer without calls."""
