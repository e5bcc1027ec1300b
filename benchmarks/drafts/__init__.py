"""Answers with and without drafts."""
