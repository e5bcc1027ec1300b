"""Encoders of texts, and the blocks that they share with those of pictures."""
