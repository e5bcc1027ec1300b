"""Where a model would run and how fast, before it is loaded."""
