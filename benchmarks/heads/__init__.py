"""Trains a draft head in EAGLE-3's published form on text that its target writes."""
