"""Architectures, checkpoints, tokenizers and chat templates: what a model is, not how it is run."""
