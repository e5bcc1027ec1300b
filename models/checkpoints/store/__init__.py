"""Stores, packed by localrt itself, as checkpoints."""
