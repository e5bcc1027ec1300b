"""Weight formats and compute steps: what a packed weight is, and how it is multiplied."""
