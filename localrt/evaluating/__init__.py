"""How good a model's answers are: perplexity and divergence on a text."""
