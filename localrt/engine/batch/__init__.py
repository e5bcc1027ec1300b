"""Sequences that share passes: all there from the start, or joining and leaving."""
