"""Draft sources, token trees, their verification, and the tuner that decides when they pay.

Nothing here knows engines, sessions, text or where weights lie: a draft is tokens in, a tree out,
and the target is a function from a node to a token.
"""
