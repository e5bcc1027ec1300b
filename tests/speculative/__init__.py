"""Trees, sources, verification, the tuner."""
