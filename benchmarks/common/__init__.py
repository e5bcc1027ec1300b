"""What several benchmarks share: command lines, records, tables, timing, random weights."""
