"""Tools of MCP servers (Model Context Protocol) for a chat.

``config.py`` reads the servers of ``config.toml``, ``servers.py`` runs them with the official SDK
in a thread of its own, ``toolbox.py`` says what a model is offered and which calls need a question.
"""
