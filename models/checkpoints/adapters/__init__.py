"""Low-rank adapters: their files, and which rows of the base they belong to."""
