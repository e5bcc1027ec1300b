"""Weight formats and the compute room: what a packed weight is, and how it is multiplied."""
