"""Drafts for a model: finds, places and loads them, and selects one for each generation.

Start reading at ``selection.py``. The mathematics of draft trees is in ``speculative``; the steps
of a speculative generation are in ``engine/speculation.py``.
"""
