"""Shared by benchmarks: command lines, records, tables, timing, random weights."""
