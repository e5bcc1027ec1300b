"""The cost of fewer bits: perplexity, KL divergence, time to quantize."""
