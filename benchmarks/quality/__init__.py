"""What fewer bits cost: perplexity, KL divergence, time to quantize."""
