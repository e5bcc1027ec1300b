"""Ollama's ``/api``: chat, generate, embed, and information about models."""
