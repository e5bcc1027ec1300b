"""Trains a small hybrid model with an MTP block: a fixture, and what drafts bring there."""
