"""Checks and speeds on a CUDA GPU; they need only torch and numpy."""
