"""The benchmark: engines side by side on one workload, each in a process of its own."""
