"""Low-rank adapters: reading their files, and mapping them to the base model's rows."""
