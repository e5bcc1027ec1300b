"""Draft sources, token trees, and the tuner that decides when drafting pays.

Start reading at ``tree.py`` and ``source.py``; docs/speculation.md explains the whole. Nothing here
knows engines, sessions, text or where weights are: a draft is tokens in, a tree out.
"""
