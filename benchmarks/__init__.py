"""Measurements of localrt, run from the checkout's root: ``python -m benchmarks.NAME``.

``compare`` measures two checkouts by turns; ``published`` puts forecasts beside published speeds.
Results go to ``benchmarks/results``; ``tables`` makes the docs' tables of them.
"""
