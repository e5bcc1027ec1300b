"""Stores, which localrt packs itself, as checkpoints."""
