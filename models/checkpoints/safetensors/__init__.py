"""Hugging Face folders as checkpoints."""
