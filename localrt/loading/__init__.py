"""Loads a checkpoint into an engine: whole if it fits, else placed across memory tiers."""
