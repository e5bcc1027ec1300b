"""Engines of others that read weights from the disk: Accelerate and AirLLM."""
