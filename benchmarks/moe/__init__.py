"""Mixtures of experts: kernels, caches and schedulers, experts on the SSD, plans."""
