"""From a checkpoint to an engine: what fits is loaded whole, the rest is placed."""
