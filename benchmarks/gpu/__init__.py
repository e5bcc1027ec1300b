"""Checks and speeds on a CUDA GPU; torch and numpy are all they need."""
