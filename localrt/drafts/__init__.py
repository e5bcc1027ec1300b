"""What drafts for a model: found, placed, loaded beside it, and chosen for each generation.

Start reading at ``selection.py``. The mathematics of trees is in ``speculative``, the steps of a
generation along them in ``engine/speculation.py``.
"""
