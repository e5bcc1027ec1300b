"""Batching: sequences that share passes.

``schedule.py`` decides what a pass computes, and runs sequences one after another on an engine that
cannot share passes. ``offline.py`` runs a fixed list of prompts; ``live.py`` runs a thread whose
batch requests join and leave. A lone sequence speculates as in ``stream``; for several,
``speculation.py`` verifies the likeliest draft tokens. A sequence's answer does not depend on the
others.
"""
