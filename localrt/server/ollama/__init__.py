"""Ollama's ``/api``: chat, generate, embed, and what a client asks about models."""
