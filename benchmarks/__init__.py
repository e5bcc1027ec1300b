"""Measurements of localrt, run from the checkout's root: ``python -m benchmarks.NAME``.

``common`` has what all share: a command line, turns and medians, a result file with a row for each
thing measured, and the table of it. A measurement is a page of what is special to it, with its
table. Results go to ``benchmarks/results``; ``tables`` makes the docs' tables of them.
"""
