"""Tiers and budgets: what fits where, checked before it is allocated."""
