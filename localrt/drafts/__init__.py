"""Drafts: which model or head guesses for a target, where it runs, and how a head is trained."""
